"""A lower bound on the tokens of a text, without tokenizing."""

import json
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import tokenizers
from tokenizers import pre_tokenizers

SLICE_CHARS = 1 << 16
WHOLE = 1 << 32
"""The share of a whole token; shares are integers, rounded down."""
_SPACE = "▁"
_BYTE_LEVEL_PARTS = ("ByteLevel", "Split", "Digits", "NFC")
_FALLBACK_PARTS = ("Metaspace", "Split", "Digits", "Prepend", "Replace")
STABLE = ((0x00, 0x7F), (0x4E00, 0x9FFF), (0x1F300, 0x1FAFF))
"""ASCII, Han and emoji: NFC keeps these, unless another character follows."""


class TokenBound:
    """The bytes of a text as shares of tokens: a byte's share is 1 / the length of the longest token with it.

    A token's shares add up to 1 at most. So a text has at least as many tokens as shares, if its tokenizer drops
    nothing and spells every byte. If that is not certain, the bound is 0.
    """

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        definition = json.loads(backend.to_str())
        parts = [*_parts_of(definition["normalizer"]), *_parts_of(definition["pre_tokenizer"])]
        kinds = {part["type"] for part in parts}
        self._is_byte_level = "ByteLevel" in kinds
        self._is_nfc = "NFC" in kinds
        allowed = _BYTE_LEVEL_PARTS if self._is_byte_level else _FALLBACK_PARTS
        is_sound = kinds <= set(allowed) and all(map(_drops_nothing, parts)) and _spells_all(definition)
        self._shares = WHOLE // _longest(self._tokens(backend)) * is_sound

    def min_tokens(self, text: str, enough: int) -> int:
        """Bounds the tokens of a text from below; stops once the bound exceeds `enough`."""
        num_shares = 0
        for start in range(0, len(text) if self._shares.any() else 0, SLICE_CHARS):
            # The last character is left out: NFC may join it to the first one of the next slice.
            data = self._stable(text[start : start + SLICE_CHARS])[:-1].encode(errors="surrogatepass")
            num_shares += int(self._shares[np.frombuffer(data, np.uint8)].sum())
            if num_shares > enough * WHOLE:
                break
        return -(-num_shares // WHOLE)

    def _tokens(self, backend: tokenizers.Tokenizer) -> Iterator[bytes]:
        """Yields for each token the longest bytes of text that it may stand for."""
        spelling = str.maketrans({char: chr(byte) for char, byte in byte_alphabet().items()})
        for content in backend.get_vocab(with_added_tokens=False):
            if self._is_byte_level:
                yield content.translate(spelling).encode("latin-1", "replace")
            else:
                yield self._one_space(content).encode()
        for added in backend.get_added_tokens_decoder().values():
            yield self._one_space(added.content).encode()
            if backend.normalizer is not None:
                yield self._one_space(backend.normalizer.normalize_str(added.content)).encode()

    def _stable(self, text: str) -> str:
        """Returns the part of a text that reaches the vocabulary unchanged."""
        if not self._is_nfc or text.isascii():
            return self._one_space(text)
        codes = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), np.uint32)
        is_stable = np.zeros(len(codes), bool)
        for first, last in STABLE:
            is_stable |= (codes >= first) & (codes <= last)
        is_stable[:-1] &= is_stable[1:]
        return codes[is_stable].tobytes().decode("utf-32-le")

    def _one_space(self, text: str) -> str:
        """Writes spaces in one of the two ways of a vocabulary without byte level."""
        return text if self._is_byte_level else text.replace(_SPACE, " ")


def _parts_of(definition: dict[str, Any] | None) -> list[dict[str, Any]]:
    """Lists the steps of a normalizer or a pre-tokenizer."""
    if definition is None:
        return []
    inner = definition.get("normalizers", definition.get("pretokenizers"))
    return [definition] if inner is None else [part for one in inner for part in _parts_of(one)]


def _drops_nothing(part: dict[str, Any]) -> bool:
    if part["type"] == "Replace":
        return (part["pattern"], part["content"]) == ({"String": " "}, _SPACE)
    return part.get("behavior") != "Removed" and part.get("replacement", _SPACE) == _SPACE


def _spells_all(definition: dict[str, Any]) -> bool:
    """Returns whether a tokenizer keeps each byte: no byte is unknown or absorbed by an added token."""
    model = definition["model"]
    if model["type"] != "BPE" or model["continuing_subword_prefix"] or model["end_of_word_suffix"]:
        return False
    if any(token["lstrip"] or token["rstrip"] for token in definition["added_tokens"]):
        return False
    fallback = {f"<0x{byte:02X}>" for byte in range(256) if model["byte_fallback"]}
    is_byte_level = "ByteLevel" in {part["type"] for part in _parts_of(definition["pre_tokenizer"])}
    needed = byte_alphabet().keys() if is_byte_level else fallback
    return bool(needed) and set(model["vocab"]) >= needed


def _longest(tokens: Iterable[bytes]) -> Any:
    """Lists for each byte the length of the longest token that has it."""
    len_to_bytes: dict[int, set[int]] = {}
    for token in tokens:
        len_to_bytes.setdefault(len(token), set()).update(token)
    longest = np.ones(256, np.int64)
    for length in sorted(len_to_bytes):
        longest[list(len_to_bytes[length])] = length
    return longest


def byte_alphabet() -> dict[str, int]:
    """The characters for bytes in byte-level vocabularies (GPT-2): printable bytes as themselves, others from 256."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    own = {char: ord(char) for char in alphabet if ord(char) < 256}
    others = sorted(set(range(256)) - set(own.values()))
    return own | dict(zip(alphabet[len(own) :], others, strict=True))
