"""The frame of a chat's answer: its reasoning channel, the tool calls that it may have, and the grammar of both.

    start: (channel's opener, reasoning, closer)? answer
    answer: calls                      where calls are required
          | content | calls            where the content has a format
          | text | calls | text calls | call without marks
                                     where the arguments of a tool are strict, or one call is the most

Only further calls may follow a call; none follows one without marks, which formats may take at the start of an answer.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from text.answer.answer import ReasoningCount
from text.answer.formats import CALL_FORMATS, CHANNELS, FENCE, MAY_BE_FENCED, AnswerFormats, CallFormat, Channel
from text.grammar import PARAM, lark_term, schema_term
from text.tokenizer_protocol import TextCodec
from wire.errors import Unsupported
from wire.sampling import FormatKind, ResponseFormat

ANY_OBJECT = {"type": "object"}
NO_ARGUMENTS: Mapping[str, Any] = {"properties": {}, "additionalProperties": False}
"""The schema of a function that declares no parameters: in OpenAI's dialect it has no arguments."""


@dataclass(frozen=True)
class ToolUse:
    """The tools of a chat, and the calls that its answer may have.

    strict: functions whose arguments the grammar constrains to their schemas. required: the answer has calls alone, all
    constrained to their schemas. only: the only function that may be called; "" for all. parallel: whether several
    calls may come; false constrains decoding, too.
    """

    tools: tuple[Mapping[str, Any], ...] = ()
    strict: frozenset[str] = frozenset()
    required: bool = False
    only: str = ""
    parallel: bool = True

    @property
    def is_held(self) -> bool:
        """Whether tool calls constrain decoding."""
        return self.required or bool(self.strict) or (bool(self.tools) and not self.parallel)

    def field(self, name: str) -> str:
        """Names the request's field with the schema of a function's arguments."""
        place = next(place for place, one in enumerate(self.tools) if one["function"]["name"] == name)
        return f"tools[{place}].function.parameters"

    def schemas(self) -> dict[str, Mapping[str, Any]]:
        """Returns the schemas of the arguments of the functions that may be called."""
        functions = {one["function"]["name"]: one["function"] for one in self.tools}
        names = [self.only] if self.only else [*functions]
        held = names if self.required else self.strict
        given = {name: functions[name].get("parameters") or NO_ARGUMENTS if name in held else {} for name in names}
        return {name: {**ANY_OBJECT, **schema} for name, schema in given.items()}


NO_TOOLS = ToolUse()


@dataclass(frozen=True)
class AnswerFrame:
    """The frame of an answer. calls: None without tools. is_open: the template has written the channel's opener.

    max_reasoning_tokens: the bound at which the grammar forces the closer; None for no bound.
    """

    calls: CallFormat | None = None
    tool_use: ToolUse = NO_TOOLS
    channel: Channel | None = None
    is_open: bool = False
    max_reasoning_tokens: int | None = None

    @classmethod
    def behind(
        cls, prompt: str, formats: AnswerFormats, tool_use: ToolUse, max_reasoning_tokens: int | None = None
    ) -> "AnswerFrame":
        """Returns the frame of the answer to a rendered prompt; it has no channel if the prompt has closed it."""
        calls = CALL_FORMATS.get(formats.tool) if tool_use.tools else None
        channel, end = CHANNELS.get(formats.reasoning), prompt.rstrip()
        if channel is None or channel.is_closed_by(end):
            return cls(calls, tool_use)
        return cls(calls, tool_use, channel, end.endswith(channel.opener), max_reasoning_tokens)

    @classmethod
    def within(
        cls, message: str, formats: AnswerFormats, tool_use: ToolUse, max_reasoning_tokens: int | None = None
    ) -> "AnswerFrame":
        """Returns the frame of an answer that continues a message: in its channel if that is open, else after it."""
        channel = CHANNELS.get(formats.reasoning)
        _, opener, thought = message.rpartition(channel.opener) if channel else ("", "", "")
        if channel is None or not opener or channel.closer in thought:
            return cls.behind("", AnswerFormats(formats.tool), tool_use)
        return cls.behind(opener, formats, tool_use, max_reasoning_tokens)

    @property
    def marks(self) -> tuple[str, ...]:
        """The marks that stay in the answer's text; other special tokens are skipped."""
        of_calls, of_channel = (one.marks if one else () for one in (self.calls, self.channel))
        return tuple(dict.fromkeys((*of_calls, *of_channel)))

    @property
    def opening(self) -> str:
        """The part of the answer that the template has written: the channel's opener, or ""."""
        return self.channel.opener if self.channel and self.is_open else ""

    def new_count(self) -> ReasoningCount | None:
        """Makes a count of the reasoning's tokens; None without a channel."""
        return ReasoningCount(self.channel, self.opening) if self.channel else None

    def grammar(self, content: ResponseFormat | None, codec: TextCodec | None = None) -> ResponseFormat | None:
        """Writes the grammar of the answer; None if any text is allowed. Raises InvalidRequest or Unsupported.

        content: the format of the content. Without a codec, for checks without the model's vocabulary, the grammar
        spells marks as text and has no bound on reasoning.
        """
        use, has_budget = self.tool_use, self.max_reasoning_tokens is not None
        if self.channel is None and (content is None or not self.calls) and not use.is_held:
            return content
        if content is None and not (use.is_held or has_budget):
            return None
        rules = _Rules(self, {} if codec is None else self._tokens(codec))
        return ResponseFormat(FormatKind.LARK, "\n".join([*rules.start(), *rules.answer(content)]))

    def sources(self, content: ResponseFormat | None) -> dict[str, ResponseFormat]:
        """Returns the formats that the grammar is made of, by the request's fields."""
        given = {} if content is None else {PARAM: content}
        schemas = self.tool_use.schemas().items() if self.calls else ()
        return given | {
            self.tool_use.field(name): ResponseFormat(FormatKind.JSON_SCHEMA, json.dumps(schema))
            for name, schema in schemas
        }

    def _tokens(self, codec: TextCodec) -> dict[str, int]:
        """Returns the token ids of marks that are one token: a grammar of their text would refuse that token.

        Raises Unsupported for a budget if the channel's closer is none of these.
        """
        encoded = {mark: codec.encode_rendered(mark) for mark in self.marks}
        tokens = {mark: ids[0] for mark, ids in encoded.items() if len(ids) == 1}
        if self.channel and self.max_reasoning_tokens is not None and self.channel.closer not in tokens:
            reason = "the model's vocabulary has no token that closes its channel of reasoning"
            raise Unsupported(f"thinking_token_budget: {reason}", param="thinking_token_budget")
        return tokens


NO_FRAME = AnswerFrame()


class _Rules:
    """The rules of a grammar in llguidance's dialect of Lark. tokens: ids of marks; other marks are spelled as text."""

    def __init__(self, frame: AnswerFrame, tokens: Mapping[str, int]) -> None:
        self._frame = frame
        self._tokens = tokens
        self._marks = re.compile("|".join(map(re.escape, tokens)) or "(?!)")

    def start(self) -> list[str]:
        frame, channel = self._frame, self._frame.channel
        if channel is None:
            return ["start: answer", "TEXT: /(.|\\n)*/"]
        opened = "" if frame.is_open else self._term(channel.opener)
        thought = f"{opened} thought GAP"
        head = f"start: {thought} answer" if frame.is_open else f"start: ({thought})? answer"
        return [head, "TEXT: /(.|\\n)*/", "GAP: /\\n{0,2}/", *self._until("thought", "TEXT", channel.closer)]

    def answer(self, content: ResponseFormat | None) -> list[str]:
        frame, calls = self._frame, self._frame.calls
        if calls and frame.tool_use.required:
            return ["answer: calls", *self._calls(calls)]
        lead = self._term(frame.channel.lead) if frame.channel else ""
        if content is not None:
            rules = [f"content: {lark_term(content)}", f"answer: {lead} content{' | calls' if calls else ''}"]
            return [*rules, *self._calls(calls)] if calls else rules
        plain = f"PLAIN: {self._plain(calls)}"
        if calls is None:
            return [f"answer: {lead} PLAIN", plain]
        has_told = calls.needs_opener and not lead
        told = self._until("told", "PLAIN", calls.opener) if has_told else []
        behind = " | told listed" if has_told else ""
        untagged = self._untagged(calls) if calls.takes_untagged else []
        behind += " | untagged" if untagged else ""
        return [f"answer: {lead} PLAIN | calls{behind}", plain, *told, *self._calls(calls), *untagged]

    def _calls(self, calls: CallFormat) -> list[str]:
        """Writes the rules `calls` and `listed`: calls with and without the first opener."""
        schemas, use = self._frame.tool_use.schemas(), self._frame.tool_use
        more = f"({self._term(calls.between)} call)*" if use.parallel else ""
        opener = self._term(calls.opener) if calls.needs_opener else ""
        rules = [
            f"calls: {opener} listed",
            f"listed: {self._term(calls.lead)} call {more} {self._term(calls.trail)}",
            "call: " + " | ".join(f"call_{place}" for place in range(len(schemas))),
        ]
        for place, (name, schema) in enumerate(schemas.items()):
            head, tail = self._term(calls.head(name)), self._term(calls.tail)
            rules.append(f"call_{place}: {head} {schema_term(schema, use.field(name))} {tail}")
        return rules

    def _untagged(self, calls: CallFormat) -> list[str]:
        """Writes the rule `untagged`: one call without marks, alone or in a block of code."""
        schemas, use = self._frame.tool_use.schemas(), self._frame.tool_use
        rules = [f"UNTAGGED_END: /\\s{{0,8}}\\}}\\s{{0,8}}({FENCE})?\\s{{0,8}}/"]
        for place, (name, schema) in enumerate(schemas.items()):
            rules.append(f"UNTAGGED_{place}: /{MAY_BE_FENCED}{calls.head_pattern(re.escape(name))}/")
            rules.append(f"untagged_{place}: UNTAGGED_{place} {schema_term(schema, use.field(name))} UNTAGGED_END")
        return [*rules, "untagged: " + " | ".join(f"untagged_{place}" for place in range(len(schemas)))]

    def _until(self, rule: str, text: str, mark: str) -> list[str]:
        """Writes a rule for text up to the first occurrence of a mark, which it includes."""
        if not self._marks.search(mark):
            return [f"{rule}[lazy]: {text} {json.dumps(mark)}"]
        budget = self._frame.max_reasoning_tokens
        if rule != "thought" or budget is None:
            return [f"{rule}: {text} {self._term(mark)}"]
        return [f"{rule}: {rule}_text {self._term(mark)}", f"{rule}_text[max_tokens={budget}]: TEXT"]

    def _plain(self, calls: CallFormat | None) -> str:
        """Writes the lexeme of text that begins neither with a channel's opener nor with a call without an opener."""
        text = r"/(\s*[^\s{](.|\n)*)?/" if calls and not calls.needs_opener else r"/(.|\n)*/"
        if calls and calls.takes_untagged:
            names = "|".join(map(re.escape, self._frame.tool_use.schemas()))
            text += rf" & ~/\s*{MAY_BE_FENCED}{calls.head_pattern(f'(?:{names})')}(.|\n)*/"
        if self._frame.channel is None or self._frame.is_open:
            return text
        return rf"{text} & ~/\s*{re.escape(self._frame.channel.opener)}(.|\n)*/"

    def _term(self, text: str) -> str:
        """Writes a text as Lark terms: strings, and token ids for the marks in it."""
        terms, place = [], 0
        for mark in self._marks.finditer(text):
            terms += [text[place : mark.start()], mark[0]]
            place = mark.end()
        terms.append(text[place:])
        return " ".join(
            f"<[{self._tokens[one]}]>" if one in self._tokens else json.dumps(one, ensure_ascii=False)
            for one in terms
            if one
        )
