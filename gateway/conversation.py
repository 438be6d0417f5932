"""Chats in all dialects: settings of an answer, its streamed parts, and the common part of dialects with blocks."""

import json
import re
import secrets
from abc import abstractmethod
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from string import ascii_letters, digits
from typing import Any

from baton import Chunk, Completion
from baton.results import Choice
from gateway import fields
from gateway.choices import usage_of
from gateway.formats import noted
from gateway.generation import ChoiceDraft, Dialect, Generation
from gateway.unread import leave_out
from text.answer.answer import AnswerParser, Part
from text.answer.calls import Arguments, CallBegun, Reasoning
from text.answer.formats import NO_FORMATS, AnswerFormats
from wire.sampling import FinishReason
from wire.typed_reader import Read, list_of

Event = Mapping[str, Any]
MAX_CALLS = 128
FIELDS: dict[str, Read] = {
    "parallel_tool_calls": fields.flag,
    "chat_template_kwargs": fields.free_object,
    "thinking_token_budget": fields.int32,
}
"""The fields of chats in several dialects."""
_DATE = re.compile(r"_20\d{2}_?\d{2}_?\d{2}$")
_OF_CHOICES = ("n", "max_tokens", "return_token_ids", "stream_options", "timeline")
ONE_ANSWER = FIELDS | {name: read for name, read in fields.COMMON.items() if name not in _OF_CHOICES}
"""The fields of endpoints whose answers are blocks."""


class Conversation:
    """The settings of a chat's answer. `answer_formats`: the model's."""

    def __init__(self, answer_formats: AnswerFormats = NO_FORMATS) -> None:
        self._formats = answer_formats
        self._tool_names: frozenset[str] = frozenset()
        self._max_calls = MAX_CALLS

    def take(self, taken: dict[str, Any]) -> None:
        """Gives tools and reasoning the router's form. Raises InvalidRequest."""
        self._take_tools(taken)
        self._take_reasoning(taken)

    def new_answer(self) -> "AnswerParts":
        return AnswerParts(AnswerParser(self._formats, self._tool_names), self._max_calls)

    def _take_tools(self, taken: dict[str, Any]) -> None:
        """Gives the tools the router's form; without tools, or with tool choice "none", calls stay text."""
        tools, choice = taken.pop("tools", []), taken.pop("tool_choice", "auto")
        parallel = taken.pop("parallel_tool_calls", True)
        self._max_calls = MAX_CALLS if parallel else 1
        if choice == "none" or (choice == "auto" and not tools):
            return
        taken["tools"] = [json.dumps(one) for one in tools]
        noted(json.dumps([one for one in tools if choice != "auto" or one["function"].get("strict")]))
        self._tool_names = frozenset(one["function"]["name"] for one in tools)
        named = choice if isinstance(choice, dict) else {"required": choice == "required"}
        taken["tool_choice"] = {**named, "parallel": parallel}

    def _take_reasoning(self, taken: dict[str, Any]) -> None:
        """Gives settings of reasoning the router's form. Effort and budget need a model with a reasoning channel."""
        for name in () if self._formats.reasoning else ("reasoning_effort", "thinking_token_budget"):
            if taken.get(name, "none") != "none":
                leave_out(name)
                del taken[name]
        effort, variables = taken.pop("reasoning_effort", None), taken.pop("chat_template_kwargs", {})
        if effort is not None:
            variables = {"reasoning_effort": effort, "enable_thinking": effort != "none", **variables}
        if variables:
            taken["chat_template_kwargs"] = json.dumps(variables)


class AnswerParts:
    """The answer of one choice, in parts as they come. Calls beyond `max_calls` are left out."""

    def __init__(self, parser: AnswerParser, max_calls: int) -> None:
        self._parser = parser
        self._max_calls = max_calls
        self._num_calls = 0

    def feed(self, text: str) -> list[Part]:
        """Returns the parts of new text."""
        return self._kept(self._parser.feed(text))

    def flush(self) -> list[Part]:
        """Returns the parts that were held back."""
        return self._kept(self._parser.flush())

    def reason_of(self, choice: Choice) -> str | None:
        """Returns the finish reason: stop, length or tool_calls."""
        reason = choice.finish_reason and choice.finish_reason.value
        return "tool_calls" if self._num_calls and reason == "stop" else reason

    def _kept(self, parts: Sequence[Part]) -> list[Part]:
        kept = []
        for part in parts:
            self._num_calls += isinstance(part, CallBegun)
            if self._num_calls <= self._max_calls or not isinstance(part, CallBegun | Arguments):
                kept.append(part)
        return kept


def tools_of(read: Read, others: Collection[str]) -> Read:
    """Reads tools, each into a list of functions by `read`; empty for `others`, kinds that are left out."""

    def read_one(value: Any) -> Any:
        kind = _DATE.sub("", str(value.get("type"))) if isinstance(value, dict) else ""
        if kind not in others:
            return read(value)
        leave_out(kind)
        return []

    return list_of(read_one)


def new_call_id() -> str:
    """Draws nine letters and digits: Mistral's templates take no other ids."""
    return "".join(secrets.choice(ascii_letters + digits) for _ in range(9))


def joined(turns: Sequence[dict[str, Any]], roles: Collection[str]) -> list[dict[str, Any]]:
    """Joins adjacent turns of one role, field by field, if the role is among these."""
    made: list[dict[str, Any]] = []
    for turn in turns:
        if made and turn["role"] == made[-1]["role"] and turn["role"] in roles:
            last = made[-1]
            last |= {name: last[name] + one if name in last else one for name, one in turn.items() if name != "role"}
        else:
            made.append({**turn})
    return made


class BlockKind(Enum):
    """The kind of a block's content."""

    REASONING = "reasoning"
    TEXT = "text"
    CALL = "call"


@dataclass(kw_only=True)
class AnswerBlock:
    """A run of parts of one kind. id: drawn at random. name: the called function. is_cut: max_tokens cut it."""

    index: int
    kind: BlockKind
    name: str = ""
    id: str = field(default_factory=new_call_id)
    texts: list[str] = field(default_factory=list)
    is_cut: bool = False

    @property
    def text(self) -> str:
        return "".join(self.texts)


class BlocksDialect(Dialect):
    """An endpoint whose answer is one choice, in blocks."""

    def __init__(self, answer_formats: AnswerFormats = NO_FORMATS) -> None:
        self.sent: dict[str, str] = {}
        self._conversation = Conversation(answer_formats)
        self._blocks: list[AnswerBlock] = []

    def _list_tools(self, taken: dict[str, Any]) -> None:
        """Joins the lists of `tools_of`, and notes in `sent` the place of each function in the client's list."""
        tools = {
            f"tools[{place}].tools[{inner}]" if "namespace" in tool else f"tools[{place}]": tool
            for place, functions in enumerate(taken.pop("tools", []))
            for inner, tool in enumerate(functions)
        }
        self.sent |= {f"tools[{place}]": name for place, name in enumerate(tools)}
        taken["tools"] = [*tools.values()]

    @abstractmethod
    def first_events(self) -> list[Event]:
        """Describes the events before the first token."""

    @abstractmethod
    def opened(self, block: AnswerBlock) -> list[Event]:
        """Describes the events that begin a block."""

    @abstractmethod
    def grown(self, block: AnswerBlock, text: str) -> Event:
        """Describes the event of new text of a block."""

    @abstractmethod
    def closed(self, block: AnswerBlock) -> list[Event]:
        """Describes the events that end a block."""

    @abstractmethod
    def last_events(self, choice: Choice, usage: dict[str, Any]) -> list[Event]:
        """Describes the events at the end. usage: result of choices.usage_of."""

    @abstractmethod
    def object(self, choice: Choice, usage: dict[str, Any]) -> dict[str, Any]:
        """Describes the whole answer."""

    def write(self, described: Event) -> bytes:
        """Writes an event under its type."""
        return f"event: {described['type']}\ndata: {json.dumps(described)}\n\n".encode()

    def begin(self, generation: Generation) -> None:
        self._generation, self._answer = generation, self._conversation.new_answer()
        self._has_begun = False

    def logprobs(self, chunk: Chunk, numbers: Sequence[int]) -> None:
        return None

    def opening(self) -> bytes:
        described, self._has_begun = [] if self._has_begun else self.first_events(), True
        return b"".join(map(self.write, described))

    def events(self, chunk: Chunk, numbers: Sequence[int]) -> list[bytes]:
        written = self.opening() + b"".join(map(self.write, self._add(self._answer.feed(chunk.text))))
        return [written] if written else []

    def end(self, completions: Sequence[Completion]) -> bytes:
        [completion] = completions
        described = [*self._add(self._answer.flush())]
        self._cut(completion.choices[0])
        described += self._close()
        described += self.last_events(completion.choices[0], usage_of(completions))
        return self.opening() + b"".join(map(self.write, described))

    def whole(self, drafts: Sequence[ChoiceDraft], completions: Sequence[Completion]) -> list[bytes]:
        [draft], [completion] = drafts, completions
        for _ in self._add([*self._answer.feed("".join(draft.text)), *self._answer.flush()]):
            pass
        self._cut(completion.choices[0])
        return [json.dumps(self.object(completion.choices[0], usage_of(completions))).encode()]

    def _add(self, parts: Sequence[Part]) -> Iterator[Event]:
        """Adds parts to the last block or to a new block; yields the events about it."""
        for part in parts:
            kind = _kind_of(part)
            if isinstance(part, CallBegun) or not self._blocks or self._blocks[-1].kind is not kind:
                yield from self._close()
                self._blocks.append(
                    AnswerBlock(
                        index=len(self._blocks), kind=kind, name=part.name if isinstance(part, CallBegun) else ""
                    )
                )
                yield from self.opened(self._blocks[-1])
            if not isinstance(part, CallBegun):
                text = part if isinstance(part, str) else part.text
                self._blocks[-1].texts.append(text)
                yield self.grown(self._blocks[-1], text)

    def _cut(self, choice: Choice) -> None:
        for block in self._blocks[-1:]:
            block.is_cut = choice.finish_reason is FinishReason.LENGTH

    def _close(self) -> list[Event]:
        return self.closed(self._blocks[-1]) if self._blocks else []


def _kind_of(part: Part) -> BlockKind:
    if isinstance(part, str):
        return BlockKind.TEXT
    return BlockKind.REASONING if isinstance(part, Reasoning) else BlockKind.CALL
