// The openai package for Node and Vercel's ai against a base URL; prints what they were answered, as JSON.
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateText, streamText } from "ai";
import OpenAI from "openai";

const baseURL = process.argv[2];
const messages = [{ role: "user", content: "hello" }];
const client = new OpenAI({ baseURL, apiKey: "none", maxRetries: 0 });
const settings = { model: "demo", messages, max_tokens: 6, seed: 1 };
const whole = await client.chat.completions.create(settings);
let streamed = "";
for await (const event of await client.chat.completions.create({ ...settings, stream: true })) {
  streamed += event.choices[0].delta.content ?? "";
}
const refused = await client.chat.completions.create({ ...settings, temperature: 3 }).catch((error) => error.param);
const model = createOpenAICompatible({ name: "baton", baseURL, apiKey: "none" }).chatModel("demo");
const asked = { model, prompt: "hello", maxOutputTokens: 6, seed: 1, maxRetries: 0 };
const generated = await generateText(asked);
let vercelStreamed = "";
for await (const text of streamText(asked).textStream) vercelStreamed += text;
console.log(
  JSON.stringify({
    chat: whole.choices[0].message.content,
    streamed,
    refused,
    vercel: generated.text,
    vercelStreamed,
    tokens: generated.usage.outputTokens,
  }),
);
