"""The figures of a report, from the client's record of each request. Pure."""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Protocol

import numpy as np

from baton.results import Span


@dataclass(frozen=True, kw_only=True)
class Record:
    """A request as its client saw it. Times are seconds from the start of the round.

    chunks: arrival time and number of tokens of each message with tokens. error, reason: status and words of a failure.
    spans: the request's timeline, if the service tells it.
    """

    scheduled_s: float
    sent_s: float
    chunks: tuple[tuple[float, int], ...]
    ended_s: float
    prompt_len: int
    cached_len: int
    error: str | None = None
    reason: str = ""
    spans: tuple[Span, ...] = ()

    @property
    def num_tokens(self) -> int:
        return sum(count for _, count in self.chunks)

    @property
    def late_s(self) -> float:
        """Returns the client's delay, from the time at which the request was due to its sending."""
        return self.sent_s - self.scheduled_s

    @property
    def ttft_s(self) -> float:
        """Time to the first token, counted from when the request was due, so that a late client changes nothing."""
        return self.chunks[0][0] - self.scheduled_s

    @property
    def tpot_s(self) -> float:
        """Mean time per token after the first message; 0 for a single message."""
        later = self.num_tokens - self.chunks[0][1]
        return (self.chunks[-1][0] - self.chunks[0][0]) / later if later else 0.0

    @property
    def gaps_s(self) -> list[float]:
        """Gaps between messages; a message may have several tokens."""
        return [after - before for (before, _), (after, _) in pairwise(self.chunks)]

    @property
    def e2e_s(self) -> float:
        return self.ended_s - self.scheduled_s


class Limits(Protocol):
    """A rule that tells which requests that ended well are good."""

    def holds_for(self, record: Record) -> bool: ...


@dataclass(frozen=True)
class LatencyLimits:
    """Limits of TTFT and TPOT. A request is good if it ended well within both."""

    ttft_s: float
    tpot_s: float

    def holds_for(self, record: Record) -> bool:
        return record.ttft_s <= self.ttft_s and record.tpot_s <= self.tpot_s


@dataclass(frozen=True)
class Slo(LatencyLimits):
    """Limits, and the least share of requests that keep them."""

    share: float = 0.95


@dataclass(frozen=True)
class Percentiles:
    """Percentiles of latencies, in milliseconds."""

    p50: float
    p90: float
    p99: float


@dataclass(frozen=True, kw_only=True)
class ModeSummary:
    """Figures of one mode. Rates are per second, from the round's start to its last answer."""

    num_sent: int
    num_ended: int
    errors: dict[str, int]
    ttft_ms: Percentiles
    tpot_ms: Percentiles
    itl_ms: Percentiles
    e2e_ms: Percentiles
    good_share: float
    goodput_rps: float
    throughput_rps: float
    output_tokens_per_s: float
    cached_prompt_share: float
    client_lateness_ms: Percentiles


def summarize(rounds: Sequence[Sequence[Record]], limits: Limits) -> ModeSummary:
    """Summarizes all rounds of one mode together."""
    records = [record for one in rounds for record in one]
    ended = [record for record in records if record.error is None and record.chunks]
    good = [record for record in ended if limits.holds_for(record)]
    span_s = sum(max((record.ended_s for record in one), default=0.0) for one in rounds) or 1.0
    return ModeSummary(
        num_sent=len(records),
        num_ended=len(ended),
        errors=dict(Counter(record.error or "no tokens" for record in records if record not in ended)),
        ttft_ms=percentiles_ms(record.ttft_s for record in ended),
        tpot_ms=percentiles_ms(record.tpot_s for record in ended if len(record.chunks) > 1),
        itl_ms=percentiles_ms(gap for record in ended for gap in record.gaps_s),
        e2e_ms=percentiles_ms(record.e2e_s for record in ended),
        good_share=len(good) / max(1, len(records)),
        goodput_rps=len(good) / span_s,
        throughput_rps=len(ended) / span_s,
        output_tokens_per_s=sum(record.num_tokens for record in ended) / span_s,
        cached_prompt_share=sum(r.cached_len for r in ended) / max(1, sum(r.prompt_len for r in ended)),
        client_lateness_ms=percentiles_ms(record.late_s for record in records),
    )


LATENCIES: tuple[tuple[str, Callable[[ModeSummary], Percentiles]], ...] = (
    ("TTFT ms", lambda summary: summary.ttft_ms),
    ("TPOT ms", lambda summary: summary.tpot_ms),
    ("ITL ms", lambda summary: summary.itl_ms),
    ("e2e ms", lambda summary: summary.e2e_ms),
    ("client late by ms", lambda summary: summary.client_lateness_ms),
)
"""The latencies by name, with their place in a summary. TTFT and e2e count from when a request was due."""


def rates(summary: ModeSummary) -> dict[str, str]:
    """Describes the figures besides latencies."""
    return {
        "requests ended / sent": f"{summary.num_ended} / {summary.num_sent}",
        "errors": ", ".join(f"{count} {name}" for name, count in summary.errors.items()) or "0",
        "requests a second": f"{summary.throughput_rps:.2f}",
        "output tokens a second": f"{summary.output_tokens_per_s:.1f}",
        "goodput, requests a s": f"{summary.goodput_rps:.2f} ({summary.good_share:.0%})",
        "prompt tokens from cache": f"{summary.cached_prompt_share:.0%}",
    }


def reasons(records: Iterable[Record]) -> dict[str, str]:
    """Returns the first reason of each kind of failure."""
    return {record.error: record.reason for record in reversed([*records]) if record.error and record.reason}


def describe_limits(limits: LatencyLimits) -> str:
    return f"goodput: TTFT <= {limits.ttft_s * 1000:g} ms, TPOT <= {limits.tpot_s * 1000:g} ms"


def without_nan(value: Any) -> Any:
    """Puts null in the place of figures without values, for JSON has no NaN."""
    if isinstance(value, dict):
        return {name: without_nan(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [without_nan(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def percentiles_ms(values_s: Iterable[float]) -> Percentiles:
    """Computes percentiles, interpolated linearly between the nearest ranks; NaN without values."""
    values_ms = [value_s * 1000 for value_s in values_s] or [math.nan]
    return Percentiles(*map(float, np.quantile(values_ms, (0.5, 0.9, 0.99))))
