from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.holds import Holds
from wire.ids import BlockKey, RequestId


def keys(*numbers: int) -> Sequence[BlockKey]:
    return [BlockKey(bytes([number]) * 32) for number in numbers]


def ids(names: str) -> list[RequestId]:
    return [RequestId(name) for name in names]


A, B, C = ids("abc")


@pytest.fixture
def holds() -> Holds:
    """Over an arena of eight blocks."""
    holds = Holds()
    holds.resize(8)
    return holds


def test_no_prefill_starts_while_more_than_half_is_held(holds: Holds) -> None:
    assert holds.ask(A, keys(1, 2, 3, 4))
    assert holds.ask(B, keys(5))
    assert not holds.ask(C, keys(6))
    assert holds.num_blocks == 5
    assert holds.release(B) == [C]
    assert holds.num_blocks == 5


def test_a_prompt_larger_than_the_arena_starts_alone(holds: Holds) -> None:
    assert holds.ask(A, keys(*range(20)))
    assert not holds.ask(B, keys(1))
    assert holds.release(A) == [B]


def test_shared_blocks_count_once(holds: Holds) -> None:
    for name in "abcdef":
        assert holds.ask(RequestId(name), keys(1, 2, 3, 4))
    assert holds.num_blocks == 4
    for name in "abcde":
        holds.release(RequestId(name))
    assert holds.num_blocks == 4
    holds.release(RequestId("f"))
    assert holds.num_blocks == 0


def test_turns_come_in_order(holds: Holds) -> None:
    assert holds.ask(A, keys(*range(5)))
    assert not holds.ask(C, keys(11, 12, 13, 14, 15))
    assert not holds.ask(B, keys(6))
    assert holds.release(A) == [C]
    assert holds.release(C) == [B]


def test_who_stops_waiting_lets_the_next_one_in(holds: Holds) -> None:
    holds.ask(A, keys(*range(5)))
    holds.ask(B, keys(6))
    holds.ask(C, keys(7))
    assert holds.release(B) == []
    assert holds.release(A) == [C]


def test_asking_again_is_free(holds: Holds) -> None:
    assert holds.ask(A, keys(*range(5)))
    assert holds.ask(A, keys(*range(5)))
    holds.release(A)
    assert holds.num_blocks == 0


def test_a_larger_arena_lets_more_in(holds: Holds) -> None:
    holds.ask(A, keys(*range(5)))
    holds.ask(B, keys(6))
    assert holds.resize(100) == [B]


def test_only_what_was_answered_and_not_released_is_renewed(holds: Holds) -> None:
    holds.ask(A, keys(1))
    holds.ask(B, keys(2))
    holds.keep(A)
    holds.keep(B)
    holds.release(A)
    assert holds.kept == [B]


@settings(deadline=None)
@given(st.lists(st.tuples(st.sampled_from("abcdef"), st.sampled_from(["ask", "release"]))))
def test_everything_released_is_nothing_held(steps: list[tuple[str, str]]) -> None:
    holds = Holds()
    holds.resize(4)
    for name, action in steps:
        request_id = RequestId(name)
        number = ord(name)
        if action == "ask":
            holds.ask(request_id, keys(number, number + 1))
        else:
            holds.release(request_id)
        assert holds.num_blocks <= 4
    for name in "abcdef":
        holds.release(RequestId(name))
    assert holds.num_blocks == 0
    assert holds.ask(A, keys(1))
