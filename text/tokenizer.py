"""A model folder's tokenizer, on the `tokenizers` library alone."""

from collections.abc import Sequence
from enum import Enum
from pathlib import Path
from typing import Protocol

import tokenizers
from tokenizers import processors

from text.model_file import read_model_file
from text.tokenizer_config import TokenizerConfig
from wire.errors import InvalidRequest, ModelError

MAX_TOKENIZER_BYTES = 64 << 20


class TokenKind(Enum):
    """What one token adds to text."""

    TEXT = "text"
    BYTE = "byte"
    """A raw byte of a byte-fallback vocabulary: its text is known only when the run of such tokens has ended."""
    SILENT = "silent"
    """Nothing: a special token, or an id that no token has."""


class Detokenizer(Protocol):
    """What incremental text needs of a tokenizer."""

    def decode(self, ids: Sequence[int]) -> str: ...

    def kind(self, token_id: int) -> TokenKind: ...


class Tokenizer:
    """Immutable after load, and safe to share between threads. The library lets go of the GIL while it works."""

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        self._backend = backend
        added = backend.get_added_tokens_decoder()
        self._special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        self._byte_ids = _byte_fallback_ids(backend)
        self._vocab_size = max(backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1

    @classmethod
    def load(cls, folder: Path) -> "Tokenizer":
        """Reads tokenizer.json and, if it is there, tokenizer_config.json. Raises ModelError if one is malformed."""
        definition = read_model_file(folder, "tokenizer.json", MAX_TOKENIZER_BYTES)
        if definition is None:
            raise ModelError("tokenizer.json: missing")
        try:
            backend = tokenizers.Tokenizer.from_str(definition)
        except Exception as error:  # the library raises no narrower type
            raise ModelError("tokenizer.json: not a tokenizer") from error
        backend.no_truncation()
        backend.no_padding()
        _apply(TokenizerConfig.load(folder), backend)
        return cls(backend)

    @property
    def vocab_size(self) -> int:
        """One more than the highest token id; the model's output may be wider."""
        return self._vocab_size

    def encode(self, text: str) -> list[int]:
        """Token ids, with the special tokens that belong around a text. Raises InvalidRequest for lone surrogates."""
        try:
            ids: list[int] = self._backend.encode(text).ids
        except (TypeError, UnicodeEncodeError) as error:
            raise InvalidRequest("text", "not valid Unicode") from error
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """Text without special tokens; ids that no token has add nothing."""
        text: str = self._backend.decode(ids, skip_special_tokens=True)
        return text

    def kind(self, token_id: int) -> TokenKind:
        if token_id in self._byte_ids:
            return TokenKind.BYTE
        if token_id in self._special_ids or self._backend.id_to_token(token_id) is None:
            return TokenKind.SILENT
        return TokenKind.TEXT


def _apply(config: TokenizerConfig, backend: tokenizers.Tokenizer) -> None:
    known = {repr(token) for token in backend.get_added_tokens_decoder().values()}
    backend.add_tokens([token for token in config.added_tokens if repr(token) not in known])
    backend.add_special_tokens(list(config.special_tokens))
    if config.states_bos_or_eos or backend.post_processor is None:
        backend.post_processor = _template(config, backend)


def _template(config: TokenizerConfig, backend: tokenizers.Tokenizer) -> processors.PostProcessor:
    before = [config.bos_token] if config.adds_bos and config.bos_token else []
    after = [config.eos_token] if config.adds_eos and config.eos_token else []
    return processors.TemplateProcessing(
        single=[*before, "$A", *after],
        special_tokens=[(token, backend.token_to_id(token)) for token in {*before, *after}],
    )


def _byte_fallback_ids(backend: tokenizers.Tokenizer) -> frozenset[int]:
    if "ByteFallback" not in repr(backend.decoder):
        return frozenset()
    ids = (backend.token_to_id(f"<0x{byte:02X}>") for byte in range(256))
    return frozenset(token_id for token_id in ids if token_id is not None)
