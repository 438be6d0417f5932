"""Figures of a load, as cells of a table and as values of JSON."""

import math
from collections.abc import Callable
from typing import Any

from deploy.load.latency import LatencyLimits, ModeSummary, Percentiles

LATENCIES: tuple[tuple[str, Callable[[ModeSummary], Percentiles]], ...] = (
    ("TTFT ms", lambda summary: summary.ttft_ms),
    ("TPOT ms", lambda summary: summary.tpot_ms),
    ("ITL ms", lambda summary: summary.itl_ms),
    ("e2e ms", lambda summary: summary.e2e_ms),
    ("client late by ms", lambda summary: summary.client_lateness_ms),
)
"""Each one's name, and where a summary has it. TTFT and e2e count from when a request should have been sent."""


def rates(summary: ModeSummary) -> dict[str, str]:
    """Describes what is not a latency."""
    return {
        "requests ended / sent": f"{summary.num_ended} / {summary.num_sent}",
        "errors": ", ".join(f"{count} {name}" for name, count in summary.errors.items()) or "0",
        "requests a second": f"{summary.throughput_rps:.2f}",
        "output tokens a second": f"{summary.output_tokens_per_s:.1f}",
        "goodput, requests a s": f"{summary.goodput_rps:.2f} ({summary.good_share:.0%})",
        "prompt tokens from cache": f"{summary.cached_prompt_share:.0%}",
    }


def describe_limits(limits: LatencyLimits) -> str:
    return f"goodput: TTFT <= {limits.ttft_s * 1000:g} ms, TPOT <= {limits.tpot_s * 1000:g} ms"


def without_nan(value: Any) -> Any:
    """Puts null in the place of figures without values, for JSON has no NaN."""
    if isinstance(value, dict):
        return {name: without_nan(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [without_nan(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
