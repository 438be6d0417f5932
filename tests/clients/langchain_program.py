"""The langchain-openai package against a base URL; prints what it was answered, as JSON."""

import json
import sys

from langchain_openai import ChatOpenAI

model = ChatOpenAI(base_url=sys.argv[1], api_key="none", model="demo", max_tokens=6, seed=1, max_retries=0)
whole = model.invoke("hello")
chunks = [chunk.content for chunk in model.stream("hello")]
print(json.dumps({"chat": whole.content, "chat_streamed": "".join(chunks), "usage": whole.usage_metadata}))
