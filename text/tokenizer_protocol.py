"""The seam of tokenizers, between text and token ids."""

from collections.abc import Sequence
from enum import Enum
from typing import Protocol


class TokenKind(Enum):
    """The contribution of a token to text."""

    TEXT = "text"
    BYTE = "byte"
    """A raw byte of a byte-fallback vocabulary: its text is known only when the run of such tokens has ended."""
    SILENT = "silent"
    """Nothing: a special token, or an id that no token has."""


class Detokenizer(Protocol):
    """Token ids to text."""

    def decode(self, ids: Sequence[int]) -> str:
        """Decodes ids without special tokens; ids that no token has add nothing."""

    def kind(self, token_id: int) -> TokenKind: ...


class TextCodec(Detokenizer, Protocol):
    """Both ways. Implementations are `Tokenizer` and its twin `ByteTokenizer`; both may be shared between threads."""

    @property
    def vocab_size(self) -> int:
        """The highest token id plus one; the model's output may be wider."""

    def encode(self, text: str) -> list[int]:
        """Encodes a text, with the special tokens that belong around it. Raises InvalidRequest for lone surrogates."""

    @property
    def special_tokens(self) -> Sequence[str]:
        """The texts that `encode` takes for special tokens."""

    def spelling(self, special_tokens: Sequence[str]) -> Detokenizer:
        """Returns the way back to text that writes these special tokens, too."""

    def encode_rendered(self, text: str) -> list[int]:
        """Encodes as `encode` does, with no special tokens but the ones in the text."""

    def pieces(self, text: str) -> list[str]:
        """Cuts a text before special tokens; `encode_rendered` of the pieces, joined, is that of the text."""

    def token_bytes(self, token_id: int) -> bytes:
        """Returns the bytes of text that a token stands for, the name of a special one; none for an unknown id."""

    def min_tokens(self, text: str, enough: int) -> int:
        """Counts tokens that a text has at the least, until there are more than `enough`; 0 where that is not known."""
