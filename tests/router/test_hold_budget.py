from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.workers.hold_budget import HoldBudget
from wire.ids import BlockKey, RequestId


def keys(*numbers: int) -> Sequence[BlockKey]:
    return [BlockKey(bytes([number]) * 32) for number in numbers]


def ids(names: str) -> list[RequestId]:
    return [RequestId(name) for name in names]


A, B, C = ids("abc")


@pytest.fixture
def budget() -> HoldBudget:
    """Over an arena of eight blocks."""
    budget = HoldBudget()
    budget.resize(8)
    return budget


def test_no_prefill_starts_while_more_than_half_is_held(budget: HoldBudget) -> None:
    assert budget.ask(A, keys(1, 2, 3, 4))
    assert budget.ask(B, keys(5))
    assert not budget.ask(C, keys(6))
    assert budget.num_blocks == 5
    assert budget.release(B) == [C]
    assert budget.num_blocks == 5


def test_a_prompt_larger_than_the_arena_starts_alone(budget: HoldBudget) -> None:
    assert budget.ask(A, keys(*range(20)))
    assert not budget.ask(B, keys(1))
    assert budget.release(A) == [B]


def test_shared_blocks_count_once(budget: HoldBudget) -> None:
    for name in "abcdef":
        assert budget.ask(RequestId(name), keys(1, 2, 3, 4))
    assert budget.num_blocks == 4
    for name in "abcde":
        budget.release(RequestId(name))
    assert budget.num_blocks == 4
    budget.release(RequestId("f"))
    assert budget.num_blocks == 0


def test_turns_come_in_order(budget: HoldBudget) -> None:
    assert budget.ask(A, keys(*range(5)))
    assert not budget.ask(C, keys(11, 12, 13, 14, 15))
    assert not budget.ask(B, keys(6))
    assert budget.release(A) == [C]
    assert budget.release(C) == [B]


def test_who_stops_waiting_lets_the_next_one_in(budget: HoldBudget) -> None:
    budget.ask(A, keys(*range(5)))
    budget.ask(B, keys(6))
    budget.ask(C, keys(7))
    assert budget.release(B) == []
    assert budget.release(A) == [C]


def test_asking_again_is_free(budget: HoldBudget) -> None:
    assert budget.ask(A, keys(*range(5)))
    assert budget.ask(A, keys(*range(5)))
    budget.release(A)
    assert budget.num_blocks == 0


def test_a_larger_arena_lets_more_in(budget: HoldBudget) -> None:
    budget.ask(A, keys(*range(5)))
    budget.ask(B, keys(6))
    assert budget.resize(100) == [B]


def test_only_what_was_answered_and_not_released_is_renewed(budget: HoldBudget) -> None:
    budget.ask(A, keys(1))
    budget.ask(B, keys(2))
    budget.keep(A)
    budget.keep(B)
    budget.release(A)
    assert budget.kept == [B]


@settings(deadline=None)
@given(st.lists(st.tuples(st.sampled_from("abcdef"), st.sampled_from(["ask", "release"]))))
def test_everything_released_is_nothing_held(steps: list[tuple[str, str]]) -> None:
    budget = HoldBudget()
    budget.resize(4)
    for name, action in steps:
        request_id = RequestId(name)
        number = ord(name)
        if action == "ask":
            budget.ask(request_id, keys(number, number + 1))
        else:
            budget.release(request_id)
        assert budget.num_blocks <= 4
    for name in "abcdef":
        budget.release(RequestId(name))
    assert budget.num_blocks == 0
    assert budget.ask(A, keys(1))
