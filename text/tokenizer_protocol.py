"""The seam of tokenizers, between text and token ids."""

from collections.abc import Sequence
from enum import Enum
from typing import Protocol


class TokenKind(Enum):
    """The contribution of a token to text."""

    TEXT = "text"
    BYTE = "byte"
    """A raw byte of a byte-fallback vocabulary; its text is known only at the end of a run of raw bytes."""
    SILENT = "silent"
    """No text: a special token, or an unknown id."""


class Detokenizer(Protocol):
    """A decoder of token ids to text."""

    def decode(self, ids: Sequence[int]) -> str:
        """Decodes ids without special tokens; unknown ids add no text."""

    def kind(self, token_id: int) -> TokenKind: ...


class TextCodec(Detokenizer, Protocol):
    """A tokenizer, both ways: `Tokenizer`, or its twin `ByteTokenizer`. Thread-safe."""

    @property
    def vocab_size(self) -> int:
        """The highest token id plus one; the model's output may be wider."""

    def encode(self, text: str) -> list[int]:
        """Encodes a text, with the special tokens around it. Raises InvalidRequest for lone surrogates."""

    @property
    def special_tokens(self) -> Sequence[str]:
        """The texts that `encode` maps to special tokens."""

    def spelling(self, special_tokens: Sequence[str]) -> Detokenizer:
        """Returns a Detokenizer that writes these special tokens, too."""

    def encode_rendered(self, text: str) -> list[int]:
        """Encodes a text without adding special tokens around it."""

    def pieces(self, text: str) -> list[str]:
        """Cuts a text before special tokens; tokens of `encode_rendered` of the pieces, joined, are the text's."""

    def token_bytes(self, token_id: int) -> bytes:
        """Returns a token's bytes of text: the name of a special token, nothing for an unknown id."""

    def min_tokens(self, text: str, enough: int) -> int:
        """Returns a lower bound on a text's tokens, counted until it exceeds `enough`; 0 if unknown."""
