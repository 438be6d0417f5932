"""No text that would fit is refused before it is tokenized: the bound is never above the tokens that there are."""

import unicodedata
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import tokenizers
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, models, normalizers, pre_tokenizers

from tests.text.backends import CORPUS, KINDS, byte_fallback, byte_level, metaspace, with_bos
from text.byte_tokenizer import ByteTokenizer
from text.token_bound import SLICE_CHARS, STABLE
from text.tokenizer import Tokenizer

ALL = 1 << 60
LONG = "é" * 16
WORDS = Regex(r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+")


def like_llama_3(corpus: Sequence[str] = CORPUS) -> tokenizers.Tokenizer:
    backend = byte_level(corpus)
    split = pre_tokenizers.Split(WORDS, "isolated")
    backend.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(False, use_regex=False)])
    return with_bos(backend)


def like_qwen() -> tokenizers.Tokenizer:
    """Its longest token has 32 bytes, and no other one that has them is as long."""
    backend = like_llama_3([LONG] * 20)
    backend.normalizer = normalizers.NFC()
    backend.add_tokens([AddedToken("<|im_end|>", special=True), AddedToken("é€", normalized=True)])
    return backend


def like_llama_2() -> tokenizers.Tokenizer:
    backend = byte_fallback()
    backend.pre_tokenizer = None
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.add_tokens([AddedToken("x▁y z", normalized=True), AddedToken("aaaaaaaaaaaaaaaaaaaaaaaa")])
    return backend


def changed(backend: tokenizers.Tokenizer, **parts: Any) -> tokenizers.Tokenizer:
    for name, part in parts.items():
        setattr(backend, name, part)
    return backend


def with_added(**flags: bool) -> tokenizers.Tokenizer:
    backend = byte_level()
    backend.add_tokens([AddedToken("<mask>", **flags)])
    return backend


def fusing_unknowns() -> tokenizers.Tokenizer:
    return tokenizers.Tokenizer(models.BPE({"<unk>": 0, "a": 1}, [], unk_token="<unk>", fuse_unk=True))


def dropping_unknowns() -> tokenizers.Tokenizer:
    return tokenizers.Tokenizer(models.BPE({"a": 0}, []))


KNOWN: dict[str, Callable[[], tokenizers.Tokenizer]] = {
    "llama 3": like_llama_3,
    "qwen": like_qwen,
    "llama 2": like_llama_2,
    "byte level": byte_level,
    "byte fallback": byte_fallback,
    "gemma": KINDS["byte_fallback_unstripped"],
    "metaspace": metaspace,
    "an added token": with_added,
}
UNKNOWN: dict[str, Callable[[], tokenizers.Tokenizer]] = {
    "no BPE": KINDS["word_piece"],
    "unknown characters become one token": fusing_unknowns,
    "unknown characters become none": dropping_unknowns,
    "an added token takes the spaces before": lambda: with_added(lstrip=True),
    "an added token takes the spaces after": lambda: with_added(rstrip=True),
    "ends are stripped": lambda: changed(byte_level(), normalizer=normalizers.Strip()),
    "letters change": lambda: changed(byte_level(), normalizer=normalizers.Lowercase()),
    "characters are taken apart and joined": lambda: changed(byte_level(), normalizer=normalizers.NFKC()),
    "strings are replaced": lambda: changed(byte_fallback(), normalizer=normalizers.Replace("aaaa", "a")),
    "a pattern is replaced": lambda: changed(byte_fallback(), normalizer=normalizers.Replace(Regex(" +"), "▁")),
    "spaces are dropped": lambda: changed(byte_fallback(), pre_tokenizer=pre_tokenizers.Split(" ", "removed")),
    "spaces are dropped, too": lambda: changed(byte_fallback(), pre_tokenizer=pre_tokenizers.WhitespaceSplit()),
}
TOKENIZERS = {name: Tokenizer(make()) for name, make in (KNOWN | UNKNOWN).items()}
PIECES = st.sampled_from(
    [
        *("e\u0301", "e\u0301" * 16, "\u0301", "\u1fbe\u0308\u0301", "\u212a", "\u1112\u1161\u11ab", ">\u0338"),
        *("😀", "你", "▁", " ", "   ", "<s>", "<|im_end|>", "é€", "e\u0301€", "x▁y z", "x y z", "<mask>", "hello"),
        *(" " + "a" * 24, "a" * 24, "\n", "\0"),
    ]
)
TEXTS = st.lists(PIECES | st.text(max_size=8), max_size=30).map("".join)


@pytest.mark.parametrize("name", TOKENIZERS)
@settings(deadline=None)
@given(text=TEXTS, slice_chars=st.integers(2, 40))
@example(text="x" + "e\u0301" * 64, slice_chars=2)
@example(text=(" " + "a" * 24) * 20, slice_chars=1000)
def test_a_text_has_no_fewer_tokens(name: str, text: str, slice_chars: int) -> None:
    tokenizer = TOKENIZERS[name]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("text.token_bound.SLICE_CHARS", slice_chars)
        assert tokenizer.min_tokens(text, ALL) <= len(tokenizer.encode(text))


@pytest.mark.parametrize("text", ["a b c, " * 50_000, "😀" * 50_000, "你好" * 50_000, "\n" * 200_000], ids=ascii)
@pytest.mark.parametrize("name", KNOWN)
def test_a_long_text_has_many(name: str, text: str) -> None:
    """The longest token here is one of 32 bytes."""
    num_bytes = len(text.encode())
    assert num_bytes / 33 < TOKENIZERS[name].min_tokens(text, ALL) <= num_bytes


@pytest.mark.parametrize("name", UNKNOWN)
def test_nothing_is_claimed_where_text_may_be_lost(name: str) -> None:
    assert TOKENIZERS[name].min_tokens(" a b" * 1000, ALL) == 0


def test_no_more_is_counted_than_is_asked_for() -> None:
    text = "😀" * SLICE_CHARS * 10
    assert 100 < TOKENIZERS["byte level"].min_tokens(text, 100) <= 4 * SLICE_CHARS


@given(TEXTS)
def test_bytes_as_tokens_have_a_bound_too(text: str) -> None:
    assert ByteTokenizer().min_tokens(text, ALL) <= len(ByteTokenizer().encode(text))


def test_nfc_lets_the_stable_characters_be() -> None:
    for first, last in STABLE:
        for char in map(chr, range(first, last + 1)):
            assert unicodedata.normalize("NFC", char) == char
            assert unicodedata.combining(char) == 0
            assert unicodedata.normalize("NFC", f"a{char}a") == f"a{char}a"
