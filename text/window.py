"""Detokenization token by token, in time linear in the tokens."""

from text.codec import Detokenizer, TokenKind

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
        """Releases the text not yet emitted, at the end of the stream."""
        text = self._tokenizer.decode(self._ids)[self._num_emitted :]
        self._num_emitted += len(text)
        return text

    def _drop_context(self) -> None:
        """Makes the pending tokens, now that all text is out, the context of the next ones."""
        del self._ids[: self._num_context]
        self._num_context = len(self._ids)
        self._num_emitted = len(self._tokenizer.decode(self._ids))

    def _drop_endless(self, text: str) -> None:
        """Shortens a window of bytes that make no character, where both sides of a cut decode as they do together."""
        for cut in range(len(self._ids) - 1, len(self._ids) - 1 - _MAX_CHARACTER_BYTES, -1):
            left, right = (self._tokenizer.decode(part) for part in (self._ids[:cut], self._ids[cut:]))
            if left + right == text:
                del self._ids[:cut]
                self._num_context = 0
                self._num_emitted -= len(left)
                return
