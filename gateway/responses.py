"""/v1/responses: its fields, and its objects. Nothing is kept: a client sends the whole conversation each time."""

import time
from collections.abc import Mapping
from hashlib import sha256
from typing import Any, Literal

from baton.results import Choice
from gateway import conversation, fields, formats
from gateway.conversation import AnswerBlock, BlockKind, BlocksDialect, Event
from gateway.unread import PROGRAMS_OWN, SERVICES
from httpd.errors import describe
from wire.errors import BatonError
from wire.sampling import FinishReason
from wire.typed_reader import Read, list_of, reader_of


def input_items(value: Any) -> list[dict[str, Any]]:
    """Reads a text, or items, into turns; adjacent items of the assistant become one turn."""
    if isinstance(value, str):
        return [{"role": "user", "content": fields.text(value)}]
    return conversation.joined([turn for item in _READ_ITEMS(value) if (turn := _turn(item))], ("assistant",))


def tool_choice(value: Any) -> str | dict[str, Any]:
    """Reads a word, or the function to call."""
    return {"name": _flat_name(_NAMED(value))} if isinstance(value, dict) else str(fields.choice_word(value))


def _function(value: Any) -> list[dict[str, Any]]:
    taken = _TOOL(value)
    return [{"type": taken.pop("type"), "function": taken}]


def _namespace(value: Any) -> list[dict[str, Any]]:
    """Reads the functions of a namespace, under flat names; the first has the namespace's description, too."""
    taken = _NAMESPACE(value)
    tools: list[dict[str, Any]] = [tool for functions in taken["tools"] for tool in functions]
    for tool in tools:
        tool["namespace"] = {"namespace": taken["name"], "name": tool["function"]["name"]}
        tool["function"]["name"] = _flat_name(tool["namespace"])
    for function in (tool["function"] for tool in tools[:1] if "description" in taken):
        function["description"] = "\n".join(filter(None, (taken["description"], function.get("description"))))
    return tools


def _flat_name(named: Mapping[str, str]) -> str:
    """Returns the name by which a model calls a namespace's function: both names, in at most 64 characters."""
    whole = "__".join(named[part] for part in ("namespace", "name") if part in named)
    return whole if len(whole) <= 64 else f"{whole[:55]}_{sha256(whole.encode()).hexdigest()[:8]}"


def _turn(item: Mapping[str, Any]) -> dict[str, Any]:
    """Makes a turn of an item; nothing of reasoning without text."""
    match item:
        case {"role": role}:
            return {"role": role, "content": item["content"]}
        case {"arguments": given}:
            call = fields.call_json(_flat_name(item), given, id=item["call_id"])
            return {"role": "assistant", "content": "", "tool_calls": [call]}
        case {"output": output}:
            return {"role": "tool", "content": output, "tool_call_id": item["call_id"]}
        case {"content": thoughts} if thoughts:
            return {"role": "assistant", "content": "", "reasoning_content": thoughts}
    return {}


_STREAMED = {
    BlockKind.TEXT: "output_text",
    BlockKind.REASONING: "reasoning_text",
    BlockKind.CALL: "function_call_arguments",
}
_UNUSED: dict[str, Any] = {
    "background": False,
    "error": None,
    "incomplete_details": None,
    "metadata": {},
    "output": [],
    "previous_response_id": None,
    "store": False,
    "truncation": "disabled",
    "usage": None,
}
_thoughts = fields.content_of("reasoning_text")
_OF_ITEMS: dict[str, Read] = dict.fromkeys(("type", "id", "status"), fields.text)
_ITEMS = {
    "message": fields.object_of(
        {
            **_OF_ITEMS,
            "role": reader_of(Literal["user", "assistant", "system", "developer"]),
            "content": fields.content_of("input_text", "output_text", logprobs=list_of(fields.free_object)),
            "phase": fields.text,
        },
        "role",
        "content",
    ),
    "function_call": fields.object_of(
        {
            **dict.fromkeys(("call_id", "name", "namespace"), fields.text),
            **_OF_ITEMS,
            "arguments": fields.past_arguments,
        },
        *("call_id", "name", "arguments"),
    ),
    "function_call_output": fields.object_of(
        {**_OF_ITEMS, "call_id": fields.text, "output": fields.content_of("input_text")}, "call_id", "output"
    ),
    "reasoning": fields.object_of(
        {
            **_OF_ITEMS,
            "summary": list_of(fields.free_object),
            "content": lambda value: "" if value == [] else _thoughts(value),
            "encrypted_content": fields.text,
        }
    ),
}
_READ_ITEMS = fields.turns_of(fields.by_type(_ITEMS, "message"), "items, or a text")
_TOOL = fields.object_of({"type": fields.function_type, **fields.FUNCTION}, "type", "name")
_NAMESPACE = fields.object_of(
    {
        **dict.fromkeys(("type", "description"), fields.text),
        "name": fields.function_name,
        "tools": list_of(fields.by_type({"function": _function})),
    },
    "name",
    "tools",
)
_NAMED = fields.object_of(
    {"type": fields.function_type, **dict.fromkeys(("name", "namespace"), fields.function_name)}, "name"
)
FIELDS: dict[str, Read] = {
    **conversation.ONE_ANSWER,
    "input": input_items,
    "instructions": fields.text,
    "max_output_tokens": fields.int64,
    "tools": conversation.tools_of(
        fields.by_type({"function": _function, "namespace": _namespace}), SERVICES | PROGRAMS_OWN
    ),
    "tool_choice": tool_choice,
    "text": fields.object_of({"format": formats.text_format}),
    "reasoning": fields.object_of({"effort": fields.reasoning_effort}),
    "reasoning_effort": fields.reasoning_effort,
    "stream_options": fields.object_of({}),
}


_SENT = {
    "messages": "input",
    "prompt": "input",
    "tools[].function": "tools[]",
    "tools[].tools[].function": "tools[].tools[]",
}
_ROUTERS = {
    "max_output_tokens": "max_tokens",
    "reasoning.effort": "reasoning_effort",
    "text.format": "response_format",
}


class ResponsesDialect(BlocksDialect):
    """The objects of responses."""

    fields = FIELDS
    wanted = "input"

    def take_prompts(self, taken: dict[str, Any]) -> list[Any]:
        self._num_events = 0
        self._list_tools(taken)
        self._echoed = _echo(taken)
        self._namespaces = {one["function"]["name"]: one.pop("namespace", {}) for one in taken["tools"]}
        self.sent |= _SENT | fields.rename(taken, _ROUTERS)
        self._conversation.take(taken)
        instructions = taken.pop("instructions", None)
        first = [] if instructions is None else [{"role": "system", "content": instructions}]
        return [[*first, *taken.pop("input")]]

    def first_events(self) -> list[Event]:
        begun = self._response("in_progress")
        return [{"type": f"response.{name}", "response": begun} for name in ("created", "in_progress")]

    def opened(self, block: AnswerBlock) -> list[Event]:
        item = {**self._item(block), "status": "in_progress"}
        if block.kind is BlockKind.CALL:
            return [{"type": "response.output_item.added", "output_index": block.index, "item": item}]
        added = {"type": "response.output_item.added", "output_index": block.index, "item": {**item, "content": []}}
        return [added, {"type": "response.content_part.added", **self._place(block), "part": _part(block)}]

    def grown(self, block: AnswerBlock, text: str) -> Event:
        return {
            "type": f"response.{_STREAMED[block.kind]}.delta",
            **self._place(block),
            **_logprobs(block),
            "delta": text,
        }

    def closed(self, block: AnswerBlock) -> list[Event]:
        place, is_call = self._place(block), block.kind is BlockKind.CALL
        whole = {"arguments" if is_call else "text": block.text}
        done = {"type": f"response.{_STREAMED[block.kind]}.done", **place, **_logprobs(block), **whole}
        part = [] if is_call else [{"type": "response.content_part.done", **place, "part": _part(block)}]
        item = self._item(block)
        return [done, *part, {"type": "response.output_item.done", "output_index": block.index, "item": item}]

    def last_events(self, choice: Choice, usage: dict[str, Any]) -> list[Event]:
        response = self.object(choice, usage)
        return [{"type": f"response.{response['status']}", "response": response}]

    def object(self, choice: Choice, usage: dict[str, Any]) -> dict[str, Any]:
        is_cut = choice.finish_reason is FinishReason.LENGTH
        return self._response("incomplete" if is_cut else "completed") | {
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "output": [self._item(block) for block in self._blocks],
            "usage": _usage(usage),
        }

    def write(self, described: Event) -> bytes:
        numbered = {**described, "sequence_number": self._num_events}
        self._num_events += 1
        return super().write(numbered)

    def failed(self, error: BatonError) -> bytes:
        told = describe(error)
        return self.write({**told, "type": "error", "error": told})

    def _response(self, status: str) -> dict[str, Any]:
        named = {"id": f"resp_{self._generation.request_id}", "object": "response", **self._generation.named}
        return {**named, **_UNUSED, **self._echoed, "status": status}

    def _place(self, block: AnswerBlock) -> dict[str, Any]:
        place = {"item_id": self._item(block)["id"], "output_index": block.index}
        return place if block.kind is BlockKind.CALL else {**place, "content_index": 0}

    def _item(self, block: AnswerBlock) -> dict[str, Any]:
        """Describes a block in its present state."""
        named = {"id": f"{block.kind.value}_{self._generation.request_id}_{block.index}"}
        named["status"] = "incomplete" if block.is_cut else "completed"
        if block.kind is BlockKind.CALL:
            called = {"call_id": block.id, "name": block.name, "arguments": block.text}
            return {**named, "type": "function_call", **called, **self._namespaces.get(block.name, {})}
        if block.kind is BlockKind.REASONING:
            return {**named, "type": "reasoning", "summary": [], "content": [_part(block)]}
        return {**named, "type": "message", "role": "assistant", "content": [_part(block)]}


def _echo(taken: Mapping[str, Any]) -> dict[str, Any]:
    """Describes the settings of a request that its answer repeats."""
    choice, tools = taken.get("tool_choice", "auto"), taken.get("tools", ())
    return {
        "created_at": int(time.time()),
        **{name: taken.get(name) for name in ("instructions", "max_output_tokens", "temperature", "top_p")},
        "parallel_tool_calls": taken.get("parallel_tool_calls", True),
        "tool_choice": {"type": "function", **choice} if isinstance(choice, dict) else choice,
        "tools": [
            {"type": "function", "parameters": None, "strict": None, **one["function"], **one.get("namespace", {})}
            for one in tools
        ],
    }


def _part(block: AnswerBlock) -> dict[str, Any]:
    if block.kind is BlockKind.REASONING:
        return {"type": "reasoning_text", "text": block.text}
    return {"type": "output_text", "text": block.text, "annotations": [], "logprobs": []}


def _logprobs(block: AnswerBlock) -> dict[str, Any]:
    return {"logprobs": []} if block.kind is BlockKind.TEXT else {}


def _usage(usage: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "input_tokens": usage["prompt_tokens"],
        "input_tokens_details": {**usage["prompt_tokens_details"], "cache_write_tokens": 0},
        "output_tokens": usage["completion_tokens"],
        "output_tokens_details": usage.get("completion_tokens_details", {"reasoning_tokens": 0}),
        "total_tokens": usage["total_tokens"],
    }
