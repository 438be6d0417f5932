"""Chats, rendered by the model's template. Special tokens come from the template alone, never from a message.

If a message spells out a special token, a mark (a character that no text has) cuts it in two before the template sees
it. The rendered text is tokenized in the pieces between marks, and no piece has the token: a forged turn stays text.
"""

import asyncio
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, Protocol

from text.answer.formats import NO_FORMATS, AnswerFormats
from text.answer.frame import NO_FRAME, NO_TOOLS, AnswerFrame, ToolUse
from text.template.turns import TAKES_ALL, ChatTurn, TurnRules
from text.tokenizer_protocol import TextCodec
from wire.errors import InvalidRequest, Unsupported

_MARKS = tuple(map(chr, range(0xFDD0, 0xFDF0)))
"""Unicode's noncharacters, for use within a program only."""


@dataclass(frozen=True)
class Chat:
    """A conversation before it is rendered. variables: further variables of its template.

    continues: the answer continues the last message. max_reasoning_tokens: None for no bound.
    """

    messages: tuple[ChatTurn, ...]
    tool_use: ToolUse = NO_TOOLS
    variables: Mapping[str, Any] = field(default_factory=dict)
    continues: bool = False
    max_reasoning_tokens: int | None = None

    def __len__(self) -> int:
        return len(self.messages)

    @property
    def text(self) -> str:
        return "".join(one.content for one in self.messages)

    async def render(self, renderer: "Renderer", special_tokens: Sequence[str], max_added_chars: int) -> "Rendered":
        """Renders the messages with marks in their special tokens. Raises InvalidRequest or Unsupported."""
        tools = self.tool_use.tools
        uses_tools = tools or any(one.tool_calls or one.role == "tool" for one in self.messages)
        if uses_tools and not renderer.formats.tool:
            param = "tools" if tools else "messages"
            raise Unsupported(f"{param}: the model's chat template knows no tools", param=param)
        if self.max_reasoning_tokens is not None and not renderer.formats.reasoning:
            param = "thinking_token_budget"
            raise Unsupported(f"{param}: the model's chat template knows no channel of reasoning", param=param)
        rules = await renderer.turn_rules()
        marked, mark = await asyncio.to_thread(self._marked, special_tokens)
        fitted, adapted = rules.fit(marked.messages, tools)
        text = await renderer.render(replace(marked, messages=fitted), max_added_chars)
        frame_of, before = (
            (AnswerFrame.within, self.messages[-1].content) if self.continues else (AnswerFrame.behind, text)
        )
        frame = frame_of(before, renderer.formats, self.tool_use, self.max_reasoning_tokens)
        return Rendered(text, mark, frame, adapted)

    def _marked(self, special_tokens: Sequence[str]) -> tuple["Chat", str]:
        """Returns the chat with marks in it, and the mark. Time: the chat's length times the special tokens."""
        given = [*(one.variables for one in self.messages), *self.tool_use.tools, self.variables]
        mark = _mark_for(json.dumps(given, ensure_ascii=False))

        def cut(text: str) -> str:
            return _cut(text, special_tokens, mark)

        messages = tuple(
            replace(
                one,
                content=cut(one.content),
                tool_calls=_each_text(one.tool_calls, cut),
                more=_each_text(one.more, cut),
            )
            for one in self.messages
        )
        tool_use = replace(self.tool_use, tools=_each_text(self.tool_use.tools, cut))
        return replace(self, messages=messages, tool_use=tool_use, variables=_each_text(self.variables, cut)), mark


@dataclass(frozen=True)
class Rendered:
    """A conversation as its template wrote it, with marks in it.

    frame: the frame of its answer. adapted: the changes made to its turns, in the words of TurnRules.fit.
    """

    text: str
    mark: str
    frame: AnswerFrame = NO_FRAME
    adapted: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.text)

    def pieces(self, codec: TextCodec) -> list[str]:
        """Cuts the text at marks and before special tokens; adds no special tokens around it.

        The prompt is the tokens of `encode_rendered` of each piece, joined.
        """
        return [piece for unmarked in self.text.split(self.mark) for piece in codec.pieces(unmarked)]


class Renderer(Protocol):
    """A renderer of chats: `TemplateProcesses`, its twin `PlainRenderer`, or `NoRenderer`."""

    @property
    def formats(self) -> AnswerFormats:
        """The answer formats of the template; a template without a format of calls takes no tools."""

    async def turn_rules(self) -> TurnRules:
        """Returns the roles and orders of turns that the template does not take. Raises Unavailable."""

    async def render(self, chat: Chat, max_added_chars: int) -> str:
        """Renders a chat up to the assistant's next turn. Raises InvalidRequest if the template refuses it.

        max_added_chars: bounds the characters that the template adds to the chat's.
        """

    async def close(self) -> None: ...


class PlainRenderer:
    """The in-memory twin of TemplateProcesses: writes a line for each tool and turn."""

    formats = AnswerFormats("qwen", "think")

    async def turn_rules(self) -> TurnRules:
        return TAKES_ALL

    async def render(self, chat: Chat, max_added_chars: int) -> str:
        tools = "".join(f"tool: {json.dumps(one)}\n" for one in chat.tool_use.tools)
        calls = [
            "".join(f"<tool_call>{json.dumps(call)}</tool_call>" for call in one.tool_calls) for one in chat.messages
        ]
        turns = zip(chat.messages, calls, strict=True)
        return (
            tools
            + "".join(f"{one.role}: {one.content}{made}\n" for one, made in turns)
            + f"assistant:{chat.variables.get('opened', '')}"
        )

    async def close(self) -> None:
        """Does nothing."""


class NoRenderer:
    """The Renderer of a model without a template: raises for each chat."""

    formats = NO_FORMATS

    async def turn_rules(self) -> TurnRules:
        return TAKES_ALL

    async def render(self, chat: Chat, max_added_chars: int) -> str:
        raise Unsupported("messages: the model has no chat template; send a text prompt", param="messages")

    async def close(self) -> None:
        """Does nothing."""


def _each_text(value: Any, cut: Callable[[str], str]) -> Any:
    """Returns a JSON value with each string in it cut, keys of objects too."""
    if isinstance(value, str):
        return cut(value)
    if isinstance(value, Mapping):
        return {cut(key): _each_text(one, cut) for key, one in value.items()}
    return tuple(_each_text(one, cut) for one in value) if isinstance(value, list | tuple) else value


def _mark_for(text: str) -> str:
    """Finds a mark that does not occur in a text."""
    for mark in _MARKS:
        if mark not in text:
            return mark
    raise InvalidRequest("messages", "must not have all of Unicode's noncharacters")


def _cut(content: str, special_tokens: Sequence[str], mark: str) -> str:
    """Puts a mark after the first character of each special token, also of a special token's beginning at the end."""
    if not content:
        return content
    if any(len(token) == 1 and token in content for token in special_tokens):
        raise InvalidRequest("messages", "must not have a special token of one character")
    starts = {
        match.start()
        for token in special_tokens
        if token in content
        for match in re.finditer(f"(?={re.escape(token)})", content)
    }
    end = content.rstrip()  # templates may trim it, and the next message would go on where it ends
    tail = end[-max(map(len, special_tokens), default=0) :]
    starts |= {
        len(end) - length
        for token in special_tokens
        if token[0] in tail
        for length in range(1, min(len(token), len(end) + 1))
        if tail.endswith(token[:length])
    }
    cuts = [0, *(start + 1 for start in sorted(starts)), len(content)]
    return mark.join(content[start:end] for start, end in pairwise(cuts))
