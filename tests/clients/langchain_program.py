"""The langchain-openai package: chats, typed answers and a forced tool; prints what it was answered, as JSON."""

import json
import sys

from langchain_openai import ChatOpenAI
from pets import Answer, Look

settings = {"base_url": sys.argv[1], "api_key": "none", "model": "smollm2", "seed": 1, "max_retries": 0}
model = ChatOpenAI(max_tokens=6, **settings)
whole = model.invoke("hello")
chunks = [chunk.content for chunk in model.stream("hello")]
longer = ChatOpenAI(max_tokens=200, **settings)
methods = ("json_schema", "function_calling")
typed = [longer.with_structured_output(Answer, method=one).invoke("hello").model_dump() for one in methods]
[call] = longer.bind_tools([Look], tool_choice="Look", parallel_tool_calls=False).invoke("hello").tool_calls
over = ChatOpenAI(max_tokens=200, use_responses_api=True, **{**settings, "seed": None})
print(
    json.dumps(
        {
            "chat": whole.content,
            "chat_streamed": "".join(chunks),
            "usage": whole.usage_metadata,
            "typed": [*typed, over.with_structured_output(Answer, method="json_schema").invoke("hello").model_dump()],
            "call": [call["name"], call["args"]],
        }
    )
)
