"""The instructor package over both dialects: forced tools, schemas, and partial objects; prints what it parsed."""

import json
import sys

import anthropic
import instructor
import openai
from pets import Answer

said = [{"role": "user", "content": "Tom is a dog. Lucy is a parrot. Who flies?"}]
asked = {"model": "smollm2", "messages": said, "response_model": Answer, "max_retries": 0, "max_tokens": 200}
client = openai.OpenAI(base_url=sys.argv[1], api_key="none", max_retries=0)
other = anthropic.Anthropic(base_url=sys.argv[1].removesuffix("/v1"), api_key="none", max_retries=0)
clients = {
    "tools": instructor.from_openai(client, mode=instructor.Mode.TOOLS),
    "schema": instructor.from_openai(client, mode=instructor.Mode.JSON_SCHEMA),
    "anthropic": instructor.from_anthropic(other),
}
answers = {name: one.create(**asked).model_dump() for name, one in clients.items()}
*_, last = clients["tools"].create_partial(**asked)
print(json.dumps({**answers, "partial": last.model_dump()}))
