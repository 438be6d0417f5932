"""The formats of answers: the syntax in which a family of models writes tool calls and reasoning.

qwen          <tool_call>{"name": ..., "arguments": {...}}</tool_call> for each call; Qwen 2.5 and 3, Hermes
llama         {"name": ..., "parameters": {...}} at the start of the answer, or behind <|python_tag|>
mistral       [TOOL_CALLS][{"name": ..., "arguments": {...}}, ...]
mistral-args  [TOOL_CALLS]NAME[ARGS]{...} for each call
"""

import json
import re
from dataclasses import dataclass, replace

AUTO, OFF = "auto", "off"
"""Settings of a format: AUTO finds it by the marks in the chat template; OFF means no format."""


@dataclass(frozen=True, kw_only=True)
class CallFormat:
    """The syntax of tool calls: opener, lead, calls joined by `between`, trail. A call is head, arguments, tail.

    marks: delimiters that are special tokens in some vocabularies. arguments: the JSON key of a call's arguments.
    bracket: the first character of a call or, "[", of a list of calls. skipped: delimiters dropped after a call.
    needs_opener: a call without an opener is text. has_bare_names: a head is NAME[ARGS], not JSON; the parser takes
    both in formats with "[".
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
    has_bare_names: bool = False

    def head(self, name: str) -> str:
        """Writes a call up to its arguments."""
        return f"{name}[ARGS]" if self.has_bare_names else f'{{"name": {json.dumps(name)}, "{self.arguments}": '


@dataclass(frozen=True)
class Channel:
    """The marks around the reasoning of an answer."""

    opener: str
    closer: str


_MISTRAL = CallFormat(
    opener="[TOOL_CALLS]",
    marks=("[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"),
    lead="[",
    between=", ",
    trail="]",
    bracket="[",
)
CALL_FORMATS: dict[str, CallFormat] = {
    "qwen": CallFormat(
        opener="<tool_call>",
        marks=("<tool_call>", "</tool_call>"),
        lead="\n",
        between="\n<tool_call>\n",
        tail="}\n</tool_call>",
        skipped=("</tool_call>",),
    ),
    "mistral-args": replace(_MISTRAL, lead="", between="[TOOL_CALLS]", tail="", trail="", has_bare_names=True),
    "mistral": _MISTRAL,
    "llama": CallFormat(
        opener="<|python_tag|>",
        marks=("<|python_tag|>",),
        between="; ",
        arguments="parameters",
        skipped=(";",),
        needs_opener=False,
    ),
}
CHANNELS: dict[str, Channel] = {
    "think": Channel("<think>", "</think>"),
    "magistral": Channel("[THINK]", "[/THINK]"),
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
        return cls(tool, next((name for name, one in CHANNELS.items() if one.closer in template), ""))


NO_FORMATS = AnswerFormats()
_CALL_SIGNS = {"qwen": "<tool_call>", "mistral-args": "[ARGS]", "mistral": "[TOOL_CALLS]", "llama": '"parameters":'}
