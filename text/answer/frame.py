"""The frame of a chat's answer: the channel of reasoning and the calls of tools that its text may have."""

from dataclasses import dataclass

from text.answer.answer import ReasoningCount
from text.answer.formats import CALL_FORMATS, CHANNELS, AnswerFormats, CallFormat, Channel


@dataclass(frozen=True)
class AnswerFrame:
    """The frame of an answer. calls: None without tools. is_open: the template has written the channel's opener."""

    calls: CallFormat | None = None
    channel: Channel | None = None
    is_open: bool = False

    @classmethod
    def behind(cls, prompt: str, formats: AnswerFormats, has_tools: bool) -> "AnswerFrame":
        """Returns the frame of the answer to a rendered prompt; a channel that the prompt has closed is none of it."""
        calls, channel = CALL_FORMATS.get(formats.tool) if has_tools else None, CHANNELS.get(formats.reasoning)
        end = prompt.rstrip()
        if channel is None or end.endswith(channel.closer):
            return cls(calls)
        return cls(calls, channel, end.endswith(channel.opener))

    @property
    def marks(self) -> tuple[str, ...]:
        """The marks that are part of the answer's text where they are special tokens."""
        of_channel = (self.channel.opener, self.channel.closer) if self.channel else ()
        return (*(self.calls.marks if self.calls else ()), *of_channel)

    @property
    def opening(self) -> str:
        """The text of the answer that the template has written: the opener of its channel."""
        return self.channel.opener if self.channel and self.is_open else ""

    def new_count(self) -> ReasoningCount | None:
        """Begins a count of the tokens of reasoning; None without a channel."""
        return ReasoningCount(self.channel, self.opening) if self.channel else None


NO_FRAME = AnswerFrame()
