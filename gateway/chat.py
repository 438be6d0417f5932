"""/v1/chat/completions: its fields, and its objects."""

import json
import secrets
from collections.abc import Sequence
from string import ascii_letters, digits
from typing import Any

from baton import Chunk
from baton.results import Choice, TokenLogprobs
from gateway import fields, formats
from gateway.generation import Dialect
from gateway.tool_calls import FORMATS, CallParser, ToolCall
from wire.errors import InvalidRequest

FIELDS = {
    **fields.COMMON,
    **formats.FIELDS,
    "messages": fields.messages,
    "max_completion_tokens": fields.int64,
    "tools": fields.tools,
    "tool_choice": fields.tool_choice,
    "parallel_tool_calls": fields.flag,
    "logprobs": fields.flag,
    "top_logprobs": fields.int32,
}
MAX_CALLS = 128


class ChatDialect(Dialect):
    """The objects of chats. `tool_format`: of calls in the model's answers."""

    fields = FIELDS
    object_name = "chat.completion"
    event_name = "chat.completion.chunk"
    id_prefix = "chatcmpl"

    def __init__(self, tool_format: str = "") -> None:
        self._begun: set[int] = set()
        self._tool_format = tool_format
        self._tool_names: frozenset[str] = frozenset()
        self._max_calls = MAX_CALLS
        self._answers: dict[int, _Calls] = {}

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
        self._take_tools(taken)
        return [taken.pop("messages")]

    def logprobs(self, chunk: Chunk, numbers: Sequence[int]) -> dict[str, list[Any]] | None:
        return {"content": _logprobs(chunk.logprobs)} if chunk.logprobs else None

    def choice(self, choice: Choice, text: str, number: int) -> dict[str, Any]:
        calls = self._calls_of(number)
        first, last = calls.feed(text), calls.end()
        message = {"role": "assistant", "content": first["content"] + last, "refusal": None}
        if "tool_calls" in first:
            listed = [{name: one for name, one in call.items() if name != "index"} for call in first["tool_calls"]]
            message |= {"content": message["content"] or None, "tool_calls": listed}
        return {"index": number, "message": message, "finish_reason": calls.reason_of(choice)}

    def event(self, text: str, number: int, logprobs: str) -> str:
        role = "" if number in self._begun else '"role":"assistant",'
        self._begun.add(number)
        gained = self._calls_of(number).feed(text) if self._tool_names else {"content": text}
        delta = f"{{{role}{json.dumps(gained)[1:]}"
        return f'{{"index":{number},"delta":{delta},"logprobs":{logprobs},"finish_reason":null}}'

    def last_event(self, choice: Choice, number: int) -> str:
        calls = self._calls_of(number)
        rest = calls.end()
        delta, reason = {"content": rest} if rest else {}, calls.reason_of(choice)
        return json.dumps({"index": number, "delta": delta, "logprobs": None, "finish_reason": reason})

    def _take_tools(self, taken: dict[str, Any]) -> None:
        """Gives the tools the router's form; without tools, or without a choice of them, nothing is looked for."""
        tools, choice = taken.pop("tools", []), taken.pop("tool_choice", "auto")
        self._max_calls = MAX_CALLS if taken.pop("parallel_tool_calls", True) else 1
        if tools and choice == "auto":
            taken["tools"] = [json.dumps(one) for one in tools]
            self._tool_names = frozenset(one["function"]["name"] for one in tools)

    def _calls_of(self, number: int) -> "_Calls":
        if number not in self._answers:
            form = FORMATS.get(self._tool_format) if self._tool_names else None
            parser = None if form is None else CallParser(form, self._tool_names)
            self._answers[number] = _Calls(parser, self._max_calls)
        return self._answers[number]


class _Calls:
    """Text and tool calls of one choice in OpenAI's form. Calls beyond `max_calls` are left out."""

    def __init__(self, parser: CallParser | None, max_calls: int) -> None:
        self._parser = parser
        self._max_calls = max_calls
        self._num_calls = 0

    def feed(self, text: str) -> dict[str, Any]:
        """Returns the delta that new text makes."""
        found = [text] if self._parser is None else self._parser.feed(text)
        calls = [one for one in found if isinstance(one, ToolCall)][: self._max_calls - self._num_calls]
        numbered = [_call(one, index) for index, one in enumerate(calls, self._num_calls)]
        self._num_calls += len(calls)
        content = "".join(one for one in found if isinstance(one, str))
        return {"content": content, "tool_calls": numbered} if numbered else {"content": content}

    def end(self) -> str:
        """Returns the text that was held back."""
        return "" if self._parser is None else self._parser.flush()

    def reason_of(self, choice: Choice) -> str | None:
        reason = choice.finish_reason and choice.finish_reason.value
        return "tool_calls" if self._num_calls and reason == "stop" else reason


def _call(call: ToolCall, index: int) -> dict[str, Any]:
    function = {"name": call.name, "arguments": call.arguments}
    return {"index": index, "id": _new_id(), "type": "function", "function": function}


def _new_id() -> str:
    """Draws nine letters and digits: templates of Mistral take no other ids."""
    return "".join(secrets.choice(ascii_letters + digits) for _ in range(9))


def _logprobs(logprobs: Sequence[TokenLogprobs]) -> list[dict[str, Any]]:
    return [
        _token(one.token, one.chosen)
        | {"top_logprobs": [_token(name, value) for name, (_, value) in zip(one.top_tokens, one.top, strict=True)]}
        for one in logprobs
    ]


def _token(token: bytes, logprob: float) -> dict[str, Any]:
    return {"token": token.decode(errors="replace"), "logprob": logprob, "bytes": list(token)}
