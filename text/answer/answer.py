"""The parser of an answer: reasoning, content and tool calls, found while its text streams. Pure."""

from collections.abc import Collection
from enum import Enum

from text.answer.calls import CallParser, Found, Reasoning, overlap
from text.answer.formats import CALL_FORMATS, CHANNELS, HARMONY, AnswerFormats, Channel
from text.answer.harmony import HarmonyParser

Part = Found


class AnswerParser:
    """Splits the text of an answer into parts: reasoning, then content and tool calls.

    The parts, joined, depend on the whole text alone, not on how feeds split it.
    names: the functions that may be called.
    """

    def __init__(self, formats: AnswerFormats, names: Collection[str] = ()) -> None:
        channel, form = CHANNELS.get(formats.reasoning), CALL_FORMATS.get(formats.tool)
        self._channel = ChannelParser(channel) if channel else None
        self._calls: CallParser | HarmonyParser | None = CallParser(form, names) if form and names else None
        if HARMONY in (formats.tool, formats.reasoning):
            self._channel, self._calls = None, HarmonyParser(names)

    def feed(self, text: str) -> list[Part]:
        """Feeds text; returns the parts that no later text can change, in order."""
        reasoning, content = self._channel.feed(text) if self._channel else ("", text)
        return [*_reasoning_parts(reasoning), *self._split(content)]

    def flush(self) -> list[Part]:
        """Returns the parts that were held back, at the end of the answer."""
        reasoning, content = self._channel.flush() if self._channel else ("", "")
        parts = [*_reasoning_parts(reasoning), *self._split(content)]
        return [*parts, *(self._calls.flush() if self._calls else [])]

    def _split(self, content: str) -> list[Part]:
        if self._calls:
            return [*self._calls.feed(content)]
        return [content] if content else []


def _reasoning_parts(reasoning: str) -> list[Part]:
    return [Reasoning(reasoning)] if reasoning else []


class _ChannelState(Enum):
    """The parser's state: before the channel, in it, in white space after its closer, or in the content."""

    START = "start"
    WITHIN = "within"
    BEHIND = "behind"
    CONTENT = "content"


class ChannelParser:
    """Splits an answer into reasoning and content, without marks and the white space around them.

    An answer that does not begin with the opener is all content.
    """

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._state = _ChannelState.START
        self._held = ""
        self._spaces: list[str] = []  # before what is held, joined once other text follows
        self._is_blank = True

    @property
    def is_reasoning(self) -> bool:
        """Whether the text so far ends within the channel."""
        return self._state is _ChannelState.WITHIN

    @property
    def may_reason(self) -> bool:
        """Whether the next text may be reasoning."""
        return self._state in (_ChannelState.START, _ChannelState.WITHIN)

    def feed(self, text: str) -> tuple[str, str]:
        """Feeds text; returns the reasoning and the content that no later text can change."""
        if text.isspace() and not self._held and self._state is not _ChannelState.CONTENT:
            self._spaces.append(text)
            return "", ""
        self._held = self._take_held() + text
        reasoning = ""
        if self._state is _ChannelState.START:
            self._open()
        if self._state is _ChannelState.WITHIN:
            reasoning = self._take_reasoning()
        if self._state is _ChannelState.BEHIND:
            self._held = self._held.lstrip()
            self._state = _ChannelState.CONTENT if self._held else _ChannelState.BEHIND
        content = ""
        if self._state is _ChannelState.CONTENT:
            content, self._held = self._held, ""
        if self._held.isspace():
            self._spaces, self._held = [self._held], ""
        return reasoning, content

    def flush(self) -> tuple[str, str]:
        """Returns the reasoning and the content that were held back, at the end of the answer."""
        held = self._take_held()
        if self._state is _ChannelState.WITHIN:
            return held.rstrip(), ""
        return "", "" if self._state is _ChannelState.BEHIND else held

    def _take_held(self) -> str:
        held, self._held = "".join((*self._spaces, self._held)), ""
        self._spaces.clear()
        return held

    def _open(self) -> None:
        stripped, opener = self._held.lstrip(), self._channel.opener
        if stripped.startswith(opener):
            self._state, self._held = _ChannelState.WITHIN, stripped[len(opener) :]
        elif not opener.startswith(stripped):
            self._state = _ChannelState.CONTENT

    def _take_reasoning(self) -> str:
        before, closer, behind = self._held.partition(self._channel.closer)
        if closer:
            self._state, self._held = _ChannelState.BEHIND, behind
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
    """The number of tokens of an answer's reasoning, marks included.

    opening: the part of the text that the chat template has written; its tokens do not count.
    """

    def __init__(self, channel: Channel, opening: str) -> None:
        self.num_tokens = 0
        self._num_seen = 0
        self._parser = ChannelParser(channel)
        self._parser.feed(opening)

    def add(self, text: str) -> bool:
        """Adds the text of a token; returns whether the token after it may be reasoning, too."""
        was_reasoning = self._parser.is_reasoning
        self._parser.feed(text)
        self._num_seen += 1
        if was_reasoning or self._parser.is_reasoning:
            self.num_tokens = self._num_seen
        return self._parser.may_reason
