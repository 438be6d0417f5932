"""The causes of a request's time, in words, from its timeline."""

from collections import defaultdict
from collections.abc import Iterator, Mapping
from statistics import median

from wire.journal import row_of
from wire.pb import inference_pb2 as pb
from wire.tier import Tier

MAX_CAUSES = 4
MIN_SHARE = 0.05
"""Least part of a request's time that is a cause."""
SLOW = 3.0
"""How many times as long as at other workers a token takes at one that is called slow."""
KEPT = 0.8
"""Weight of what was known of a worker's pace before its last request."""
MAX_PACES = 4096
ENDS = {
    "UNAVAILABLE": "lost {worker}: it went away",
    "CANCELLED": "lost {worker}: it broke off",
    "WORKER_LEAVING": "{worker} gave it back: it drains",
}
"""By the reason of the error that an attempt ended with."""


class Paces:
    """The time that a token takes at each worker, by phase and by the magnitude of the number of tokens."""

    def __init__(self) -> None:
        self._ms: dict[tuple[str, int], dict[str, float]] = defaultdict(dict)

    def add(self, timeline: pb.Timeline) -> None:
        """Notes the pace of each phase of a request that is over."""
        for span in timeline.spans:
            if num_tokens := _num_units(span):
                paces, ms = self._ms[_kind(span, num_tokens)], span.duration_ms / num_tokens
                if len(paces) > MAX_PACES:
                    paces.clear()
                paces[span.worker] = KEPT * paces.get(span.worker, ms) + (1 - KEPT) * ms

    def slowness(self, span: pb.Span) -> float:
        """Returns how many times as long a token took as at other workers; 1.0 where there are none."""
        num_tokens = _num_units(span)
        others = [ms for worker, ms in self._ms[_kind(span, num_tokens)].items() if worker != span.worker]
        return span.duration_ms / num_tokens / max(median(others), 1e-6) if others and num_tokens else 1.0


def causes_of(timeline: pb.Timeline, paces: Paces) -> Iterator[str]:
    """Yields ends of attempts with an error, then the longest spans, up to MAX_CAUSES; each with its milliseconds."""
    spans = sorted(timeline.spans, key=lambda span: (not span.error, -span.duration_ms))
    for span in spans[:MAX_CAUSES]:
        if span.error or span.duration_ms >= MIN_SHARE * timeline.total_ms:
            yield f"{span.duration_ms:.0f} ms: {_told(span, paces)}"


def _told(span: pb.Span, paces: Paces) -> str:
    ended = ENDS.get(span.error, "its attempt at {worker} ended with {error}")
    text = ended if span.error else row_of(span.name).cause
    slowness, counts = paces.slowness(span), defaultdict[str, object](int, span.counts)
    counts["worker"], counts["error"], counts["found"] = span.worker, span.error, _found(span.counts)
    counts["pace"] = f", {slowness:.1f} times as slowly as other workers" if slowness >= SLOW else ""
    preempted = span.counts.get("preemptions", 0)
    counts["preempted"] = f"; was preempted {preempted} times: its pages went to older requests" if preempted else ""
    return text.format_map(counts)


def _found(counts: Mapping[str, int]) -> str:
    found = [f"{counts[f'blocks_{tier}']} blocks from {tier}" for tier in Tier if counts.get(f"blocks_{tier}")]
    return ", ".join(found) or "no tier had any"


def _kind(span: pb.Span, num_tokens: int) -> tuple[str, int]:
    return span.name, num_tokens.bit_length()


def _num_units(span: pb.Span) -> int:
    return span.counts.get(row_of(span.name).unit, 0)
