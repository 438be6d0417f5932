"""The litellm package against a base URL; prints what it was answered, as JSON."""

import json
import sys

import litellm

said = [{"role": "user", "content": "hello"}]
settings = {"api_base": sys.argv[1], "api_key": "none", "model": "openai/demo", "max_tokens": 6, "seed": 1}
whole = litellm.completion(messages=said, **settings)
chunks = list(litellm.completion(messages=said, stream=True, stream_options={"include_usage": True}, **settings))
refused = None
try:
    litellm.completion(messages=said, **{**settings, "temperature": 3})
except litellm.BadRequestError as error:
    refused = error.status_code
print(
    json.dumps(
        {
            "chat": whole.choices[0].message.content,
            "chat_streamed": "".join(one.choices[0].delta.content or "" for one in chunks if one.choices),
            "cached_tokens": whole.usage.prompt_tokens_details.cached_tokens,
            "refused": refused,
        }
    )
)
