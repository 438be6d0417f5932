"""/v1/completions: its fields, and its objects."""

import json
from collections.abc import Sequence
from itertools import accumulate
from math import isnan
from typing import Any

from baton import Chunk
from baton.results import Choice, TokenLogprobs
from gateway import fields, formats
from gateway.choices import ChoicesDialect
from wire.errors import InvalidRequest

FIELDS = {
    **fields.COMMON,
    **formats.FIELDS,
    "prompt": fields.prompts,
    "logprobs": fields.int32,
    "echo": fields.flag,
}
MAX_ECHOED_LOGPROBS = 5
"""Bound on the likeliest tokens at each token of an echoed prompt; OpenAI's is the same."""


class CompletionsDialect(ChoicesDialect):
    """The objects of text completions."""

    fields = FIELDS
    wanted = "prompt"
    object_name = "text_completion"
    event_name = "text_completion"
    id_prefix = "cmpl"
    has_one_prompt = False

    def __init__(self) -> None:
        self.sent = {"text": "prompt", "token_ids": "prompt", "prompt_logprobs": "logprobs"}
        self._lens: dict[int, int] = {}
        self._has_logprobs = False

    def take_prompts(self, taken: dict[str, Any]) -> list[Any]:
        given: list[Any] = taken.pop("prompt")
        num_top = taken.get("logprobs")
        self._has_logprobs = num_top is not None
        if taken.get("echo") and num_top is not None:
            if num_top > MAX_ECHOED_LOGPROBS:
                raise InvalidRequest("logprobs", f"at most {MAX_ECHOED_LOGPROBS} with echo")
            taken["prompt_logprobs"] = num_top
        return given

    def logprobs(self, chunk: Chunk, numbers: Sequence[int]) -> dict[str, list[Any]] | None:
        """Describes tokens in parallel lists. The first token of an echoed prompt has null in two lists."""
        if not (chunk.logprobs and self._has_logprobs):
            return None
        texts = [_spell(one.token) for one in chunk.logprobs]
        offsets = list(accumulate(map(len, texts), initial=self._lens.get(numbers[0], 0)))
        self._lens |= dict.fromkeys(numbers, offsets.pop())
        return {
            "tokens": texts,
            "token_logprobs": [None if isnan(one.chosen) else one.chosen for one in chunk.logprobs],
            "top_logprobs": [_likeliest(one, text) for one, text in zip(chunk.logprobs, texts, strict=True)],
            "text_offset": offsets,
        }

    def choice(self, choice: Choice, text: str, number: int) -> dict[str, Any]:
        return {"index": number, "text": text, "finish_reason": choice.finish_reason and choice.finish_reason.value}

    def event(self, text: str, number: int, logprobs: str) -> str:
        return f'{{"index":{number},"text":{json.dumps(text)},"logprobs":{logprobs},"finish_reason":null}}'

    def last_event(self, choice: Choice, number: int) -> str:
        return json.dumps({**self.choice(choice, "", number), "logprobs": None})


def _likeliest(ranked: TokenLogprobs, text: str) -> dict[str, float] | None:
    if isnan(ranked.chosen):
        return None
    top = {_spell(name): value for name, (_, value) in zip(ranked.top_tokens, ranked.top, strict=True)}
    return top | {text: ranked.chosen}


def _spell(token: bytes) -> str:
    """Writes a token as text; part of a character by its bytes, as OpenAI does."""
    try:
        return token.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token)
