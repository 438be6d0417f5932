"""Messages of a chat, and what their template makes of them: special tokens are the template's alone.

A special token that a message spells out is cut in two by a mark, a character of no text, before the template sees it.
The rendered text is tokenized in the pieces between marks, and no piece has the token: a forged turn stays text.
"""

import asyncio
import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol

from text.codec import TextCodec
from wire.errors import InvalidRequest, Unsupported

ROLES = ("system", "developer", "user", "assistant", "tool")
_MARKS = tuple(map(chr, range(0xFDD0, 0xFDF0)))
"""Unicode's noncharacters, which are for use within a program only."""


@dataclass(frozen=True)
class Message:
    """A turn of a conversation. `role` is one of ROLES."""

    role: str
    content: str


@dataclass(frozen=True)
class Chat:
    """A conversation still to be rendered."""

    messages: tuple[Message, ...]

    def __len__(self) -> int:
        return len(self.messages)

    @property
    def text(self) -> str:
        return "".join(one.content for one in self.messages)

    async def render(self, renderer: "Renderer", special_tokens: Sequence[str], max_added_chars: int) -> "Rendered":
        """Renders the messages with marks in their special tokens. Raises InvalidRequest or Unsupported."""
        marked, mark = await asyncio.to_thread(self._marked, special_tokens)
        return Rendered(await renderer.render(marked, max_added_chars), mark)

    def _marked(self, special_tokens: Sequence[str]) -> tuple[list[Message], str]:
        """Returns the messages with marks in them, and the mark. Takes as long as they and the tokens are many."""
        mark = _mark_for(self.text)
        return [Message(one.role, _cut(one.content, special_tokens, mark)) for one in self.messages], mark


@dataclass(frozen=True)
class Rendered:
    """A conversation as its template wrote it, with marks in it."""

    text: str
    mark: str

    def __len__(self) -> int:
        return len(self.text)

    def encode(self, codec: TextCodec) -> list[int]:
        """Encodes the pieces between marks; special tokens around the text are the template's to write."""
        return [token_id for piece in self.text.split(self.mark) for token_id in codec.encode_rendered(piece)]


class Renderer(Protocol):
    """A model's chat template. Implementations are `TemplateProcesses`, its twin `PlainRenderer`, and `NoRenderer`."""

    async def render(self, messages: Sequence[Message], max_added_chars: int) -> str:
        """Renders messages up to the assistant's next turn. Raises InvalidRequest for what the template does not take.

        max_added_chars: by which the text may be longer than the messages.
        """

    async def close(self) -> None: ...


class PlainRenderer:
    """The in-memory twin: a line for each turn."""

    async def render(self, messages: Sequence[Message], max_added_chars: int) -> str:
        return "".join(f"{one.role}: {one.content}\n" for one in messages) + "assistant:"

    async def close(self) -> None:
        """Has nothing to close."""


class NoRenderer:
    """The template of a model that has none."""

    async def render(self, messages: Sequence[Message], max_added_chars: int) -> str:
        raise Unsupported("messages: the model has no chat template; send a text prompt", param="messages")

    async def close(self) -> None:
        """Has nothing to close."""


def _mark_for(text: str) -> str:
    """Finds a mark that a text has not."""
    for mark in _MARKS:
        if mark not in text:
            return mark
    raise InvalidRequest("messages", "must not have all of Unicode's noncharacters")


def _cut(content: str, special_tokens: Sequence[str], mark: str) -> str:
    """Puts a mark behind the first character of each special token, and of one that the content ends amid."""
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
