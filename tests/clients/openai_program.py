"""The openai package against a base URL; prints what it was answered, as JSON."""

import json
import sys

import openai

client = openai.OpenAI(base_url=sys.argv[1], api_key="none", max_retries=0)
[model] = client.models.list()
assert client.models.retrieve(model.id).id == model.id
said = [{"role": "user", "content": "hello"}]
settings = {"model": model.id, "max_tokens": 6, "seed": 1}
in_time = {"Request-Timeout-Ms": "60000"}
raw = client.chat.completions.with_raw_response.create(
    messages=said, service_tier="flex", extra_headers=in_time, **settings
)
whole = raw.parse()
with client.chat.completions.create(
    messages=said, stream=True, stream_options={"include_usage": True}, **settings
) as events:
    chunks = list(events)
text = client.completions.create(prompt="hello", logprobs=0, **settings)
streamed = [event.choices[0].text for event in client.completions.create(prompt="hello", stream=True, **settings)]
refused = {}
for name, value in (("temperature", 3), ("suffix", "a"), ("response_format", "json")):
    try:
        client.completions.create(prompt="hello", extra_body={name: value}, **settings)
    except openai.BadRequestError as error:
        refused[name] = error.param
try:
    client.completions.create(prompt="hello", model="other")
except openai.NotFoundError as error:
    refused["model"] = error.code
print(
    json.dumps(
        {
            "chat": whole.choices[0].message.content,
            "chat_streamed": "".join(one.choices[0].delta.content or "" for one in chunks if one.choices),
            "usage": chunks[-1].usage.model_dump(),
            "whole_usage": whole.usage.model_dump(),
            "finish_reason": whole.choices[0].finish_reason,
            "text": text.choices[0].text,
            "text_streamed": "".join(streamed),
            "num_tokens": len(text.choices[0].logprobs.tokens) if text.choices[0].logprobs else None,
            "refused": refused,
            "request_id": raw.headers["x-request-id"],
            "tiers": [whole.service_tier, chunks[0].service_tier],
        }
    )
)
