"""The order of rough handling, and what its outcome counts as wrong."""

from itertools import islice

import pytest

from benchmarks.chaos_tally import Stream
from benchmarks.hostile import KINDS, Footprint, Outcome, draw
from benchmarks.hostile_calls import Answer
from benchmarks.hostile_commands import Done


def drawn(seed: int, number: int) -> list[tuple[str, float]]:
    return [(kind.name, rng.random()) for kind, rng in islice(draw(KINDS, seed), number)]


def test_every_kind_comes_once_before_any_comes_again() -> None:
    names = [name for name, _ in drawn(1, 2 * len(KINDS))]
    assert sorted(names[: len(KINDS)]) == sorted(kind.name for kind in KINDS)
    assert set(names[len(KINDS) :]) <= set(names)


def test_the_seed_decides_order_and_details() -> None:
    assert drawn(1, 40) == drawn(1, 40)
    assert drawn(1, 40) != drawn(2, 40)


def test_weights_decide_what_comes_often() -> None:
    names = [name for name, _ in drawn(1, 2000)]
    heavy, light = KINDS[-1], next(kind for kind in KINDS if kind.weight < KINDS[-1].weight)
    assert names.count(heavy.name) > names.count(light.name)


@pytest.mark.parametrize(
    ("stream", "is_wrong"),
    [
        (Stream(0.0, (1.0,), 1, is_right=True), False),
        (Stream(0.0, (1.0,), 1, is_right=False), True),
        (Stream(0.0, (), 0, is_right=True, error="UNAVAILABLE: gone"), False),
        (Stream(0.0, (1.0,), 1, is_right=False, error="UNAVAILABLE: gone"), True),
        (Stream(0.0, (), 0, is_right=True, error="INTERNAL: broken"), True),
    ],
)
def test_a_good_client_may_lose_a_stream_as_the_kind_says_and_no_token(stream: Stream, is_wrong: bool) -> None:
    outcome = Outcome()
    outcome.add([], [stream], ("UNAVAILABLE",))
    assert bool(outcome.problems) == is_wrong


def test_answers_are_counted_and_problems_kept() -> None:
    outcome = Outcome()
    outcome.add([Answer.of("x", "OK", "OK"), Answer.of("y", "OK", "NOT_FOUND"), Answer("left")], [], ())
    assert (outcome.times, outcome.describe()) == (1, "OK (2), left (1)")
    assert outcome.problems == ["y: OK, not NOT_FOUND"]


@pytest.mark.parametrize(
    ("done", "is_right"),
    [
        (Done("x", 78, "baton: a is b\n", 1.0), True),
        (Done("x", 1, "baton: a is b\n", 1.0), False),
        (Done("x", 78, "baton: b\n", 1.0), False),
        (Done("x", 78, "baton: a is b\n", 9.0), False),
        (Done("x", 78, "Traceback (most recent call last):\nbaton: a is b\n", 1.0), False),
        (Done("x", 0, "", 1.0), True),
        (Done("x", 0, "a warning\n", 1.0), False),
    ],
)
def test_a_command_is_right_by_status_one_line_and_time(done: Done, is_right: bool) -> None:
    assert (done.answer((78, "a is"), (0, ""), within_s=5.0).problem == "") == is_right


def test_growth_is_told_beyond_the_bounds_only() -> None:
    before = Footprint(100.0, 10)
    assert Footprint(110.0, 12).growth(before) == ""
    assert "400 MB" in Footprint(500.0, 10).growth(before)
    assert "90 open files" in Footprint(100.0, 100).growth(before)
