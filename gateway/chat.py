"""/v1/chat/completions: its fields, and its objects."""

import json
from collections.abc import Sequence
from typing import Any

from baton import Chunk, Completion
from baton.results import TokenLogprobs
from gateway import fields
from gateway.generation import Dialect
from wire.errors import InvalidRequest

FIELDS = {
    **fields.COMMON,
    "messages": fields.messages,
    "max_completion_tokens": fields.whole(fields.INT64),
    "logprobs": fields.flag,
    "top_logprobs": fields.whole(fields.INT32),
}


class ChatDialect(Dialect):
    """The objects of chats."""

    fields = FIELDS
    object_name = "chat.completion"
    event_name = "chat.completion.chunk"
    id_prefix = "chatcmpl"

    def __init__(self) -> None:
        self._begun: set[int] = set()

    def take_prompts(self, taken: dict[str, Any]) -> list[Any]:
        if "messages" not in taken:
            raise InvalidRequest("messages", "is missing")
        if "max_completion_tokens" in taken:
            taken["max_tokens"] = taken.pop("max_completion_tokens")
        wanted, num_top = taken.pop("logprobs", False), taken.pop("top_logprobs", None)
        if num_top and not wanted:
            raise InvalidRequest("top_logprobs", "wants logprobs to be true")
        if wanted:
            taken["logprobs"] = num_top or 0
        return [taken.pop("messages")]

    def choice(self, completion: Completion, index: int, number: int) -> dict[str, Any]:
        choice = completion.choices[index]
        return {
            "index": number,
            "message": {"role": "assistant", "content": choice.text, "refusal": None},
            "logprobs": {"content": _logprobs(choice.logprobs)} if choice.logprobs else None,
            "finish_reason": choice.finish_reason and choice.finish_reason.value,
        }

    def event(self, chunk: Chunk, number: int) -> str:
        role = "" if number in self._begun else '"role":"assistant",'
        self._begun.add(number)
        logprobs = json.dumps({"content": _logprobs(chunk.logprobs)}) if chunk.logprobs else "null"
        delta = f'{{{role}"content":{json.dumps(chunk.text)}}}'
        return f'{{"index":{number},"delta":{delta},"logprobs":{logprobs},"finish_reason":null}}'

    def last_event(self, completion: Completion, index: int, number: int) -> str:
        reason = completion.choices[index].finish_reason
        told = {"index": number, "delta": {}, "logprobs": None, "finish_reason": reason and reason.value}
        return json.dumps(told)


def _logprobs(logprobs: Sequence[TokenLogprobs]) -> list[dict[str, Any]]:
    return [
        _token(one.token, one.chosen)
        | {"top_logprobs": [_token(name, value) for name, (_, value) in zip(one.top_tokens, one.top, strict=True)]}
        for one in logprobs
    ]


def _token(token: bytes, logprob: float) -> dict[str, Any]:
    return {"token": token.decode(errors="replace"), "logprob": logprob, "bytes": list(token)}
