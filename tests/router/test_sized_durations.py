"""What durations by size tell: a line that single durations do not move, and the durations of like sizes."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.sized_durations import MAX_KEPT, LinearDuration, SizedDurations


def learned(*pairs: tuple[int, float]) -> SizedDurations:
    durations = SizedDurations()
    for size, took in pairs:
        durations.learn(size, took)
    return durations


def test_a_line_is_found_through_noise_and_outliers() -> None:
    pairs = [(size, 5.0 + 0.2 * size) for size in (10, 11, 12, 100, 110, 120, 1000, 1100, 1200)]
    line = learned(*pairs, (11, 900.0), (105, 900.0), (1150, 0.0)).line
    assert line is not None
    assert line.fixed == pytest.approx(5.0, rel=0.3)
    assert line.per_unit == pytest.approx(0.2, rel=0.1)


def test_one_length_has_no_line() -> None:
    assert learned(*[(100, 7.0)] * 9).line is None
    assert learned(*[(127, 7.0), (128, 9.0)] * 5).line is None, "too near to one another"
    assert learned(*[(16, 7.0)] * 3, *[(128, 9.0)] * 2).line is None, "of two durations both may be anything"


def test_lengths_that_come_no_more_are_remembered() -> None:
    durations = learned(*[(10, 6.0)] * 3, *[(1000, 105.0)] * 500)
    assert durations.line is not None
    assert durations.line.at(10) == pytest.approx(6.0)
    assert len(durations.like(1000)) == MAX_KEPT


def test_like_sizes_have_one_magnitude() -> None:
    assert learned((8, 3.0), (15, 1.0), (16, 2.0), (7, 4.0)).like(9) == [1.0, 3.0]


def test_what_shrinks_with_size_is_a_constant_and_no_part_is_negative() -> None:
    falling = learned(*[(10, 6.0)] * 3, *[(100, 2.0)] * 3).line
    assert falling == LinearDuration(4.0, 0.0)
    steep = learned(*[(10, 1.0)] * 3, *[(100, 100.0)] * 3).line
    assert steep is not None
    assert (steep.fixed, steep.per_unit > 0) == (0.0, True)


@given(st.lists(st.tuples(st.integers(0, 1 << 20), st.floats(0, 1e6)), max_size=60))
def test_no_duration_is_negative(pairs: list[tuple[int, float]]) -> None:
    line = learned(*pairs).line
    assert line is None or (line.fixed >= 0 and line.per_unit >= 0)
