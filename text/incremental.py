"""The output text of one choice, growing token by token: whole characters, and no stop string.

Detokenization and the search are linear in the tokens and in the text.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from text.tokenizer_protocol import Detokenizer, TokenKind

REPLACEMENT = "\ufffd"
_MAX_WINDOW = 16
_MAX_CHARACTER_BYTES = 4


class DecodingWindow:
    """The last tokens, decoded together, because a token's text depends on its neighbours.

    ```
    tokens   ... | context: text is out | pending: part of a character, or of a run of raw bytes |
                 ^ start of the window
    ```
    The context is there for decoders that treat the first token differently (a leading space is dropped).
    """

    def __init__(self, tokenizer: Detokenizer) -> None:
        self._tokenizer = tokenizer
        self._ids: list[int] = []
        self._num_context = 0
        self._num_emitted = 0  # characters of the window's text

    def append(self, token_id: int) -> str:
        """Appends a token; returns the text that has become certain."""
        kind = self._tokenizer.kind(token_id)
        if kind is TokenKind.SILENT:
            return ""
        self._ids.append(token_id)
        if kind is TokenKind.BYTE:
            return ""
        text = self._tokenizer.decode(self._ids)
        # The last character may be the beginning of one whose other bytes are still to come.
        num_certain = len(text) - text.endswith(REPLACEMENT)
        piece = text[self._num_emitted : num_certain]
        self._num_emitted = max(self._num_emitted, num_certain)
        if piece and self._num_emitted == len(text):
            self._drop_context()
        elif len(self._ids) > _MAX_WINDOW:
            self._drop_endless(text)
        return piece

    def flush(self) -> str:
        """Returns the text not yet emitted, at the end of the stream."""
        text = self._tokenizer.decode(self._ids)[self._num_emitted :]
        self._num_emitted += len(text)
        return text

    def _drop_context(self) -> None:
        """Makes the pending tokens, whose text is out, the context of the next tokens."""
        del self._ids[: self._num_context]
        self._num_context = len(self._ids)
        self._num_emitted = len(self._tokenizer.decode(self._ids))

    def _drop_endless(self, text: str) -> None:
        """Shortens a window of bytes that make no character, by a cut that does not change the text."""
        for cut in range(len(self._ids) - 1, len(self._ids) - 1 - _MAX_CHARACTER_BYTES, -1):
            left, right = (self._tokenizer.decode(part) for part in (self._ids[:cut], self._ids[cut:]))
            if left + right == text:
                del self._ids[:cut]
                self._num_context = 0
                self._num_emitted -= len(left)
                return


@dataclass(frozen=True)
class Scanned:
    """Text that is certainly output, and the stop string that ends it, if any."""

    text: str
    stop: str | None


class StopMatcher:
    """Holds back text that may be the start of a stop string, and releases the rest.

    Linear in the text (Knuth, Morris, Pratt, 1977). The first complete match wins; of several that end with the same
    character, the longest.
    """

    def __init__(self, stops: tuple[str, ...]) -> None:
        self._patterns = [_Pattern(stop) for stop in sorted(stops, key=len, reverse=True)]
        self._held = ""

    def feed(self, text: str) -> Scanned:
        """Feeds text. After a reported stop string the matcher is done: no `feed` or `flush` may follow."""
        known = self._held + text
        for end, char in enumerate(text, start=len(self._held) + 1):
            stop = self._step(char)
            if stop is not None:
                return Scanned(known[: end - len(stop)], stop)
        certain = len(known) - max((pattern.num_matched for pattern in self._patterns), default=0)
        self._held = known[certain:]
        return Scanned(known[:certain], None)

    def flush(self) -> str:
        """Returns the text held back, at the end of the stream."""
        held, self._held = self._held, ""
        return held

    def _step(self, char: str) -> str | None:
        complete = [pattern.text for pattern in self._patterns if pattern.step(char)]
        return complete[0] if complete else None


class _Pattern:
    """A stop string, and the length of its longest prefix with which the text so far ends."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.num_matched = 0
        self._borders = _borders(text)

    def step(self, char: str) -> bool:
        """Returns whether the string is complete with this character."""
        while self.num_matched and self.text[self.num_matched] != char:
            self.num_matched = self._borders[self.num_matched - 1]
        self.num_matched += self.text[self.num_matched] == char
        return self.num_matched == len(self.text)


def _borders(text: str) -> list[int]:
    """Computes for each prefix of `text` the length of the longest proper prefix that also ends it."""
    borders = [0] * len(text)
    length = 0
    for i in range(1, len(text)):
        while length and text[i] != text[length]:
            length = borders[length - 1]
        length += text[i] == text[length]
        borders[i] = length
    return borders


@dataclass(frozen=True)
class Piece:
    """The gain of a choice: its next text, the stop string that ended it, and the number of output tokens."""

    text: str
    matched_stop: str | None
    num_tokens: int


class IncrementalText:
    """The text of tokens, never revoked: no part of a character, no part of a stop string.

    All pieces and the flush, joined, are `decode` of all tokens up to the first stop string, however calls split the
    tokens. Stop strings count only after the first `min_tokens`.

    includes_stop: the stop string is part of the text, too.
    """

    def __init__(
        self, tokenizer: Detokenizer, stop: tuple[str, ...] = (), min_tokens: int = 0, includes_stop: bool = False
    ) -> None:
        self._window = DecodingWindow(tokenizer)
        self._has_stops = bool(stop)
        self._stops = StopMatcher(stop)
        self._num_free_tokens = min_tokens
        self._includes_stop = includes_stop
        self._matched_stop: str | None = None

    def feed(self, token_ids: Sequence[int]) -> Piece:
        """Feeds tokens. After the token that completes a stop string, nothing is output."""
        texts: list[str] = []
        num_tokens = 0
        for token_id in token_ids:
            if self._matched_stop is not None:
                break
            texts.append(self._release(self._window.append(token_id)))
            num_tokens += 1
        return Piece("".join(texts), self._matched_stop, num_tokens)

    def flush(self) -> Piece:
        """Returns the text held back, at the end of the stream; it may complete a stop string."""
        if self._matched_stop is not None:
            return Piece("", self._matched_stop, 0)
        text = self._scan(self._window.flush())
        if self._matched_stop is None:
            text += self._stops.flush()
        return Piece(text, self._matched_stop, 0)

    def _release(self, text: str) -> str:
        if self._num_free_tokens > 0:
            self._num_free_tokens -= 1
            return text
        return self._scan(text)

    def _scan(self, text: str) -> str:
        if not self._has_stops:
            return text
        scanned = self._stops.feed(text)
        self._matched_stop = scanned.stop
        return scanned.text + scanned.stop if scanned.stop and self._includes_stop else scanned.text
