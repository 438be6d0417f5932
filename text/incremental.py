"""Output text of one choice, growing token by token."""

from collections.abc import Sequence
from dataclasses import dataclass

from text.codec import Detokenizer
from text.stop_strings import StopMatcher
from text.window import DecodingWindow


@dataclass(frozen=True)
class Piece:
    """The gain of a choice: its next text, the stop string that ended it, and how many of the tokens fed are output."""

    text: str
    matched_stop: str | None
    num_tokens: int


class IncrementalText:
    """The text of tokens, never taken back: no part of a character, nothing of a stop string.

    The pieces and the flush together are `decode` of all tokens, up to the stop string if one is met. How the tokens
    are split between calls makes no difference. Stop strings count after the first `min_tokens` only.

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
        """Releases the text held back, at the end of the stream; it may complete a stop string."""
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
