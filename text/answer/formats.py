"""The formats of answers: the syntax in which a family of models writes tool calls and reasoning.

qwen          <tool_call>{"name": ..., "arguments": {...}}</tool_call> for each call; Qwen 2.5 and 3, Hermes.
              Also without tags at the start of an answer, alone or in a block of code, as Qwen 2.5 Coder writes
llama         {"name": ..., "parameters": {...}} at the start of the answer, or behind <|python_tag|>
mistral       [TOOL_CALLS][{"name": ..., "arguments": {...}}, ...]
mistral-args  [TOOL_CALLS]NAME[ARGS]{...} for each call
harmony       <|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{...}<|call|>; text/answer/harmony.py
"""

import json
import re
from dataclasses import dataclass, replace

FENCE = "```"
"""The mark before and behind a block of code in Markdown."""
MAY_BE_FENCED = rf"\s{{0,8}}(?:{FENCE}(?:json)?)?"
"""A regular expression of what may stand before a call without an opener."""
AUTO, OFF = "auto", "off"
"""Settings of a format: AUTO finds it by the marks in the chat template; OFF means no format."""


@dataclass(frozen=True, kw_only=True)
class CallFormat:
    """The syntax of tool calls: opener, lead, calls joined by `between`, trail. A call is head, arguments, tail.

    marks: delimiters that are special tokens in some vocabularies. arguments: the JSON key of a call's arguments.
    bracket: the first character of a call or, "[", of a list of calls. skipped: delimiters dropped after a call.
    needs_opener: a call without an opener is text. takes_untagged: but a whole head at the start of an answer, alone or
    in a block of code, begins one. behind_name: a head is a name and this, not JSON; the parser takes both in formats
    with "[".
    """

    opener: str
    marks: tuple[str, ...]
    lead: str = ""
    between: str = ""
    tail: str = "}"
    trail: str = ""
    arguments: str = "arguments"
    bracket: str = "{"
    skipped: tuple[str, ...] = ()
    needs_opener: bool = True
    takes_untagged: bool = False
    behind_name: str = ""

    def head_pattern(self, name: str) -> str:
        """Writes a regular expression of heads in JSON, with white space; `name` is one of their names."""
        parts = ("", r"\{", '"name"', ":", f'"{name}"', ",", f'"{self.arguments}"', ":", "")
        return r"\s{0,8}".join(parts)

    def head(self, name: str) -> str:
        """Writes a call up to its arguments."""
        return (
            f"{name}{self.behind_name}" if self.behind_name else f'{{"name": {json.dumps(name)}, "{self.arguments}": '
        )


@dataclass(frozen=True)
class Channel:
    """The marks around the reasoning of an answer. lead: stands before the content.

    tokens: the special tokens that marks are made of; empty where a mark is one.
    """

    opener: str
    closer: str
    lead: str = ""
    tokens: tuple[str, ...] = ()

    @property
    def marks(self) -> tuple[str, ...]:
        """The marks by the special tokens that some vocabularies have for them."""
        return self.tokens or (self.opener, self.closer)

    def is_closed_by(self, prompt: str) -> bool:
        """Tells whether a prompt has closed the channel; with a lead, every answer begins where a closer ends."""
        return not self.lead and prompt.endswith(self.closer)

    @property
    def sign(self) -> str:
        """A text that the chat templates of models with this channel have."""
        return self.opener if self.lead else self.closer


_MISTRAL = CallFormat(
    opener="[TOOL_CALLS]",
    marks=("[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"),
    lead="[",
    between=", ",
    trail="]",
    bracket="[",
)
HARMONY = "harmony"
_HARMONY_TOKENS = tuple(f"<|{name}|>" for name in ("start", "channel", "constrain", "message", "end", "call"))
_HARMONY_CALL = "<|channel|>commentary to=functions."
CALL_FORMATS: dict[str, CallFormat] = {
    "qwen": CallFormat(
        opener="<tool_call>",
        marks=("<tool_call>", "</tool_call>"),
        lead="\n",
        between="\n<tool_call>\n",
        tail="}\n</tool_call>",
        skipped=("</tool_call>",),
        takes_untagged=True,
    ),
    "mistral-args": replace(_MISTRAL, lead="", between="[TOOL_CALLS]", tail="", trail="", behind_name="[ARGS]"),
    "mistral": _MISTRAL,
    "llama": CallFormat(
        opener="<|python_tag|>",
        marks=("<|python_tag|>",),
        between="; ",
        arguments="parameters",
        skipped=(";",),
        needs_opener=False,
    ),
    HARMONY: CallFormat(
        opener=_HARMONY_CALL,
        marks=_HARMONY_TOKENS,
        between=f"<|call|><|start|>assistant{_HARMONY_CALL}",
        tail="",
        behind_name=" <|constrain|>json<|message|>",
    ),
}
CHANNELS: dict[str, Channel] = {
    "think": Channel("<think>", "</think>"),
    "magistral": Channel("[THINK]", "[/THINK]"),
    HARMONY: Channel(
        "<|channel|>analysis<|message|>",
        "<|end|><|start|>assistant",
        lead="<|channel|>final<|message|>",
        tokens=_HARMONY_TOKENS,
    ),
}


@dataclass(frozen=True)
class AnswerFormats:
    """The formats of a model's answers: a key of CALL_FORMATS for calls, of CHANNELS for reasoning; "" for none."""

    tool: str = ""
    reasoning: str = ""

    @classmethod
    def of(cls, template: str, tool: str = AUTO, reasoning: str = AUTO) -> "AnswerFormats":
        """Returns the formats named by settings; AUTO finds them by the marks in the chat template."""
        found = cls._found(template)
        return cls(
            {AUTO: found.tool, OFF: ""}.get(tool, tool), {AUTO: found.reasoning, OFF: ""}.get(reasoning, reasoning)
        )

    @classmethod
    def _found(cls, template: str) -> "AnswerFormats":
        knows_tools = re.search(r"\btools\b", template) is not None
        tool = next((name for name, sign in _CALL_SIGNS.items() if knows_tools and sign in template), "")
        return cls(tool, next((name for name, one in CHANNELS.items() if one.sign in template), ""))


NO_FORMATS = AnswerFormats()
_CALL_SIGNS = {
    HARMONY: "to=functions.",
    "qwen": "<tool_call>",
    "mistral-args": "[ARGS]",
    "mistral": "[TOOL_CALLS]",
    "llama": '"parameters":',
}
