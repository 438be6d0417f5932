"""Figures computed by hand."""

import math
from dataclasses import astuple

import pytest

from benchmarks.disaggregation import QuietLimits
from cli.bench.latency import LatencyLimits, Percentiles, Record, percentiles_ms, summarize

LIMITS = LatencyLimits(ttft_s=0.5, tpot_s=0.1)


def record(*chunks: tuple[float, int], scheduled_s: float = 0.0, error: str | None = None) -> Record:
    ended_s = chunks[-1][0] + 0.01 if chunks else scheduled_s + 1
    return Record(
        scheduled_s=scheduled_s,
        sent_s=scheduled_s + 0.002,
        chunks=chunks,
        ended_s=ended_s,
        prompt_len=100,
        cached_len=25,
        error=error,
    )


def test_one_request() -> None:
    one = record((1.2, 1), (1.3, 2), (1.7, 2), scheduled_s=1.0)
    assert one.num_tokens == 5
    assert one.ttft_s == pytest.approx(0.2)
    assert one.tpot_s == pytest.approx(0.5 / 4)
    assert one.gaps_s == pytest.approx([0.1, 0.4])
    assert one.e2e_s == pytest.approx(0.71)


def test_first_token_counts_from_when_the_request_was_due() -> None:
    late = Record(scheduled_s=1.0, sent_s=3.0, chunks=((3.1, 1),), ended_s=3.1, prompt_len=10, cached_len=0)
    assert late.ttft_s == pytest.approx(2.1)


def test_percentiles_interpolate() -> None:
    assert astuple(percentiles_ms([0.001 * value for value in range(101)])) == pytest.approx((50, 90, 99))
    assert percentiles_ms([0.001, 0.002]).p50 == pytest.approx(1.5)
    assert percentiles_ms([0.007]) == Percentiles(7, 7, 7)
    assert math.isnan(percentiles_ms([]).p99)


def test_summary_of_two_rounds() -> None:
    rounds = [
        [record((0.1, 1), (0.2, 1)), record((0.9, 1), (0.99, 1), scheduled_s=0.1)],
        [record((0.1, 1), (1.99, 1)), record(error="UNAVAILABLE"), record()],
    ]
    summary = summarize(rounds, LIMITS)
    span_s = 1.0 + 2.0
    assert (summary.num_sent, summary.num_ended) == (5, 3)
    assert summary.errors == {"UNAVAILABLE": 1, "no tokens": 1}
    assert summary.throughput_rps == pytest.approx(3 / span_s)
    assert summary.output_tokens_per_s == pytest.approx(6 / span_s)
    assert summary.goodput_rps == pytest.approx(1 / span_s)  # the second's first token and the third's second came late
    assert summary.good_share == pytest.approx(1 / 5)
    assert summary.ttft_ms.p50 == pytest.approx(100)
    assert summary.cached_prompt_share == pytest.approx(0.25)
    assert summary.client_lateness_ms.p99 == pytest.approx(2)


def test_quiet_limits_follow_the_length_of_the_prompt() -> None:
    limits = QuietLimits((50, 150), ttft_s=(0.1, 0.3), tpot_s=(0.01, 0.02))
    assert astuple(limits.at(10)) == pytest.approx((0.4, 0.03))
    assert astuple(limits.at(150)) == pytest.approx((1.2, 0.06))
    assert limits.describe(150) == "150: TTFT 1200 TPOT 60.0"
    # A prompt of 100 tokens: 0.8 s and 45 ms.
    assert limits.holds_for(record((0.8, 1), (0.844, 1)))
    assert not limits.holds_for(record((0.81, 1), (0.82, 1)))
    assert not limits.holds_for(record((0.1, 1), (0.146, 1)))


def test_answers_of_one_message_have_no_time_per_token() -> None:
    summary = summarize([[record((0.1, 5)), record((0.1, 1), (0.3, 2))]], LIMITS)
    assert summary.tpot_ms.p50 == pytest.approx(100)


def test_nothing_at_all() -> None:
    summary = summarize([[]], LIMITS)
    assert (summary.num_sent, summary.goodput_rps, summary.cached_prompt_share) == (0, 0, 0)
