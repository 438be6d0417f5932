"""Figures computed by hand."""

import math

import pytest

from benchmarks.chaos_tally import Stream, Tally

WELL = Stream(1.0, (1.5, 1.6, 1.7), 3, is_right=True, num_decode_calls=1)
REPLAYED = Stream(2.0, (2.1, 6.1, 6.2), 6, is_right=True, num_decode_calls=2)
WRONG = Stream(3.0, (3.1, 3.2), 2, is_right=False, num_decode_calls=1)
LOST = Stream(4.0, (4.3,), 1, is_right=True, error="UNAVAILABLE: gone")


def test_every_stream_counts_where_it_belongs() -> None:
    tally = Tally.of([WELL, REPLAYED, WRONG, LOST])
    assert (tally.sent, tally.ended_well, tally.replayed, tally.wrong, tally.lost) == (4, 2, 1, 1, 1)
    assert tally.tokens == 12
    assert tally.errors == ("UNAVAILABLE: gone",)


def test_stalls_are_between_messages() -> None:
    tally = Tally.of([WELL, REPLAYED, LOST])
    assert tally.longest_stall_s == pytest.approx(4.0)
    assert tally.stream_stall_p99_s == pytest.approx(0.1 + 0.98 * 3.9)  # of 0, 0.1 and 4
    assert tally.ttft_p99_s == pytest.approx(0.3 + 0.98 * 0.2)  # of 0.1, 0.3 and 0.5


def test_nothing_sent() -> None:
    tally = Tally.of([])
    assert (tally.sent, tally.longest_stall_s) == (0, 0.0)
    assert math.isnan(tally.gap_p99_s)


def test_a_stream_without_tokens_stalled_for_no_time_and_counts_as_lost() -> None:
    tally = Tally.of([Stream(0.0, (), 0, is_right=True, error="DEADLINE_EXCEEDED: late")])
    assert (tally.lost, tally.longest_stall_s) == (1, 0.0)
    assert math.isnan(tally.ttft_p99_s)
