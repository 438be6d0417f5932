"""The pieces of a text have the tokens of the whole: a cut is made only where the library takes a special token out."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import tokenizers
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import AddedToken, normalizers, pre_tokenizers

from tests.text.backends import KINDS, byte_level, metaspace
from tests.text.test_token_bound import changed, like_llama_2, like_llama_3, like_qwen
from text.byte_tokenizer import ByteTokenizer
from text.tokenizer import Tokenizer

TURNS = ("<|im_start|>", "<|im_end|>", "<|im_start|>x")


def adding(backend: tokenizers.Tokenizer, *contents: str, **flags: Any) -> tokenizers.Tokenizer:
    given: dict[str, Any] = {"normalized": False, "special": True, **flags}
    backend.add_tokens([AddedToken(content, **given) for content in contents])
    return backend


EXACT: dict[str, Callable[[], tokenizers.Tokenizer]] = {
    **KINDS,
    "llama 3": like_llama_3,
    "qwen": like_qwen,
    "llama 2": like_llama_2,
    "spaces after a token are its own": lambda: adding(byte_level(), "<m>", rstrip=True),
    "ends are stripped": lambda: changed(byte_level(), normalizer=normalizers.Strip()),
    "a text begins with a space": lambda: changed(byte_level(), pre_tokenizer=pre_tokenizers.ByteLevel(True)),
    "the first text begins with a space": lambda: changed(metaspace(), pre_tokenizer=first_space()),
    "characters are joined": lambda: changed(byte_level(), normalizer=normalizers.NFKC()),
    "a text is a word": lambda: changed(byte_level(), normalizer=normalizers.Prepend("x")),
    "a common token": lambda: adding(byte_level(), "<m>", special=False),
    "a token that is normalized": lambda: adding(byte_level(), "<m>", normalized=True),
}
WHOLE: dict[str, Callable[[], tokenizers.Tokenizer]] = {
    "spaces before a token are its own": lambda: adding(byte_level(), "<m>", lstrip=True),
    "a token is a word": lambda: adding(byte_level(), "<s>h", single_word=True),
    "a token ends as others begin": lambda: adding(byte_level(), "hell<", special=False),
    "a token has others in it": lambda: adding(byte_level(), "o<s>o", special=False),
    "a token goes on where others begin": lambda: adding(byte_level(), "<s></", special=False),
}


def first_space() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Metaspace(prepend_scheme="first")


def of(make: Callable[[], tokenizers.Tokenizer]) -> Tokenizer:
    return Tokenizer(adding(make(), *TURNS))


TOKENIZERS = {name: of(make) for name, make in (EXACT | WHOLE).items()}
PARTS = st.sampled_from(
    [*TURNS, "<s>", "</s>", "<m>", "hell", "o", " ", "  ", "\n", "<", "e", "\u0301", "▁", "[SEP]", "x"]
)
TEXTS = st.lists(PARTS | st.text(max_size=4), max_size=30).map("".join)


def joined(tokenizer: Tokenizer, pieces: Sequence[str]) -> list[int]:
    return [token_id for piece in pieces for token_id in tokenizer.encode_rendered(piece)]


@pytest.mark.parametrize("name", TOKENIZERS)
@given(text=TEXTS)
@example(text="<s> a<|im_start|>x e<|im_end|>\u0301 <|im_start|> hell")
@example(text="hell<s>o<m> <|im_end|>")
def test_pieces_have_the_tokens_of_the_whole(name: str, text: str) -> None:
    tokenizer = TOKENIZERS[name]
    pieces = tokenizer.pieces(text)
    assert "".join(pieces) == text
    assert joined(tokenizer, pieces) == tokenizer.encode_rendered(text)


@pytest.mark.parametrize("name", EXACT)
def test_a_text_is_cut_before_each_special_token(name: str) -> None:
    turns = ["hell", "<|im_start|>o", "<|im_end|>", "<|im_start|>x o", "<|im_end|> <|im_star"]
    assert TOKENIZERS[name].pieces("".join(turns)) == turns


@pytest.mark.parametrize(
    ("name", "naive"),
    [
        ("spaces before a token are its own", ["a ", "<m>"]),
        ("a token is a word", ["hell", "<s>h"]),
        ("a token ends as others begin", ["hell", "<s>"]),
        ("a token has others in it", ["o", "<s>o"]),
        ("a token goes on where others begin", ["<s>", "</s>"]),
    ],
)
def test_a_text_stays_whole_where_pieces_would_have_other_tokens(name: str, naive: list[str]) -> None:
    tokenizer, text = TOKENIZERS[name], "".join(naive)
    assert joined(tokenizer, naive) != tokenizer.encode_rendered(text)
    assert tokenizer.pieces(text) == [text]


def test_bytes_stay_whole() -> None:
    assert ByteTokenizer().pieces("<s>a") == ["<s>a"]
