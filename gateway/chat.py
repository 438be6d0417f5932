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
from text.answer.answer import AnswerParser, Part, Reasoning
from text.answer.calls import CallBegun
from text.answer.formats import NO_FORMATS, AnswerFormats
from wire.errors import InvalidRequest

FIELDS = {
    **fields.COMMON,
    **formats.FIELDS,
    "messages": fields.messages,
    "max_completion_tokens": fields.int64,
    "tools": fields.tools,
    "tool_choice": fields.tool_choice,
    "parallel_tool_calls": fields.flag,
    "reasoning_effort": fields.reasoning_effort,
    "chat_template_kwargs": fields.free_object,
    "thinking_token_budget": fields.int32,
    "continue_final_message": fields.flag,
    "add_generation_prompt": fields.flag,
    "logprobs": fields.flag,
    "top_logprobs": fields.int32,
}
MAX_CALLS = 128


class ChatDialect(Dialect):
    """The objects of chats. `answer_formats`: of the model."""

    fields = FIELDS
    object_name = "chat.completion"
    event_name = "chat.completion.chunk"
    id_prefix = "chatcmpl"

    def __init__(self, answer_formats: AnswerFormats = NO_FORMATS) -> None:
        self._begun: set[int] = set()
        self._formats = answer_formats
        self._tool_names: frozenset[str] = frozenset()
        self._max_calls = MAX_CALLS
        self._answers: dict[int, _Message] = {}

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
        self._take_reasoning(taken)
        continues = taken.get("continue_final_message", False)
        if taken.pop("add_generation_prompt", not continues) == continues:
            raise InvalidRequest("add_generation_prompt", "must be the opposite of continue_final_message")
        return [taken.pop("messages")]

    def logprobs(self, chunk: Chunk, numbers: Sequence[int]) -> dict[str, list[Any]] | None:
        return {"content": _logprobs(chunk.logprobs)} if chunk.logprobs else None

    def choice(self, choice: Choice, text: str, number: int) -> dict[str, Any]:
        answer = self._answer_of(number)
        message = {"role": "assistant", "refusal": None, **answer.whole(text)}
        return {"index": number, "message": message, "finish_reason": answer.reason_of(choice)}

    def event(self, text: str, number: int, logprobs: str) -> str:
        role = "" if number in self._begun else '"role":"assistant",'
        self._begun.add(number)
        delta = f"{{{role}{json.dumps(self._answer_of(number).feed(text))[1:]}"
        return f'{{"index":{number},"delta":{delta},"logprobs":{logprobs},"finish_reason":null}}'

    def last_event(self, choice: Choice, number: int) -> str:
        answer = self._answer_of(number)
        delta = answer.flush()
        return json.dumps(
            {"index": number, "delta": delta, "logprobs": None, "finish_reason": answer.reason_of(choice)}
        )

    def _take_tools(self, taken: dict[str, Any]) -> None:
        """Gives the tools the router's form; without tools, or with none chosen, nothing is looked for."""
        tools, choice = taken.pop("tools", []), taken.pop("tool_choice", "auto")
        parallel = taken.pop("parallel_tool_calls", True)
        self._max_calls = MAX_CALLS if parallel else 1
        if choice == "none" or (choice == "auto" and not tools):
            return
        taken["tools"] = [json.dumps(one) for one in tools]
        self._tool_names = frozenset(one["function"]["name"] for one in tools)
        named = choice if isinstance(choice, dict) else {"required": choice == "required"}
        taken["tool_choice"] = {**named, "parallel": parallel}

    def _take_reasoning(self, taken: dict[str, Any]) -> None:
        """Gives what steers the template the router's form."""
        effort, variables = taken.pop("reasoning_effort", None), taken.pop("chat_template_kwargs", {})
        if effort is not None:
            if not self._formats.reasoning and effort != "none":
                raise InvalidRequest("reasoning_effort", "the model's chat template knows no channel of reasoning")
            variables = {"reasoning_effort": effort, "enable_thinking": effort != "none", **variables}
        if variables:
            taken["chat_template_kwargs"] = json.dumps(variables)

    def _answer_of(self, number: int) -> "_Message":
        if number not in self._answers:
            parser = AnswerParser(self._formats, self._tool_names)
            self._answers[number] = _Message(parser, self._max_calls)
        return self._answers[number]


class _Message:
    """The answer of one choice in OpenAI's form, in parts as they come. Calls beyond `max_calls` are left out."""

    def __init__(self, parser: AnswerParser, max_calls: int) -> None:
        self._parser = parser
        self._max_calls = max_calls
        self._num_calls = 0

    def feed(self, text: str) -> dict[str, Any]:
        """Returns the delta that new text makes, which has content."""
        return {"content": "", **self._delta(self._parser.feed(text))}

    def flush(self) -> dict[str, Any]:
        """Returns the delta that was held back."""
        return self._delta(self._parser.flush())

    def whole(self, text: str) -> dict[str, Any]:
        """Returns the parts of a message of this text. Without a content it has None for one beside calls."""
        delta = self._delta([*self._parser.feed(text), *self._parser.flush()])
        for one in delta.get("tool_calls", ()):
            del one["index"]
        return {"content": None if "tool_calls" in delta else "", **delta}

    def reason_of(self, choice: Choice) -> str | None:
        reason = choice.finish_reason and choice.finish_reason.value
        return "tool_calls" if self._num_calls and reason == "stop" else reason

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
        kept = [call for index, call in calls.items() if index < self._max_calls]
        return {**told, "tool_calls": kept} if kept else told


def _call(name: str, index: int) -> dict[str, Any]:
    return {"index": index, "id": _new_id(), "type": "function", "function": {"name": name, "arguments": ""}}


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
