"""Text that grows by tokens is the text of all tokens, however they come."""

import itertools
import random
from collections.abc import Iterator, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.text.backends import KINDS
from text.byte_tokenizer import ByteTokenizer
from text.incremental import IncrementalText, Piece
from text.tokenizer import Tokenizer
from text.tokenizer_protocol import Detokenizer, TokenKind

TOKENIZERS = {name: Tokenizer(make()) for name, make in KINDS.items()}
EURO = "€".encode()


def grow(tokenizer: Detokenizer, ids: Sequence[int], *, stop: tuple[str, ...] = (), step: int = 1) -> list[Piece]:
    text = IncrementalText(tokenizer, stop)
    pieces = [text.feed(ids[start : start + step]) for start in range(0, len(ids), step)]
    return [*pieces, text.flush()]


def joined(pieces: Sequence[Piece]) -> str:
    return "".join(piece.text for piece in pieces)


def texts(tokenizer: Detokenizer, ids: Sequence[int]) -> list[str]:
    return [piece.text for piece in grow(tokenizer, ids)]


@pytest.mark.parametrize("name", TOKENIZERS)
@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_pieces_are_the_whole(name: str, data: st.DataObject) -> None:
    """Any ids at all: special tokens, ids without a token, broken characters."""
    tokenizer = TOKENIZERS[name]
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size + 2), max_size=60))
    step = data.draw(st.integers(1, 7))
    pieces = grow(tokenizer, ids, step=step)
    assert joined(pieces) == tokenizer.decode(ids)
    assert sum(piece.num_tokens for piece in pieces) == len(ids)


def test_pieces_of_real_text_are_the_whole(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("  hello 你好 hell   😀😀 €5\n\nthe  quick fox. ")
    assert joined(grow(tokenizer, ids)) == tokenizer.decode(ids)


@pytest.mark.parametrize("name", TOKENIZERS)
@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_pieces_with_special_tokens_are_the_whole(name: str, data: st.DataObject) -> None:
    """All of them, some, or none."""
    tokenizer = TOKENIZERS[name]
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size + 2), max_size=60))
    shown = data.draw(st.lists(st.sampled_from(tokenizer.special_tokens or [""]), unique=True))
    spelling = tokenizer.spelling(shown)
    assert joined(grow(spelling, ids, step=data.draw(st.integers(1, 7)))) == spelling.decode(ids)
    if not shown:
        assert spelling.decode(ids) == tokenizer.decode(ids)


def test_a_stop_string_may_be_part_of_the_text() -> None:
    text = IncrementalText(ByteTokenizer(), ("two", "wo t"), includes_stop=True)
    assert text.feed(b"one t") == Piece("one ", None, 5)
    assert text.feed(b"wo three") == Piece("two", "two", 2)
    assert text.flush() == Piece("", "two", 0)


def test_no_part_of_a_character_is_emitted() -> None:
    first, second, third = EURO
    assert texts(ByteTokenizer(), [97, first, second, third, 98]) == ["a", "", "", "€", "b", ""]


def test_a_broken_character_is_replaced_once_it_is_known_to_be_one() -> None:
    first, second, _ = EURO
    assert texts(ByteTokenizer(), [first, second, 98]) == ["", "", "\ufffdb", ""]
    assert texts(ByteTokenizer(), [first, second]) == ["", "", "\ufffd"]
    assert texts(ByteTokenizer(), [first, first]) == ["", "\ufffd", "\ufffd"]


def test_a_replacement_character_of_the_model_is_text() -> None:
    assert joined(grow(ByteTokenizer(), list("a\ufffd\ufffdb".encode()))) == "a\ufffd\ufffdb"


def test_raw_bytes_wait_for_the_end_of_their_run() -> None:
    """One wrong byte turns a whole run into replacement characters, so none of it is certain before."""
    tokenizer = TOKENIZERS["byte_fallback"]
    smile = tokenizer.encode("😀")[1:]
    letter = tokenizer.encode("a")[-1]
    assert texts(tokenizer, [letter, *smile, letter]) == ["a", "", "", "", "", "😀a", ""]
    assert texts(tokenizer, [letter, *smile, smile[0], letter])[-2:] == ["\ufffd" * 5 + "a", ""]


def test_special_tokens_in_the_middle_leave_no_trace() -> None:
    tokenizer = TOKENIZERS["byte_fallback"]
    ids = tokenizer.encode("hell hell")
    eos = tokenizer.encode("</s>")[-1]
    spread = [token_id for pair in itertools.product(ids, [eos]) for token_id in pair]
    assert joined(grow(tokenizer, spread)) == "hell hell"


class Stripping:
    """Takes away a space at the start, and has a token without text."""

    PIECES = ("a", "", " b")

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(self.PIECES[token_id] for token_id in ids).removeprefix(" ")

    def kind(self, token_id: int) -> TokenKind:
        return TokenKind.TEXT


def test_a_token_without_text_does_not_turn_the_next_into_the_first() -> None:
    assert texts(Stripping(), [2, 0, 1, 2, 1, 1, 2]) == ["b", "a", "", " b", "", "", " b", ""]


class Counting:
    """A tokenizer that counts the tokens it decodes."""

    def __init__(self, tokenizer: Detokenizer) -> None:
        self._tokenizer = tokenizer
        self.num_decoded = 0

    def decode(self, ids: Sequence[int]) -> str:
        self.num_decoded += len(ids)
        return self._tokenizer.decode(ids)

    def kind(self, token_id: int) -> TokenKind:
        return self._tokenizer.kind(token_id)


def endless(name: str) -> Iterator[int]:
    """What a model without sense may say for ever."""
    byte = {
        "text": [97],
        "broken": [0xE2, 0x82],
        "continuation": [0x80],
        "unfinished": [0xF0, 0x9F, 0x98],
        "special": [97, 300, 300],
    }
    return itertools.cycle(byte[name])


@pytest.mark.parametrize("name", ["text", "broken", "unfinished", "continuation", "special"])
def test_work_is_linear(name: str) -> None:
    ids = list(itertools.islice(endless(name), 3000))
    tokenizer = Counting(ByteTokenizer())
    assert joined(grow(tokenizer, ids)) == ByteTokenizer().decode(ids)
    assert tokenizer.num_decoded < 60 * len(ids)


def test_work_is_linear_in_a_run_of_raw_bytes() -> None:
    fallback = TOKENIZERS["byte_fallback"]
    ids = [*fallback.encode("😀")[1:] * 700, fallback.encode("a")[-1]]
    tokenizer = Counting(fallback)
    assert joined(grow(tokenizer, ids)) == "😀" * 700 + "a"
    assert tokenizer.num_decoded < 6 * len(ids)


class TestStop:
    def test_ends_before_the_stop_string(self) -> None:
        ids = list(b"one two three")
        assert joined(grow(ByteTokenizer(), ids, stop=("two",))) == "one "

    def test_counts_the_tokens_up_to_the_one_that_completes_it(self) -> None:
        text = IncrementalText(ByteTokenizer(), stop=("two",))
        assert text.feed(list(b"one")) == Piece("one", None, 3)
        assert text.feed(list(b" two three")) == Piece(" ", "two", 4)
        assert text.feed(list(b"more")) == Piece("", "two", 0)
        assert text.flush() == Piece("", "two", 0)

    def test_what_might_have_been_one_comes_with_the_flush(self) -> None:
        assert texts_with_stop(b"ab", "abc") == ["", "", "ab"]

    def test_may_be_complete_only_with_the_flush(self) -> None:
        tokenizer = TOKENIZERS["byte_fallback"]
        text = IncrementalText(tokenizer, stop=("l😀",))
        assert text.feed(tokenizer.encode("hell😀")).matched_stop is None
        assert text.flush() == Piece("", "l😀", 0)

    def test_is_not_looked_for_in_the_first_tokens(self) -> None:
        text = IncrementalText(ByteTokenizer(), stop=("aa",), min_tokens=3)
        assert text.feed(list(b"aaaaaa")) == Piece("aaa", "aa", 5)

    def test_how_tokens_are_split_makes_no_difference(self, tokenizer: Tokenizer) -> None:
        """A request replayed on another worker feeds the tokens it has in one go, and goes on."""
        draw = random.Random(5)
        for _ in range(50):
            ids = [draw.randrange(tokenizer.vocab_size) for _ in range(60)]
            whole = tokenizer.decode(ids)
            start = draw.randrange(len(whole) - 2)
            stop = (whole[start : start + 2], "he")
            one_by_one = grow(tokenizer, ids, stop=stop)
            for step in (2, 13, 60):
                split = grow(tokenizer, ids, stop=stop, step=step)
                assert joined(split) == joined(one_by_one)
                assert split[-1].matched_stop == one_by_one[-1].matched_stop is not None
                assert sum(p.num_tokens for p in split) == sum(p.num_tokens for p in one_by_one)


def texts_with_stop(data: bytes, *stop: str) -> list[str]:
    return [piece.text for piece in grow(ByteTokenizer(), list(data), stop=stop)]
