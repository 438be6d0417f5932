"""The parser of tool calls in an answer's text, while it streams. Pure; never raises."""

import json
import re
from collections.abc import Collection
from dataclasses import dataclass
from enum import Enum
from typing import Any

from text.answer.formats import FENCE, MAY_BE_FENCED, CallFormat


@dataclass(frozen=True)
class CallBegun:
    """The name of a call, whose arguments follow."""

    name: str


@dataclass(frozen=True)
class Arguments:
    """A delta of the current call's arguments, as the model writes them: all deltas together are a JSON object."""

    text: str


@dataclass(frozen=True)
class Reasoning:
    """A delta of the reasoning."""

    text: str


Found = str | Reasoning | CallBegun | Arguments
"""A part of an answer; a plain `str` is a delta of the content."""
MAX_PIECE_CHARS = 1024
"""Length of the pieces that a feed is parsed in: each call copies the held text, quadratic in a piece's length."""
_NAME = r'([^"\\]{1,128})'
_BARE_HEAD = re.compile(r"\s{0,8}([A-Za-z0-9_-]{1,128})(?:\[CALL_ID\][A-Za-z0-9]{1,64})?\[ARGS\]\s{0,8}(?={)")
_BEGUN_BARE_HEAD = re.compile(
    r"\s{0,8}(?:[A-Za-z0-9_-]{1,128}(?:\[[A-Z_]{0,7}|\[ARGS\]\s{0,8}"
    r"|\[CALL_ID\][A-Za-z0-9]{0,64}(?:\[[A-Z]{0,4}|\[ARGS\]\s{0,8})?)?)?"
)
"""Matches a text that may still grow into a match of _BARE_HEAD."""
MAX_HEAD_CHARS = 256
"""Bound on the length of a head: a match ends within it."""


class _CallState(Enum):
    """The parser's state: at the start, in text, in a part of a call, after a call, or between two calls of a list.

    VALUE: in a JSON value that is longer than a call's head, but may be a call with its keys in another order.
    """

    START = "start"
    TEXT = "text"
    HEAD = "head"
    VALUE = "value"
    ARGUMENTS = "arguments"
    TAIL = "tail"
    LIST = "list"
    BEHIND = "behind"


class CallParser:
    """Splits an answer into text and calls. A call begins as soon as it names a known function; all else is text.

    START, BEHIND ──untagged head──▶ ARGUMENTS, in formats that take it
    START, BEHIND ──opener──▶ HEAD ──name──▶ ARGUMENTS ──last bracket──▶ TAIL ──▶ BEHIND, or LIST ──comma──▶ HEAD
         └──other text──▶ TEXT ──opener──▶ HEAD ──no call──▶ TEXT
                                           HEAD ──MAX_HEAD_CHARS──▶ VALUE ──last bracket──▶ BEHIND, LIST or TEXT

    Time is linear in the text's length, however feeds split it: held text is joined once.
    """

    def __init__(self, call_format: CallFormat, names: Collection[str]) -> None:
        self._format = call_format
        self._names = names
        self._state = _CallState.START
        self._held = ""
        self._spaces: list[str] = []  # behind what is held, joined once other text follows
        self._is_blank = True
        self._value: list[str] = []  # of VALUE, before what is held
        self._scan = _JsonScan()
        self._is_in_list = False
        self._skipped = call_format.skipped  # and the end of a block of code, behind a call in one
        self._untagged_heads = [
            f'{fence}{{"name":"{name}","{call_format.arguments}":{{'
            for name in (names if call_format.takes_untagged else ())
            for fence in ("", FENCE, f"{FENCE}json")
        ]
        head = rf"{call_format.head_pattern(_NAME)}(?={{)"
        self._head, self._untagged_head = re.compile(head), re.compile(f"{MAY_BE_FENCED}{head}")
        self._steps = {
            _CallState.START: self._take_start,
            _CallState.BEHIND: self._take_start,
            _CallState.TEXT: self._take_text,
            _CallState.HEAD: self._take_head,
            _CallState.VALUE: self._take_value,
            _CallState.ARGUMENTS: self._take_arguments,
            _CallState.TAIL: self._take_tail,
            _CallState.LIST: self._take_comma,
        }

    def feed(self, text: str) -> list[Found]:
        """Feeds text; returns the text and calls that no later text can change, in order."""
        found: list[Found] = []
        for start in range(0, len(text), MAX_PIECE_CHARS):
            piece = text[start : start + MAX_PIECE_CHARS]
            if self._is_blank and piece.isspace():
                self._spaces.append(piece)
                continue
            self._held = self._take_held() + piece
            while (certain := self._steps[self._state]()) is not None:
                found += certain
            is_waiting = self._state in (_CallState.START, _CallState.BEHIND, _CallState.LIST, _CallState.HEAD)
            self._is_blank = is_waiting and not self._held[self._scan.first :].strip()
        return [one for one in found if one != ""]

    def flush(self) -> list[Found]:
        """Returns the text held back, at the end of the answer."""
        held, self._held = "".join((*self._value, self._take_held())), ""
        is_behind = self._state in (_CallState.BEHIND, _CallState.LIST)
        is_rest_of_call = is_behind and any(one.startswith(held.strip()) for one in ("", *self._skipped))
        return [held] if held and not is_rest_of_call else []

    def _take_held(self) -> str:
        """Returns the text held back, with the white space after it."""
        held = "".join((self._held, *self._spaces))
        self._spaces.clear()
        return held

    def _take_start(self) -> list[Found] | None:
        """Looks for a call at the start or directly after another call; None if more text is needed."""
        stripped, form = self._held.lstrip(), self._format
        if self._state is _CallState.BEHIND:
            for one in self._skipped:
                if stripped.startswith(one):
                    self._held, self._skipped = stripped[len(one) :], form.skipped
                    return []
        num_spaces = len(self._held) - len(stripped)
        if stripped.startswith(form.opener):
            return self._go_to(_CallState.HEAD, num_spaces + len(form.opener))
        if not form.needs_opener and stripped.startswith(form.bracket):
            return self._go_to(_CallState.HEAD, num_spaces)
        if any(one.startswith(stripped) for one in (form.opener, *self._skipped)):
            return None
        return self._take_untagged(stripped)

    def _take_untagged(self, stripped: str) -> list[Found] | None:
        """Begins a call without an opener once its whole head is there; None while the text may become one."""
        if self._untagged_heads and (head := self._untagged_head.match(stripped)) and head[1] in self._names:
            self._held, skipped = stripped, self._format.skipped
            self._skipped = (FENCE, *skipped) if FENCE in head[0] else skipped
            return self._begin_call(head, _CallState.TAIL)
        squeezed = "".join(stripped[: MAX_HEAD_CHARS + 1].split())
        may_become = len(stripped) <= MAX_HEAD_CHARS and any(one.startswith(squeezed) for one in self._untagged_heads)
        return None if may_become else self._go_to(_CallState.TEXT)

    def _take_text(self) -> list[Found] | None:
        before, opener, _ = self._held.partition(self._format.opener)
        if opener:
            self._held = self._held[len(before) :]
            return [before, *self._go_to(_CallState.HEAD, len(opener))]
        kept = overlap(self._held, self._format.opener)
        certain, self._held = self._held[: len(self._held) - kept], self._held[len(self._held) - kept :]
        return [certain] if certain else None

    def _take_head(self) -> list[Found] | None:
        """Begins a call once its name and, after it, the first bracket of its arguments are there."""
        first = self._scan.first
        if self._format.bracket == "[" and not self._is_in_list:
            if head := _BARE_HEAD.match(self._held, first):
                return self._begin_call(head, _CallState.BEHIND)
            if _BEGUN_BARE_HEAD.fullmatch(self._held, first):
                return None
            rest = self._held[first:].lstrip()
            if rest.startswith("["):
                self._is_in_list = True
                return self._go_to(_CallState.HEAD, len(self._held) - len(rest) + 1)
        if (head := self._head.match(self._held, first)) and head[1] in self._names:
            return self._begin_call(head, _CallState.TAIL)
        return self._take_value()

    def _take_value(self) -> list[Found] | None:
        """Takes a JSON object that is text, or a call with its keys in another order; collects it until it is whole."""
        end, first = self._scan.end_of(self._held, "{"), self._scan.first
        if end is not None:
            raw, self._held = "".join((*self._value, self._held[:end])), self._held[end:]
            self._value.clear()
            return self._take_whole(raw, first)
        if self._state is _CallState.VALUE or (self._scan.has_begun and len(self._held) - first > MAX_HEAD_CHARS):
            self._state = _CallState.VALUE
            self._value.append(self._held)
            self._held = ""
            self._scan.rewind()
        return None

    def _begin_call(self, head: re.Match[str], behind: _CallState) -> list[Found]:
        if head[1] not in self._names:
            raw, self._held = head.string[: head.end()], head.string[head.end() :]
            return self._take_whole(raw, len(raw))
        self._held = self._held[head.end() :]
        self._behind_arguments = behind
        return [CallBegun(head[1]), *self._go_to(_CallState.ARGUMENTS)]

    def _take_whole(self, raw: str, first: int) -> list[Found]:
        """Takes text whose part from `first` on may be a call."""
        call = self._call_in(raw[first:])
        self._go_to((_CallState.LIST if self._is_in_list else _CallState.BEHIND) if call else _CallState.TEXT)
        return [*call] if call else [raw]

    def _take_arguments(self) -> list[Found] | None:
        end = self._scan.end_of(self._held, "{")
        text, self._held = self._held[:end], self._held[len(self._held) if end is None else end :]
        if end is not None:
            self._go_to(self._behind_arguments)
            self._scan = _JsonScan(depth=1)
        self._scan.rewind()
        return [Arguments(text)] if text else None

    def _take_tail(self) -> list[Found] | None:
        """Drops the tail of a call, from its arguments to its last bracket."""
        end = self._scan.end_of(self._held, "{")
        self._held = "" if end is None else self._held[end:]
        self._scan.rewind()
        return None if end is None else self._go_to(_CallState.LIST if self._is_in_list else _CallState.BEHIND)

    def _take_comma(self) -> list[Found] | None:
        stripped = self._held.lstrip()
        if not stripped:
            return None
        self._held = stripped.removeprefix("]")
        self._is_in_list = stripped.startswith(",")
        return self._go_to(_CallState.HEAD, 1) if self._is_in_list else self._go_to(_CallState.BEHIND)

    def _go_to(self, state: _CallState, first: int = 0) -> list[Found]:
        """Enters a state, with a new scan for a JSON value from `first` on. Returns no parts."""
        self._state, self._scan = state, _JsonScan(first)
        if state is _CallState.TEXT:
            self._is_in_list = False
        return []

    def _call_in(self, text: str) -> list[Found]:
        """Parses a call; returns no parts if it is invalid, or if JSON cannot write its arguments."""
        try:
            read: Any = json.loads(text)
            name, arguments = (read.get("name"), read.get(self._format.arguments)) if isinstance(read, dict) else (0, 0)
            if not (isinstance(name, str) and name in self._names and isinstance(arguments, dict)):
                return []
            written = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
            return [CallBegun(name), Arguments(written.encode().decode())]  # half a surrogate pair is a ValueError
        except (ValueError, RecursionError):
            return []


class _JsonScan:
    """A scan for the end of a JSON value in a growing text, which reads each character once.

    first: the index from which on the value is expected.
    """

    def __init__(self, first: int = 0, depth: int = 0) -> None:
        self.first = first
        self._position = first
        self._depth = depth
        self._is_in_string = False
        self._is_escaped = False

    @property
    def has_begun(self) -> bool:
        """Whether the value's first bracket was read."""
        return self._depth > 0

    def rewind(self) -> None:
        """Restarts at index 0, after the caller has dropped the text read so far."""
        self._position = 0

    def end_of(self, text: str, bracket: str) -> int | None:
        """Returns the index after the value, or after a character that begins no value; None if more text is needed."""
        while self._position < len(text):
            char = text[self._position]
            self._position += 1
            if not self._depth and char != bracket:
                if not char.isspace():
                    return self._position
            elif self._is_in_string:
                self._is_in_string = self._is_escaped or char != '"'
                self._is_escaped = char == "\\" and not self._is_escaped
            elif char == '"':
                self._is_in_string = True
            else:
                self._depth += (char in "{[") - (char in "}]")
                if not self._depth:
                    return self._position
        return None


def overlap(text: str, mark: str) -> int:
    """Returns the length of the longest end of a text that is a proper prefix of a mark."""
    longest = min(len(text), len(mark) - 1)
    return next((length for length in range(longest, 0, -1) if mark.startswith(text[-length:])), 0)
