"""The parser of answers in harmony, gpt-oss's format (arXiv 2508.10925), while they stream. Pure; never raises.

An answer is messages: a header, <|message|>, a body, and <|end|>, <|call|> or the answer's end. A header names a
channel (analysis, commentary, final) and, for a call, its function: to=functions.NAME.
"""

import re
from collections.abc import Callable, Collection

from text.answer.calls import MAX_HEAD_CHARS, MAX_PIECE_CHARS, Arguments, CallBegun, Found, Reasoning, overlap

BODY = "<|message|>"
_ENDS = ("<|end|>", "<|call|>", "<|return|>")
_END = re.compile("|".join(map(re.escape, _ENDS)))
_HEADERS = ("<|start|>", "<|channel|>", "to=")
"""The beginnings of headers; the chat template may have written the first."""
_FUNCTION = re.compile(r"to=functions\.([A-Za-z0-9_-]{1,128})")
_CHANNEL = re.compile(r"<\|channel\|>(\w+)")
_CUT_HEADER = re.compile(
    r"\s*(?:<\|start\|>\w*\s*(?:to=[\w.-]*)?|to=functions\.[\w-]*)?\s*"
    r"(?:<\|channel\|>\w*\s*(?:to?(?:=[\w.-]*)?)?\s*(?:<\|constrain\|>\w*|json)?)?\s*(?:<[|a-z]*)?"
)
"""Matches a header that ends before its body, or within a mark; any other text is content."""


class HarmonyParser:
    """Splits an answer into reasoning, content and calls of known functions. A text without a header is content."""

    def __init__(self, names: Collection[str]) -> None:
        self._names = names
        self._held = ""
        self._make: Callable[[str], Found] | None = None  # the parts of a body; None in a header
        self._lacks_arguments = False

    def feed(self, text: str) -> list[Found]:
        """Feeds text; returns the parts that no later text can change, in order."""
        found: list[Found] = []
        for start in range(0, len(text), MAX_PIECE_CHARS):
            self._held += text[start : start + MAX_PIECE_CHARS]
            while (certain := self._take_header() if self._make is None else self._take_body(self._make)) is not None:
                found += certain
        return found

    def flush(self) -> list[Found]:
        """Returns the text held back, at the end of the answer; a header that was cut is dropped."""
        held, self._held = self._held or "{}" * self._lacks_arguments, ""
        is_header = held.lstrip().startswith(_HEADERS) and _CUT_HEADER.fullmatch(held)
        make = self._make or (None if is_header else str)
        return [make(held)] if held and make else []

    def _take_header(self) -> list[Found] | None:
        header, mark, behind = self._held.partition(BODY)
        begun, length = header.lstrip(), len(header) - (0 if mark else overlap(header, BODY))
        is_header = length <= MAX_HEAD_CHARS and any(
            begun.startswith(one) or (not mark and one.startswith(begun)) for one in _HEADERS
        )
        if not is_header:
            self._make = str
            return []
        if not mark:
            return None
        self._held = behind
        function, channel = _FUNCTION.search(header), _CHANNEL.search(header)
        if function and function[1] in self._names:
            self._make, self._lacks_arguments = Arguments, True
            return [CallBegun(function[1])]
        self._make = Reasoning if channel and channel[1] == "analysis" else str
        return [header + mark] if function else []

    def _take_body(self, make: Callable[[str], Found]) -> list[Found] | None:
        if end := _END.search(self._held):
            body, self._held, self._make = self._held[: end.start()], self._held[end.end() :], None
            body = body or "{}" * self._lacks_arguments
            self._lacks_arguments = False
            return [make(body)] if body else []
        certain = len(self._held) - max(overlap(self._held, one) for one in _ENDS)
        body, self._held = self._held[:certain], self._held[certain:]
        self._lacks_arguments = self._lacks_arguments and not body
        return [make(body)] if body else None
