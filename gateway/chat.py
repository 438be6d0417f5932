"""/v1/chat/completions: its fields, and its objects."""

import json
from collections.abc import Sequence
from typing import Any

from baton import Chunk
from baton.results import Choice, TokenLogprobs
from gateway import conversation, fields, formats
from gateway.choices import ChoicesDialect
from gateway.conversation import AnswerParts, Conversation, new_call_id
from gateway.generation import Generation
from text.answer.answer import Part
from text.answer.calls import CallBegun, Reasoning
from text.answer.formats import NO_FORMATS, AnswerFormats
from wire.errors import InvalidRequest

FIELDS = {
    **fields.COMMON,
    **formats.FIELDS,
    **conversation.FIELDS,
    "messages": fields.messages,
    "max_completion_tokens": fields.int64,
    "tools": fields.tools,
    "tool_choice": fields.tool_choice,
    "reasoning_effort": fields.reasoning_effort,
    "continue_final_message": fields.flag,
    "add_generation_prompt": fields.flag,
    "logprobs": fields.flag,
    "top_logprobs": fields.int32,
}


class ChatDialect(ChoicesDialect):
    """The objects of chats. `answer_formats`: the model's."""

    fields = FIELDS
    wanted = "messages"
    object_name = "chat.completion"
    event_name = "chat.completion.chunk"
    id_prefix = "chatcmpl"
    has_one_prompt = True

    def __init__(self, answer_formats: AnswerFormats = NO_FORMATS) -> None:
        self.sent = {"prompt": "messages"}
        self._begun: set[int] = set()
        self._conversation = Conversation(answer_formats)

    def begin(self, generation: Generation) -> None:
        super().begin(generation)
        self._answers = [_Message(self._conversation.new_answer()) for _ in range(generation.num_choices)]

    def take_prompts(self, taken: dict[str, Any]) -> list[Any]:
        self.sent |= fields.rename(taken, {"max_completion_tokens": "max_tokens"})
        wanted, num_top = taken.pop("logprobs", False), taken.pop("top_logprobs", None)
        if num_top and not wanted:
            raise InvalidRequest("top_logprobs", "wants logprobs to be true")
        if wanted:
            taken["logprobs"] = num_top or 0
            self.sent["logprobs"] = "logprobs" if num_top is None else "top_logprobs"
        self._conversation.take(taken)
        continues = taken.get("continue_final_message", False)
        if taken.pop("add_generation_prompt", not continues) == continues:
            raise InvalidRequest("add_generation_prompt", "must be the opposite of continue_final_message")
        return [taken.pop("messages")]

    def logprobs(self, chunk: Chunk, numbers: Sequence[int]) -> dict[str, list[Any]] | None:
        return {"content": _logprobs(chunk.logprobs)} if chunk.logprobs else None

    def choice(self, choice: Choice, text: str, number: int) -> dict[str, Any]:
        answer = self._answers[number]
        message = {"role": "assistant", "refusal": None, **answer.whole(text)}
        return {"index": number, "message": message, "finish_reason": answer.parts.reason_of(choice)}

    def event(self, text: str, number: int, logprobs: str) -> str:
        role = "" if number in self._begun else '"role":"assistant",'
        self._begun.add(number)
        delta = f"{{{role}{json.dumps(self._answers[number].feed(text))[1:]}"
        return f'{{"index":{number},"delta":{delta},"logprobs":{logprobs},"finish_reason":null}}'

    def last_event(self, choice: Choice, number: int) -> str:
        answer = self._answers[number]
        delta = answer.flush()
        return json.dumps(
            {"index": number, "delta": delta, "logprobs": None, "finish_reason": answer.parts.reason_of(choice)}
        )


class _Message:
    """The answer of one choice in OpenAI's form, in parts as they come."""

    def __init__(self, parts: AnswerParts) -> None:
        self.parts = parts
        self._num_calls = 0

    def feed(self, text: str) -> dict[str, Any]:
        """Returns the delta for new text."""
        return {"content": "", **self._delta(self.parts.feed(text))}

    def flush(self) -> dict[str, Any]:
        """Returns the delta that was held back."""
        return self._delta(self.parts.flush())

    def whole(self, text: str) -> dict[str, Any]:
        """Returns the fields of a message with this text; beside calls an empty content is None."""
        delta = self._delta([*self.parts.feed(text), *self.parts.flush()])
        for one in delta.get("tool_calls", ()):
            del one["index"]
        return {"content": None if "tool_calls" in delta else "", **delta}

    def _delta(self, parts: Sequence[Part]) -> dict[str, Any]:
        texts, calls = {"content": "", "reasoning_content": ""}, dict[int, dict[str, Any]]()
        for part in parts:
            if isinstance(part, str):
                texts["content"] += part
            elif isinstance(part, Reasoning):
                texts["reasoning_content"] += part.text
            elif isinstance(part, CallBegun):
                calls[self._num_calls] = _call(part.name, self._num_calls)
                self._num_calls += 1
            else:
                last = self._num_calls - 1
                call = calls.setdefault(last, {"index": last, "function": {"arguments": ""}})
                call["function"]["arguments"] += part.text
        told = {name: text for name, text in texts.items() if text}
        return {**told, "tool_calls": [*calls.values()]} if calls else told


def _call(name: str, index: int) -> dict[str, Any]:
    return {"index": index, "id": new_call_id(), "type": "function", "function": {"name": name, "arguments": ""}}


def _logprobs(logprobs: Sequence[TokenLogprobs]) -> list[dict[str, Any]]:
    return [
        _token(one.token, one.chosen)
        | {"top_logprobs": [_token(name, value) for name, (_, value) in zip(one.top_tokens, one.top, strict=True)]}
        for one in logprobs
    ]


def _token(token: bytes, logprob: float) -> dict[str, Any]:
    return {"token": token.decode(errors="replace"), "logprob": logprob, "bytes": list(token)}
