"""A model folder's tokenizer, on the `tokenizers` library alone."""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken

from text.model_file import read_text
from text.token_bound import TokenBound, byte_alphabet
from text.tokenizer_protocol import Detokenizer, TokenKind
from wire.errors import InvalidRequest, ModelError

MAX_TOKENIZER_BYTES = 64 << 20
MAX_CONFIG_BYTES = 8 << 20
HEAD_CHARS = 6
"""Length of the beginnings of special tokens that one search looks for: hundreds of them share few beginnings."""


@dataclass(frozen=True)
class TokenizerConfig:
    """The tokens that tokenizer_config.json adds to tokenizer.json, read as transformers 5 does."""

    declared_tokens: tuple[AddedToken, ...] = ()
    """In order of their ids."""
    special_tokens: tuple[AddedToken, ...] = ()
    """Tokens with a role (`eos_token`, ...), and extra ones."""
    end_token: str | None = None

    @classmethod
    def load(cls, folder: Path) -> "TokenizerConfig":
        """Reads the file; empty where there is none. Raises ModelError if it is malformed."""
        content = read_text(folder / "tokenizer_config.json", MAX_CONFIG_BYTES)
        if content is None:
            return cls()
        try:
            return cls._parse(json.loads(content))
        except (ValueError, TypeError, AttributeError, KeyError, RecursionError) as error:
            raise ModelError("tokenizer_config.json: malformed") from error

    @classmethod
    def _parse(cls, raw: dict[str, Any]) -> "TokenizerConfig":
        declared = {int(index): _token(value) for index, value in raw.get("added_tokens_decoder", {}).items()}
        extra = raw.get("extra_special_tokens") or raw.get("additional_special_tokens") or []
        named = {
            role: value for role, value in raw.items() if role.endswith("_token") and isinstance(value, str | dict)
        }
        named |= extra if isinstance(extra, dict) else {}
        unnamed = [] if isinstance(extra, dict) else extra
        return cls(
            declared_tokens=tuple(token for _, token in sorted(declared.items())),
            special_tokens=tuple(_token(value) for value in [*named.values(), *unnamed]),
            end_token=_token(named["eos_token"]).content if "eos_token" in named else None,
        )


def _token(value: str | dict[str, Any]) -> AddedToken:
    if isinstance(value, str):
        return AddedToken(value, special=True)
    return AddedToken(**{name: field for name, field in value.items() if name != "__type"})


class Tokenizer:
    """A `TextCodec`, immutable after load. `encode` lets other threads run."""

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        self._backend = backend
        ids = frozenset(self.vocabulary.values())
        self._vocab_size = max(ids, default=-1) + 1
        self._silent_ids = frozenset(range(self._vocab_size)) - ids | _special_ids(backend)
        self._byte_ids = _byte_fallback_ids(backend)
        self._cuts = _Cuts(list(backend.get_added_tokens_decoder().values()))
        is_byte_level = "ByteLevel" in repr(backend.decoder)
        self._char_to_byte = {ord(char): chr(byte) for char, byte in byte_alphabet().items()} if is_byte_level else {}
        self._added = {token_id: token.content for token_id, token in backend.get_added_tokens_decoder().items()}
        self.special_tokens = tuple(self._added[token_id] for token_id in sorted(_special_ids(backend)))

    @property
    def definition(self) -> str:
        """Writes the tokenizer in the library's format."""
        text: str = self._backend.to_str()
        return text

    @cached_property
    def _bound(self) -> TokenBound:
        """The bound, which reads the whole vocabulary at its first use: few processes bound a text."""
        return TokenBound(self._backend)

    @property
    def vocabulary(self) -> dict[str, int]:
        """Copies the id of each token."""
        return self._backend.get_vocab(with_added_tokens=True)

    @classmethod
    def load(cls, folder: Path) -> "Tokenizer":
        """Reads tokenizer.json and, if present, tokenizer_config.json. Raises ModelError for a malformed file."""
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
        return self._encode(text, True)

    def encode_rendered(self, text: str) -> list[int]:
        return self._encode(text, False)

    def pieces(self, text: str) -> list[str]:
        return self._cuts.pieces(text)

    def _encode(self, text: str, add_special_tokens: bool) -> list[int]:
        try:
            # Unlike `encode`, the batch call lets go of the GIL; this one also skips the character offsets.
            (encoding,) = self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        except TypeError as error:
            raise InvalidRequest("text", "not valid Unicode") from error
        ids: list[int] = encoding.ids
        return ids

    def spelling(self, special_tokens: Sequence[str]) -> Detokenizer:
        shown = {token_id for token_id, content in self._added.items() if content in special_tokens}
        return _Spelling(self._backend, self, frozenset(shown))

    def min_tokens(self, text: str, enough: int) -> int:
        return self._bound.min_tokens(text, enough)

    def decode(self, ids: Sequence[int]) -> str:
        text: str = self._backend.decode(ids, skip_special_tokens=True)
        return text

    def kind(self, token_id: int) -> TokenKind:
        if token_id in self._silent_ids or token_id >= self._vocab_size:
            return TokenKind.SILENT
        return TokenKind.BYTE if token_id in self._byte_ids else TokenKind.TEXT

    def token_bytes(self, token_id: int) -> bytes:
        if token_id in self._added:
            return self._added[token_id].encode()
        spelled = self._backend.id_to_token(token_id) or ""
        if token_id in self._byte_ids:
            return bytes.fromhex(spelled[3:5])
        if self._char_to_byte:
            return spelled.translate(self._char_to_byte).encode("latin-1", "replace")
        return spelled.replace("▁", " ").encode()


class _Spelling:
    """A Detokenizer that writes some special tokens as text."""

    def __init__(self, backend: tokenizers.Tokenizer, tokenizer: Tokenizer, shown: frozenset[int]) -> None:
        self._backend = backend
        self._tokenizer = tokenizer
        self._shown = shown

    def decode(self, ids: Sequence[int]) -> str:
        written = [token_id for token_id in ids if self.kind(token_id) is not TokenKind.SILENT]
        text: str = self._backend.decode(written, skip_special_tokens=False)
        return text

    def kind(self, token_id: int) -> TokenKind:
        return TokenKind.TEXT if token_id in self._shown else self._tokenizer.kind(token_id)


class _Cuts:
    """Special tokens before which a text may be cut without changing its tokens.

    The library takes added tokens out of a text first; normalizers and pre-tokenizers see the rest piece by piece. A
    special token begins its piece, so that the text after it is never taken for the text's beginning.
    """

    def __init__(self, added: Sequence[AddedToken]) -> None:
        raw = [token for token in added if not token.normalized]
        is_plain = not any(token.lstrip or token.single_word for token in raw)
        within = {char for token in raw for char in token.content[1:]}
        special = (token.content for token in raw if token.special and is_plain)
        self._tokens = {token for token in special if token[0] not in within and not token[0].isspace()}
        self._lengths = sorted({len(token) for token in self._tokens})
        heads = sorted({re.escape(token[:HEAD_CHARS]) for token in self._tokens})
        self._heads = re.compile("|".join(heads) or "(?!)")

    def pieces(self, text: str) -> list[str]:
        heads = (match.start() for match in self._heads.finditer(text))
        starts = (at for at in heads if any(text[at : at + length] in self._tokens for length in self._lengths))
        return [text[start:end] for start, end in pairwise([0, *starts, len(text)]) if start < end]


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
