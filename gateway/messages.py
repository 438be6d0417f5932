"""/v1/messages: Anthropic's fields, objects and errors."""

import json
import re
from collections.abc import Mapping
from functools import partial
from typing import Any, Literal

from baton.results import Choice
from gateway import conversation, fields, formats
from gateway.conversation import AnswerBlock, BlockKind, BlocksDialect, Event
from gateway.unread import BILLING, SERVICES, leave_out
from httpd.errors import describe, message_of
from wire.errors import BatonError, Lengths
from wire.typed_reader import Misfit, Read, list_of, reader_of


def turns(value: Any) -> list[dict[str, Any]]:
    """Reads messages into turns: a turn for the message, and a turn for each tool result in it."""
    return [turn for one in _READ_MESSAGES(value) for turn in one]


def tool_choice(value: Any) -> dict[str, Any]:
    """Reads the tool choice into the fields of chats."""
    taken = _CHOICE(value)
    words: dict[str, Any] = {"any": "required", "tool": {"name": taken.get("name")}}
    chosen = words.get(taken["type"], taken["type"])
    single = {"parallel_tool_calls": False} if taken.get("disable_parallel_tool_use") else {}
    return {"tool_choice": chosen, **single}


def thinking(value: Any) -> dict[str, Any]:
    """Reads settings of thinking. variables: the chat template's."""
    taken = _THINKING(value)
    return {
        **taken,
        "variables": {} if taken["type"] == "adaptive" else {"enable_thinking": taken["type"] == "enabled"},
    }


def envelope(error: BatonError) -> bytes:
    """Writes an error as the object that Anthropic's clients read."""
    kind = _ERRORS.get(error.status.http, describe(error)["type"])
    return json.dumps({"type": "error", "error": {"type": kind, "message": message_of(error, _words)}}).encode()


def _words(lengths: Lengths) -> str:
    """Writes Anthropic's words for a context that is too short: clients read the numbers in them."""
    if not lengths.output:
        return f"prompt is too long: {lengths.prompt} tokens > {lengths.limit - 1} maximum: "
    return (
        f"input length and `max_tokens` exceed context limit: {lengths.prompt} + {lengths.output} > {lengths.limit},"
        f" decrease input length or `max_tokens` and try again: "
    )


def _message(value: Any) -> list[dict[str, Any]]:
    """Reads a message into turns."""
    taken = _MESSAGE(value)
    made = [turn for block in taken["content"] if (turn := _turn(taken["role"], block))]
    return conversation.joined(made, ("user", "assistant", "system"))


def _content(value: Any) -> list[dict[str, Any]]:
    """Reads a text, or blocks."""
    return [{"text": fields.text(value)}] if isinstance(value, str) else _READ_BLOCKS(value)


def _turn(role: str, block: Mapping[str, Any]) -> dict[str, Any]:
    """Makes a turn of a block; nothing of redacted thinking."""
    match block:
        case {"text": text}:
            return {"role": role, "content": text}
        case {"thinking": thoughts}:
            return {"role": role, "content": "", "reasoning_content": thoughts}
        case {"input": given}:
            return {"role": role, "content": "", "tool_calls": [fields.call_json(block["name"], given, id=block["id"])]}
        case {"tool_use_id": answered}:
            return {"role": "tool", "content": block.get("content", ""), "tool_call_id": answered}
    return {}


def _tool(value: Any) -> list[dict[str, Any]]:
    taken = _TOOL(value)
    function = {name: taken[name] for name in ("name", "description", "strict") if name in taken}
    return [{"type": "function", "function": {**function, "parameters": taken["input_schema"]}}]


def _system(value: Any) -> str:
    """Reads the system prompt, without the billing line before it, which would change the names of all blocks."""
    whole: str = _texts(value)
    line = _BILLING_LINE.match(value if isinstance(value, str) else value[0]["text"])
    if line:
        leave_out(BILLING)
    return whole[line.end() :] if line else whole


_DELTAS = {
    BlockKind.TEXT: ("text_delta", "text"),
    BlockKind.REASONING: ("thinking_delta", "thinking"),
    BlockKind.CALL: ("input_json_delta", "partial_json"),
}
_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
_texts = fields.content_of("text")
_BILLING_LINE = re.compile(rf"{BILLING}:( ?[\w.-]+=[^;\s]*;)+ *(\n+|$)")
_ERRORS = {413: "request_too_large", 500: "api_error", 503: "overloaded_error", 504: "timeout_error"}
_BLOCKS = {
    "text": fields.object_of({"type": fields.text, "text": fields.text}, "text"),
    "thinking": fields.object_of(dict.fromkeys(("type", "thinking", "signature"), fields.text), "thinking"),
    "redacted_thinking": fields.object_of(dict.fromkeys(("type", "data"), fields.text)),
    "tool_use": fields.object_of(
        {**dict.fromkeys(("type", "id", "name"), fields.text), "input": fields.free_object}, "id", "name", "input"
    ),
    "tool_result": fields.object_of(
        {
            **dict.fromkeys(("type", "tool_use_id"), fields.text),
            "content": lambda value: "" if value == [] else _texts(value),
            "is_error": fields.flag,
        },
        "tool_use_id",
    ),
}
_READ_BLOCKS = fields.turns_of(fields.by_type(_BLOCKS), "blocks, or a text")
_MESSAGE = fields.object_of(
    {"role": reader_of(Literal["user", "assistant", "system"]), "content": _content}, "role", "content"
)
_READ_MESSAGES = fields.turns_of(_message, "messages")
_function_name = partial(fields.function_name, max_chars=128)
_TOOL = fields.object_of(
    {
        "type": reader_of(Literal["custom"]),
        "input_schema": fields.free_object,
        "eager_input_streaming": fields.flag,
        **{name: read for name, read in fields.FUNCTION.items() if name != "parameters"},
        "name": _function_name,
    },
    "name",
    "input_schema",
)
_OF_CHOICES: dict[str, Read] = {"type": fields.text, "disable_parallel_tool_use": fields.flag}
_CHOICE = fields.by_type(
    {
        **dict.fromkeys(("auto", "any", "none"), fields.object_of(_OF_CHOICES)),
        "tool": fields.object_of({**_OF_CHOICES, "name": _function_name}, "name"),
    }
)
_OF_THINKING: dict[str, Read] = {"type": fields.text, "display": reader_of(Literal["summarized"])}
_THINKING = fields.by_type(
    {
        **dict.fromkeys(("adaptive", "disabled"), fields.object_of(_OF_THINKING)),
        "enabled": fields.object_of({**_OF_THINKING, "budget_tokens": fields.int32}, "budget_tokens"),
    }
)
_OF_OPENAI = ("stop", "thinking_token_budget", "service_tier")
FIELDS: dict[str, Read] = {
    **{name: read for name, read in conversation.ONE_ANSWER.items() if name not in _OF_OPENAI},
    "max_tokens": fields.int64,
    "stop_sequences": list_of(fields.text),
    "messages": turns,
    "system": _system,
    "tools": conversation.tools_of(_tool, SERVICES),
    "tool_choice": tool_choice,
    "thinking": thinking,
    "output_config": fields.object_of({"effort": fields.reasoning_effort, "format": formats.text_format}),
    "output_format": formats.text_format,
    "reasoning_effort": fields.reasoning_effort,
}


_SENT = {
    "prompt": "messages",
    "tools[].function": "tools[]",
    "tools[].function.parameters": "tools[].input_schema",
}
_ROUTERS = {
    "output_config.effort": "reasoning_effort",
    "output_config.format": "response_format",
    "output_format": "response_format",
    "stop_sequences": "stop",
    "thinking.budget_tokens": "thinking_token_budget",
}


class MessagesDialect(BlocksDialect):
    """The objects of messages."""

    fields = FIELDS
    wanted = "messages"

    def take_prompts(self, taken: dict[str, Any]) -> list[Any]:
        variables = {**taken.get("thinking", {}).get("variables", {}), **taken.pop("chat_template_kwargs", {})}
        self.sent |= _SENT | fields.rename(taken, _ROUTERS)
        taken |= {"chat_template_kwargs": variables, **taken.pop("tool_choice", {})}
        self._list_tools(taken)
        self._conversation.take(taken)
        system, said = taken.pop("system", None), taken.pop("messages")
        if said and said[-1]["role"] == "assistant":
            taken["continue_final_message"] = True
        return [[{"role": "system", "content": system}, *said] if system else said]

    def first_events(self) -> list[Event]:
        usage = _usage({"prompt_tokens": self.num_prompt_tokens})
        return [{"type": "message_start", "message": self._message([], None, None, usage)}, {"type": "ping"}]

    def opened(self, block: AnswerBlock) -> list[Event]:
        return [{"type": "content_block_start", "index": block.index, "content_block": _content_block(block)}]

    def grown(self, block: AnswerBlock, text: str) -> Event:
        kind, name = _DELTAS[block.kind]
        return {"type": "content_block_delta", "index": block.index, "delta": {"type": kind, name: text}}

    def closed(self, block: AnswerBlock) -> list[Event]:
        return [{"type": "content_block_stop", "index": block.index}]

    def last_events(self, choice: Choice, usage: dict[str, Any]) -> list[Event]:
        whole = self.object(choice, usage)
        delta = {name: whole[name] for name in ("stop_reason", "stop_sequence")}
        return [{"type": "message_delta", "delta": delta, "usage": whole["usage"]}, {"type": "message_stop"}]

    def object(self, choice: Choice, usage: dict[str, Any]) -> dict[str, Any]:
        matched = choice.matched_stop if isinstance(choice.matched_stop, str) else None
        reason = "stop_sequence" if matched else _REASONS[self._answer.reason_of(choice) or "stop"]
        return self._message([_content_block(block) for block in self._blocks], reason, matched, _usage(usage))

    def failed(self, error: BatonError) -> bytes:
        return b"event: error\ndata: " + envelope(error) + b"\n\n"

    def _message(
        self, content: list[dict[str, Any]], reason: str | None, matched: str | None, usage: dict[str, Any]
    ) -> dict[str, Any]:
        named = {"id": f"msg_{self._generation.request_id}", "type": "message", "role": "assistant"}
        ended = {"stop_reason": reason, "stop_sequence": matched, "usage": usage}
        return {**named, "model": self._generation.model, "content": content, **ended}


def _content_block(block: AnswerBlock) -> dict[str, Any]:
    if block.kind is BlockKind.TEXT:
        return {"type": "text", "text": block.text}
    if block.kind is BlockKind.REASONING:
        return {"type": "thinking", "thinking": block.text, "signature": ""}
    return {"type": "tool_use", "id": block.id, "name": block.name, "input": _input(block.text)}


def _input(arguments: str) -> dict[str, Any]:
    """Reads the arguments of a call; empty if the call was cut."""
    try:
        return fields.arguments(arguments)
    except Misfit:
        return {}


def _usage(usage: Mapping[str, Any]) -> dict[str, Any]:
    """Describes usage; cached prompt tokens count apart."""
    num_cached = usage.get("prompt_tokens_details", {}).get("cached_tokens", 0)
    num_thinking = usage.get("completion_tokens_details", {}).get("reasoning_tokens", 0)
    return {
        "input_tokens": usage.get("prompt_tokens", 0) - num_cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": num_cached,
        "output_tokens": usage.get("completion_tokens", 0),
        "output_tokens_details": {"thinking_tokens": num_thinking},
        "service_tier": "standard",
    }
