"""The matcher against a search in the whole text."""

from typing import SupportsIndex

import pytest
from hypothesis import given
from hypothesis import strategies as st

from text.incremental import Scanned, StopMatcher


def search(text: str, stops: tuple[str, ...]) -> Scanned:
    """The match that ends first, the longest of those."""
    found = [(text.index(stop) + len(stop), -len(stop), stop) for stop in stops if stop in text]
    if not found:
        return Scanned(text, None)
    end, minus_length, stop = min(found)
    return Scanned(text[: end + minus_length], stop)


def scan(pieces: list[str], stops: tuple[str, ...]) -> Scanned:
    matcher = StopMatcher(stops)
    released = ""
    for piece in pieces:
        scanned = matcher.feed(piece)
        released += scanned.text
        if scanned.stop is not None:
            return Scanned(released, scanned.stop)
    return Scanned(released + matcher.flush(), None)


LETTERS = st.text("ab", min_size=1, max_size=5)


@given(st.lists(st.text("ab", max_size=6), max_size=8), st.lists(LETTERS, max_size=4).map(tuple))
def test_finds_what_a_search_in_the_whole_finds(pieces: list[str], stops: tuple[str, ...]) -> None:
    assert scan(pieces, stops) == search("".join(pieces), stops)


@pytest.mark.parametrize(
    ("pieces", "stops", "text", "stop"),
    [
        (["hello wor", "ld"], ("world",), "hello ", "world"),
        (["aab"], ("ab",), "a", "ab"),
        (["a", "a", "b"], ("ab",), "a", "ab"),
        (["abc"], ("abc", "b"), "a", "b"),
        (["xy"], ("y", "xy"), "", "xy"),
        (["ab"], ("abc",), "ab", None),
        (["😀", "€"], ("€",), "😀", "€"),
        (["stop\0"], ("\0",), "stop", "\0"),
    ],
)
def test_examples(pieces: list[str], stops: tuple[str, ...], text: str, stop: str | None) -> None:
    assert scan(pieces, stops) == Scanned(text, stop)


def test_holds_back_only_what_may_become_a_stop_string() -> None:
    matcher = StopMatcher(("\n\nUser:", "END"))
    assert matcher.feed("Yes.\n") == Scanned("Yes.", None)
    assert matcher.feed("\nUs") == Scanned("", None)
    assert matcher.feed("ing E") == Scanned("\n\nUsing ", None)
    assert matcher.feed("N") == Scanned("", None)
    assert matcher.flush() == "EN"


def test_holds_nothing_back_without_stop_strings() -> None:
    matcher = StopMatcher(())
    assert matcher.feed("any") == Scanned("any", None)
    assert matcher.flush() == ""


class Watched(str):
    """A stop string that counts how often a character of it is looked at."""

    num_looks = 0

    def __getitem__(self, index: SupportsIndex | slice) -> str:
        type(self).num_looks += 1
        return super().__getitem__(index)


def test_work_is_linear_for_the_worst_strings() -> None:
    """A search that starts again at each character would look 256 times as often."""
    stop = Watched("a" * 255 + "b")
    matcher = StopMatcher((stop,))
    Watched.num_looks = 0
    text = ("a" * 254 + "c") * 20
    for char in text:
        assert matcher.feed(char).stop is None
    assert Watched.num_looks < 4 * len(text)
