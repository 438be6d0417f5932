// The openai package for Node and Vercel's ai against a base URL; prints what they were answered, as JSON.
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateText, Output, streamText, tool } from "ai";
import OpenAI from "openai";
import { zodResponseFormat, zodTextFormat } from "openai/helpers/zod";
import { z } from "zod";

const baseURL = process.argv[2];
const messages = [{ role: "user", content: "hello" }];
const Answer = z.object({ name: z.enum(["Tom", "Lucy"]), is_sure: z.boolean() });
const Look = z.object({
  pet: z.enum(["dog", "cat", "parrot"]),
  times: z.union([z.literal(1), z.literal(2), z.literal(3)]),
});

const client = new OpenAI({ baseURL, apiKey: "none", maxRetries: 0 });
const settings = { model: "smollm2", messages, max_tokens: 6, seed: 1 };
const whole = await client.chat.completions.create(settings);
let streamed = "";
for await (const event of await client.chat.completions.create({ ...settings, stream: true })) {
  streamed += event.choices[0].delta.content ?? "";
}
const refused = await client.chat.completions.create({ ...settings, temperature: 3 }).catch((error) => error.param);
const response_format = zodResponseFormat(Answer, "answer");
const parsed = await client.chat.completions.parse({ ...settings, max_tokens: 200, response_format });
const format = zodTextFormat(Answer, "answer");
const asked = { model: "smollm2", input: "hello", max_output_tokens: 6, seed: 1 };
const responded = await client.responses.create(asked);
const respondedTyped = await client.responses.parse({ ...asked, max_output_tokens: 200, text: { format } });

const provider = createOpenAICompatible({ name: "baton", baseURL, apiKey: "none", supportsStructuredOutputs: true });
const plain = { model: provider.chatModel("smollm2"), prompt: "hello", maxOutputTokens: 6, seed: 1, maxRetries: 0 };
const generated = await generateText(plain);
let vercelStreamed = "";
for await (const text of streamText(plain).textStream) vercelStreamed += text;
const longer = { ...plain, maxOutputTokens: 200 };
const typed = await generateText({ ...longer, output: Output.object({ schema: Answer }) });
const tools = { look: tool({ description: "Looks at a pet.", inputSchema: Look }) };
const called = await generateText({ ...longer, tools, toolChoice: "required" });
console.log(
  JSON.stringify({
    chat: whole.choices[0].message.content,
    streamed,
    responded: responded.output_text,
    refused,
    parsed: [parsed.choices[0].message.parsed, respondedTyped.output_parsed],
    vercel: generated.text,
    vercelStreamed,
    tokens: generated.usage.outputTokens,
    typed: typed.output,
    calls: called.toolCalls.map((call) => call.input),
  }),
);
