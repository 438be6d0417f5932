"""/v1/completions: its fields, and its objects."""

import json
from collections.abc import Sequence
from itertools import accumulate
from math import isnan
from typing import Any

from baton import Chunk, Completion
from baton.results import TokenLogprobs
from gateway import fields
from gateway.generation import Dialect
from wire.errors import InvalidRequest

FIELDS = {
    **fields.COMMON,
    "prompt": fields.prompts,
    "logprobs": fields.whole(fields.INT32),
    "echo": fields.flag,
}
MAX_ECHOED_LOGPROBS = 5
"""Of each token of a prompt, OpenAI's own bound: the answers to sixteen long prompts are in memory at a time."""


class CompletionsDialect(Dialect):
    """The objects of text completions."""

    fields = FIELDS
    object_name = "text_completion"
    event_name = "text_completion"
    id_prefix = "cmpl"

    def __init__(self) -> None:
        self._lens: dict[int, int] = {}
        self._has_logprobs = False

    def take_prompts(self, taken: dict[str, Any]) -> list[Any]:
        if "prompt" not in taken:
            raise InvalidRequest("prompt", "is missing")
        given: list[Any] = taken.pop("prompt")
        num_top = taken.get("logprobs")
        self._has_logprobs = num_top is not None
        if taken.get("echo") and num_top is not None:
            if num_top > MAX_ECHOED_LOGPROBS:
                raise InvalidRequest("logprobs", f"at most {MAX_ECHOED_LOGPROBS} with echo")
            taken["prompt_logprobs"] = num_top
        return given

    def choice(self, completion: Completion, index: int, number: int) -> dict[str, Any]:
        choice, prompt = completion.choices[index], completion.prompt
        logprobs = [one for part in prompt for one in part.logprobs] if self._has_logprobs else []
        logprobs += choice.logprobs
        return {
            "index": number,
            "text": "".join(part.text for part in prompt) + choice.text,
            "logprobs": _logprobs(logprobs, 0) if logprobs else None,
            "finish_reason": choice.finish_reason and choice.finish_reason.value,
        }

    def event(self, chunk: Chunk, number: int) -> str:
        logprobs = "null"
        if chunk.logprobs and self._has_logprobs:
            logprobs = json.dumps(_logprobs(chunk.logprobs, self._lens.get(number, 0)))
            self._lens[number] = self._lens.get(number, 0) + sum(len(_spell(one.token)) for one in chunk.logprobs)
        return f'{{"index":{number},"text":{json.dumps(chunk.text)},"logprobs":{logprobs},"finish_reason":null}}'

    def last_event(self, completion: Completion, index: int, number: int) -> str:
        reason = completion.choices[index].finish_reason
        told = {"index": number, "text": "", "logprobs": None, "finish_reason": reason and reason.value}
        return json.dumps(told)


def _logprobs(logprobs: Sequence[TokenLogprobs], start: int) -> dict[str, Any]:
    """Describes tokens in lists beside one another. start: characters before the first of them.

    The first token of an echoed prompt has null for both.
    """
    texts = [_spell(one.token) for one in logprobs]
    offsets = list(accumulate(map(len, texts), initial=start))[:-1]
    likeliest = [
        {_spell(name): value for name, (_, value) in zip(one.top_tokens, one.top, strict=True)} | {text: one.chosen}
        if not isnan(one.chosen)
        else None
        for one, text in zip(logprobs, texts, strict=True)
    ]
    return {
        "tokens": texts,
        "token_logprobs": [None if isnan(one.chosen) else one.chosen for one in logprobs],
        "top_logprobs": likeliest,
        "text_offset": offsets,
    }


def _spell(token: bytes) -> str:
    """Writes a token as text; one that is no whole character by its bytes, as OpenAI's do."""
    try:
        return token.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token)
