"""A model folder's tokenizer, on the `tokenizers` library alone."""

from collections.abc import Sequence
from pathlib import Path

import tokenizers

from text.codec import TokenKind
from text.model_file import read_text
from text.tokenizer_config import TokenizerConfig
from wire.errors import InvalidRequest, ModelError

MAX_TOKENIZER_BYTES = 64 << 20


class Tokenizer:
    """A `TextCodec`, immutable after load. `encode` lets other threads run."""

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        self._backend = backend
        ids = frozenset(backend.get_vocab(with_added_tokens=True).values())
        self._vocab_size = max(ids, default=-1) + 1
        self._silent_ids = frozenset(range(self._vocab_size)) - ids | _special_ids(backend)
        self._byte_ids = _byte_fallback_ids(backend)

    @classmethod
    def load(cls, folder: Path) -> "Tokenizer":
        """Reads tokenizer.json and, if it is there, tokenizer_config.json. Raises ModelError if one is malformed."""
        definition = read_text(folder / "tokenizer.json", MAX_TOKENIZER_BYTES)
        if definition is None:
            raise ModelError("tokenizer.json: missing")
        try:
            backend = tokenizers.Tokenizer.from_str(definition)
        except Exception as error:  # the library raises no narrower type
            raise ModelError("tokenizer.json: not a tokenizer") from error
        backend.no_truncation()
        backend.no_padding()
        _add_tokens(backend, TokenizerConfig.load(folder))
        return cls(backend)

    @property
    def vocab_size(self) -> int:
        return self._vocab_size

    def encode(self, text: str) -> list[int]:
        try:
            # Unlike `encode`, the batch call lets go of the GIL; this one also skips the character offsets.
            (encoding,) = self._backend.encode_batch_fast([text])
        except TypeError as error:
            raise InvalidRequest("text", "not valid Unicode") from error
        return list(encoding.ids)

    def decode(self, ids: Sequence[int]) -> str:
        text: str = self._backend.decode(ids, skip_special_tokens=True)
        return text

    def kind(self, token_id: int) -> TokenKind:
        if token_id in self._silent_ids or token_id >= self._vocab_size:
            return TokenKind.SILENT
        return TokenKind.BYTE if token_id in self._byte_ids else TokenKind.TEXT


def _add_tokens(backend: tokenizers.Tokenizer, config: TokenizerConfig) -> None:
    known = backend.get_added_tokens_decoder().values()
    described = {repr(token) for token in known}
    declared = [token for token in config.declared_tokens if repr(token) not in described]
    present = {token.content for token in (*known, *declared)}
    backend.add_tokens([*declared, *(token for token in config.special_tokens if token.content not in present)])


def _special_ids(backend: tokenizers.Tokenizer) -> frozenset[int]:
    added = backend.get_added_tokens_decoder()
    return frozenset(token_id for token_id, token in added.items() if token.special)


def _byte_fallback_ids(backend: tokenizers.Tokenizer) -> frozenset[int]:
    if "ByteFallback" not in repr(backend.decoder):
        return frozenset()
    ids = (backend.token_to_id(f"<0x{byte:02X}>") for byte in range(256))
    return frozenset(token_id for token_id in ids if token_id is not None)
