"""The in-memory twin of a tokenizer: a token is a byte of UTF-8."""

from collections.abc import Sequence

import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from text.token_bound import byte_alphabet
from text.tokenizer_protocol import TokenKind
from wire.errors import InvalidRequest

NUM_BYTES = 256


class ByteTokenizer:
    """A tokenizer whose ids 0 to 255 are bytes; larger ids, which a model may emit, add no text."""

    vocab_size = NUM_BYTES
    special_tokens: Sequence[str] = ()

    @property
    def definition(self) -> str:
        """Writes the tokenizer in the tokenizers library's format, with a special token after the bytes."""
        backend = tokenizers.Tokenizer(models.BPE(vocab=byte_alphabet(), merges=[]))
        backend.pre_tokenizer, backend.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
        backend.add_special_tokens([AddedToken("<end>", special=True)])
        text: str = backend.to_str()
        return text

    def encode(self, text: str) -> list[int]:
        try:
            return list(text.encode())
        except UnicodeEncodeError as error:
            raise InvalidRequest("text", "not valid Unicode") from error

    def spelling(self, special_tokens: Sequence[str]) -> "ByteTokenizer":
        return self

    def encode_rendered(self, text: str) -> list[int]:
        return self.encode(text)

    def pieces(self, text: str) -> list[str]:
        return [text]

    def min_tokens(self, text: str, enough: int) -> int:
        return len(text)

    def decode(self, ids: Sequence[int]) -> str:
        return bytes(token_id for token_id in ids if token_id < NUM_BYTES).decode(errors="replace")

    def kind(self, token_id: int) -> TokenKind:
        return TokenKind.TEXT if token_id < NUM_BYTES else TokenKind.SILENT

    def token_bytes(self, token_id: int) -> bytes:
        return bytes([token_id]) if token_id < NUM_BYTES else b""
