"""From what clients saw of their streams while a service was harmed to the figures that are reported. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Stream:
    """A request as its client saw it.

    arrivals_s: when messages with tokens came, from the start of the run. num_decode_calls: from the request's
    timeline, 0 for one that failed. error: the status it failed with, and its message.
    """

    sent_s: float
    arrivals_s: tuple[float, ...]
    num_tokens: int
    is_right: bool
    num_decode_calls: int = 0
    error: str | None = None

    @property
    def longest_stall_s(self) -> float:
        """Between two messages."""
        return max(np.diff(self.arrivals_s), default=0.0)

    @property
    def ttft_s(self) -> float:
        return self.arrivals_s[0] - self.sent_s if self.arrivals_s else float("nan")

    def describe(self) -> str:
        """Describes the stream in a line."""
        ending = self.error or ("right" if self.is_right else "wrong")
        return (
            f"sent at {self.sent_s:.1f} s, {self.num_tokens} tokens by {self.num_decode_calls} decode workers, "
            f"longest stall {self.longest_stall_s:.2f} s: {ending}"
        )


@dataclass(frozen=True)
class Tally:
    """A stall is the time between two messages of a stream; `stream_stall_p99_s` is over the longest of each stream.

    lost: ended with an error. wrong: ended, or got as far as it did, with anything but the right tokens and text.
    """

    sent: int
    ended_well: int
    replayed: int
    wrong: int
    lost: int
    tokens: int
    longest_stall_s: float
    stream_stall_p99_s: float
    gap_p99_s: float
    ttft_p99_s: float
    errors: tuple[str, ...]

    @classmethod
    def of(cls, streams: Sequence[Stream]) -> "Tally":
        stalls = [one.longest_stall_s for one in streams]
        gaps = [gap for one in streams for gap in np.diff(one.arrivals_s)]
        return cls(
            sent=len(streams),
            ended_well=sum(one.error is None and one.is_right for one in streams),
            replayed=sum(one.num_decode_calls > 1 for one in streams),
            wrong=sum(not one.is_right for one in streams),
            lost=sum(one.error is not None for one in streams),
            tokens=sum(one.num_tokens for one in streams),
            longest_stall_s=float(max(stalls, default=0.0)),
            stream_stall_p99_s=_p99(stalls),
            gap_p99_s=_p99(gaps),
            ttft_p99_s=_p99([one.ttft_s for one in streams if one.arrivals_s]),
            errors=tuple(sorted({one.error for one in streams if one.error is not None})),
        )


def _p99(values: Sequence[float]) -> float:
    return float(np.percentile(values, 99)) if values else float("nan")
