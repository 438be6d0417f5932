"""The pydantic-ai package over OpenAI's dialects: answers by tools and by schemas; prints what it parsed."""

import asyncio
import json
import sys

from pets import Answer
from pydantic_ai import Agent, NativeOutput, ToolOutput
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider

PROMPT = "Tom is a dog. Lucy is a parrot. Who flies?"
openai = OpenAIProvider(base_url=sys.argv[1], api_key="none")
models = {
    "chats": OpenAIChatModel("smollm2", provider=openai),
    "responses": OpenAIResponsesModel("smollm2", provider=openai),
}


async def ask_all() -> dict[str, object]:
    """Asks over each dialect, by a tool and by a schema, and streams a text."""
    answers = {}
    for name, model in models.items():
        outputs = {"tool": ToolOutput(Answer), "schema": NativeOutput(Answer)}
        for kind, output in outputs.items():
            agent = Agent(model, output_type=output, retries=0, model_settings={"max_tokens": 200})
            answers[f"{name} {kind}"] = (await agent.run(PROMPT)).output.model_dump()
    plain = Agent(models["chats"], model_settings={"max_tokens": 6, "seed": 1})
    async with plain.run_stream("hello") as streamed:
        return {"answers": answers, "streamed": "".join([text async for text in streamed.stream_text(delta=True)])}


print(json.dumps(asyncio.run(ask_all())))
