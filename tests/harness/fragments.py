"""A tokenizer whose tokens are parts of characters."""

from collections.abc import Sequence

from text.tokenizer_protocol import TokenKind

_FRAGMENTS = (b"\xe2\x82", b"\xac", b"a", b"\xc3", b"\xa4b", b"\xf0\x9f", b"\x98\x80", b" c")


class FragmentTokenizer:
    """A Codec. Nearly every character is split over tokens, and many tokens make no character at all."""

    vocab_size = 300
    special_tokens = ()

    def encode(self, text: str) -> list[int]:
        return [2] * len(text)

    def spelling(self, special_tokens: Sequence[str]) -> "FragmentTokenizer":
        return self

    def encode_rendered(self, text: str) -> list[int]:
        return self.encode(text)

    def pieces(self, text: str) -> list[str]:
        return [text]

    def token_bytes(self, token_id: int) -> bytes:
        return _FRAGMENTS[token_id % len(_FRAGMENTS)]

    def min_tokens(self, text: str, enough: int) -> int:
        return 0

    def decode(self, ids: Sequence[int]) -> str:
        return b"".join(_FRAGMENTS[token_id % len(_FRAGMENTS)] for token_id in ids).decode(errors="replace")

    def kind(self, token_id: int) -> TokenKind:
        return TokenKind.TEXT
