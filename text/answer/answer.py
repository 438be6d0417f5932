"""An answer in parts: its reasoning, its content, and its calls of tools, as its text grows. Pure."""

from collections.abc import Collection
from dataclasses import dataclass
from enum import Enum

from text.answer.calls import Arguments, CallBegun, CallParser, overlap
from text.answer.formats import CALL_FORMATS, CHANNELS, AnswerFormats, Channel


@dataclass(frozen=True)
class Reasoning:
    """Further reasoning."""

    text: str


Part = Reasoning | str | CallBegun | Arguments
"""A part; a text is content."""


class AnswerParser:
    """Splits the text of an answer into parts: reasoning, then content and calls. Joined, they are a function of it.

    names: the functions that may be called.
    """

    def __init__(self, formats: AnswerFormats, names: Collection[str] = ()) -> None:
        channel, form = CHANNELS.get(formats.reasoning), CALL_FORMATS.get(formats.tool)
        self._channel = ChannelParser(channel) if channel else None
        self._calls = CallParser(form, names) if form and names else None

    def feed(self, text: str) -> list[Part]:
        """Feeds text; returns the parts that have become certain, in order."""
        reasoning, content = self._channel.feed(text) if self._channel else ("", text)
        return [*_told(reasoning), *self._split(content)]

    def flush(self) -> list[Part]:
        """Returns the parts that were held back, at the end of the answer."""
        reasoning, content = self._channel.flush() if self._channel else ("", "")
        parts = [*_told(reasoning), *self._split(content)]
        rest = self._calls.flush() if self._calls else ""
        return [*parts, rest] if rest else parts

    def _split(self, content: str) -> list[Part]:
        if self._calls:
            return [*self._calls.feed(content)]
        return [content] if content else []


def _told(reasoning: str) -> list[Part]:
    return [Reasoning(reasoning)] if reasoning else []


class _Place(Enum):
    """The place of the next character: before a channel, in it, behind its closer, in the content."""

    START = "start"
    WITHIN = "within"
    BEHIND = "behind"
    CONTENT = "content"


class ChannelParser:
    """Splits an answer into reasoning and content, without the marks and the white space beside them.

    An answer that begins with another text than the opener is all content.
    """

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._place = _Place.START
        self._held = ""
        self._is_blank = True

    @property
    def is_reasoning(self) -> bool:
        """Whether the text so far ends within the channel."""
        return self._place is _Place.WITHIN

    @property
    def may_reason(self) -> bool:
        """Whether the text that follows may be reasoning."""
        return self._place in (_Place.START, _Place.WITHIN)

    def feed(self, text: str) -> tuple[str, str]:
        """Feeds text; returns the reasoning and the content that have become certain."""
        self._held += text
        reasoning = ""
        if self._place is _Place.START:
            self._open()
        if self._place is _Place.WITHIN:
            reasoning = self._take_reasoning()
        if self._place is _Place.BEHIND:
            self._held = self._held.lstrip()
            self._place = _Place.CONTENT if self._held else _Place.BEHIND
        content = ""
        if self._place is _Place.CONTENT:
            content, self._held = self._held, ""
        return reasoning, content

    def flush(self) -> tuple[str, str]:
        """Returns the reasoning and the content that were held back, at the end of the answer."""
        held, self._held = self._held, ""
        return (held.rstrip(), "") if self._place is _Place.WITHIN else ("", held)

    def _open(self) -> None:
        stripped, opener = self._held.lstrip(), self._channel.opener
        if stripped.startswith(opener):
            self._place, self._held = _Place.WITHIN, stripped[len(opener) :]
        elif not opener.startswith(stripped):
            self._place = _Place.CONTENT

    def _take_reasoning(self) -> str:
        before, closer, behind = self._held.partition(self._channel.closer)
        if closer:
            self._place, self._held = _Place.BEHIND, behind
        else:
            before = before[: len(before) - overlap(before, self._channel.closer)]
        certain = before.rstrip()
        if not closer:
            self._held = self._held[len(certain) :]
        if self._is_blank:
            certain = certain.lstrip()
            self._is_blank = not certain
        return certain


class ReasoningCount:
    """The count of the tokens of an answer's reasoning, its marks included. opening: text that no token has."""

    def __init__(self, channel: Channel, opening: str) -> None:
        self.num_tokens = 0
        self._num_seen = 0
        self._parser = ChannelParser(channel)
        self._parser.feed(opening)

    def add(self, text: str) -> bool:
        """Adds the text of the next token; returns whether the next one may be reasoning, too."""
        was_reasoning = self._parser.is_reasoning
        self._parser.feed(text)
        self._num_seen += 1
        if was_reasoning or self._parser.is_reasoning:
            self.num_tokens = self._num_seen
        return self._parser.may_reason
