"""Limits of a good request, from the times of a quiet service."""

from dataclasses import dataclass

import numpy as np

from cli.bench.latency import LatencyLimits, Record


@dataclass(frozen=True)
class QuietLimits:
    """Limits by a prompt's length: multiples of what a quiet service took at some lengths, and straight lines between.

    lengths: ascending. ttft_s, tpot_s: of the quiet service, a value a length.
    """

    lengths: tuple[int, ...]
    ttft_s: tuple[float, ...]
    tpot_s: tuple[float, ...]
    ttft_factor: float = 4.0
    tpot_factor: float = 3.0

    def holds_for(self, record: Record) -> bool:
        return self.at(record.prompt_len).holds_for(record)

    def at(self, prompt_len: int) -> LatencyLimits:
        """Returns the limits of a length."""
        ttft_s, tpot_s = (float(np.interp(prompt_len, self.lengths, one)) for one in (self.ttft_s, self.tpot_s))
        return LatencyLimits(self.ttft_factor * ttft_s, self.tpot_factor * tpot_s)

    def describe(self, prompt_len: int) -> str:
        limits = self.at(prompt_len)
        return f"{prompt_len}: TTFT {limits.ttft_s * 1000:.0f} TPOT {limits.tpot_s * 1000:.1f}"
