"""Calls of tools, found in the text of an answer as it grows. Pure; no text raises.

llama    {"name": ..., "parameters": {...}}, at the start of the answer or behind <|python_tag|>; others behind ";"
mistral  [TOOL_CALLS][{"name": ..., "arguments": {...}}, ...], or for each call [TOOL_CALLS]NAME[ARGS]{...}
qwen     <tool_call>{"name": ..., "arguments": {...}}</tool_call>, and further ones
"""

import json
import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Any


@dataclass(frozen=True)
class ToolFormat:
    """The writing of calls. opener: comes before the JSON of a call, or of a list of calls; `bracket` begins that.

    arguments: the name of a call's arguments. skipped: the texts that may follow a call, besides spaces. may_head:
    the function's name may come before its arguments, in _HEAD.
    """

    opener: str
    bracket: str = "{"
    arguments: str = "arguments"
    skipped: tuple[str, ...] = ()
    needs_opener: bool = True
    may_head: bool = False


_HEAD = re.compile(r"\s{0,8}([A-Za-z0-9_-]{1,64})(?:\[CALL_ID\][A-Za-z0-9]{1,64})?\[ARGS\]")
_BEGUN_HEAD = re.compile(
    r"\s{0,8}(?:[A-Za-z0-9_-]{1,64}(?:\[[A-Z_]{0,7}|\[CALL_ID\][A-Za-z0-9]{0,64}(?:\[[A-Z]{0,4})?)?)?"
)
"""Matches all that may become a head."""
FORMATS = {
    "llama": ToolFormat("<|python_tag|>", arguments="parameters", skipped=(";",), needs_opener=False),
    "mistral": ToolFormat("[TOOL_CALLS]", bracket="[", may_head=True),
    "qwen": ToolFormat("<tool_call>", skipped=("</tool_call>",)),
}


@dataclass(frozen=True)
class ToolCall:
    """A call of a function; `arguments` is an object in JSON."""

    name: str
    arguments: str


class _Place(Enum):
    """The place of the next character: at the start of the answer, in text, in a call's head or JSON, behind a call."""

    START = "start"
    TEXT = "text"
    HEAD = "head"
    CALL = "call"
    BEHIND = "behind"


class CallParser:
    """Splits an answer into text and calls. All but a whole call of a known tool is text.

    START, BEHIND ──opener, bracket──▶ (HEAD ──its name──▶) CALL ──its last bracket──▶ BEHIND
         └──other text──▶ TEXT ──opener──▶ (HEAD ▶) CALL ──no call──▶ TEXT
    """

    def __init__(self, tool_format: ToolFormat, names: Collection[str]) -> None:
        self._format = tool_format
        self._names = names
        self._place = _Place.START
        self._held = ""
        self._scan = _JsonScan()
        self._name = ""

    def feed(self, text: str) -> list[str | ToolCall]:
        """Feeds text; returns what has become certain, in order."""
        self._held += text
        found: list[str | ToolCall] = []
        while (certain := self._next()) is not None:
            found += certain
        return [one for one in found if one != ""]

    def flush(self) -> str:
        """Returns the text held back, at the end of the answer."""
        held, self._held = self._held, ""
        is_rest_of_call = self._place is _Place.BEHIND and not held.strip()
        return "" if is_rest_of_call else held

    def _next(self) -> list[str | ToolCall] | None:
        """Takes a step; None where more text is needed for one."""
        if self._place is _Place.HEAD:
            return self._take_head()
        if self._place is _Place.CALL:
            return self._take_call()
        return self._take_text() if self._place is _Place.TEXT else self._take_start()

    def _take_start(self) -> list[str | ToolCall] | None:
        """Looks for a call where one may stand without text before it."""
        stripped, form = self._held.lstrip(), self._format
        if self._place is _Place.BEHIND:
            for one in form.skipped:
                if stripped.startswith(one):
                    self._held = stripped[len(one) :]
                    return []
        num_spaces = len(self._held) - len(stripped)
        if stripped.startswith(form.opener):
            return self._begin_call(num_spaces + len(form.opener))
        if not form.needs_opener and stripped.startswith(form.bracket):
            return self._begin_call(num_spaces)
        if any(one.startswith(stripped) for one in (form.opener, *form.skipped)):
            return None
        self._place = _Place.TEXT
        return []

    def _take_text(self) -> list[str | ToolCall] | None:
        before, opener, _ = self._held.partition(self._format.opener)
        if opener:
            self._held = self._held[len(before) :]
            return [before, *self._begin_call(len(opener))]
        kept = _overlap(self._held, self._format.opener)
        certain, self._held = self._held[: len(self._held) - kept], self._held[len(self._held) - kept :]
        return [certain] if certain else None

    def _begin_call(self, start: int) -> list[str | ToolCall]:
        self._place, self._scan, self._name = _Place.CALL, _JsonScan(start), ""
        if self._format.may_head:
            self._place = _Place.HEAD
        return []

    def _take_head(self) -> list[str | ToolCall] | None:
        """Takes the name of a call whose arguments follow; all else is for `_take_call`."""
        if head := _HEAD.match(self._held, self._scan.first):
            self._name, self._scan = head[1], _JsonScan(head.end())
        elif _BEGUN_HEAD.fullmatch(self._held, self._scan.first):
            return None
        self._place = _Place.CALL
        return []

    def _take_call(self) -> list[str | ToolCall] | None:
        end = self._scan.end_of(self._held, "{" if self._name else self._format.bracket)
        if end is None:
            return None
        raw, self._held = self._held[:end], self._held[end:]
        calls = list(self._calls_in(raw[self._scan.first :]))
        self._place = _Place.BEHIND if calls else _Place.TEXT
        return [*calls] if calls else [raw]

    def _calls_in(self, text: str) -> Iterator[ToolCall]:
        """Yields the calls of a JSON text; none if one of them is invalid, or has arguments that JSON cannot write."""
        try:
            read = json.loads(text)
            if self._name:
                read = {"name": self._name, self._format.arguments: read}
            calls = [self._call(one) for one in (read if isinstance(read, list) else [read])]
        except (ValueError, RecursionError):
            return
        if None not in calls:
            yield from (one for one in calls if one is not None)

    def _call(self, read: Any) -> ToolCall | None:
        if not isinstance(read, dict):
            return None
        name, arguments = read.get("name"), read.get(self._format.arguments)
        if not (isinstance(name, str) and name in self._names and isinstance(arguments, dict)):
            return None
        encoded = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
        return ToolCall(name, encoded.encode().decode())  # half a surrogate pair is a ValueError


class _JsonScan:
    """The end of a JSON value in text that grows: each character is looked at once. `first`: where the value begins."""

    def __init__(self, start: int = 0) -> None:
        self.first = start
        self._place = start
        self._depth = 0
        self._is_in_string = False
        self._is_escaped = False

    def end_of(self, text: str, bracket: str) -> int | None:
        """Returns the place behind the value, or behind a character that cannot begin it; None before that."""
        while self._place < len(text):
            char = text[self._place]
            self._place += 1
            if not self._depth and char != bracket:
                if not char.isspace():
                    return self._place
            elif self._is_in_string:
                self._is_in_string = self._is_escaped or char != '"'
                self._is_escaped = char == "\\" and not self._is_escaped
            elif char == '"':
                self._is_in_string = True
            else:
                self._depth += (char in "{[") - (char in "}]")
                if not self._depth:
                    return self._place
        return None


def _overlap(text: str, opener: str) -> int:
    """Counts the characters at a text's end that an opener may begin with."""
    longest = min(len(text), len(opener) - 1)
    return next((length for length in range(longest, 0, -1) if opener.startswith(text[-length:])), 0)
