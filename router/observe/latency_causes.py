"""The causes of a request's time, in words, from its timeline."""

from collections import defaultdict
from collections.abc import Iterator, Mapping
from statistics import median

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
TEXTS = {
    "router.grammar": "its response format was built",
    "router.render": "the model's template rendered its messages",
    "router.wait_tokenizer": "waited for a thread that tokenizes",
    "router.tokenize": "was tokenized",
    "router.wait_room": "waited for room in the arena: prompts held for decode take half of it",
    "router.wait_decode": "waited for a decode worker that is ready: none was",
    "router.wait_isolated": "waited to be tried alone, after two workers were lost over it",
    "queue": "waited at {worker} for a step of its engine to end",
    "wait_slot": "waited at {worker} for a place: max_running sequences ran",
    "wait_pages": "waited at {worker} for free pages: its pool was full",
    "fetch": "fetched KV at {worker}: {found}",
    "wait_turn": "waited at {worker} for its turn in a step, behind other prompts",
    "prefill.compute": "computed {tokens_computed} tokens of the prompt at {worker}{pace}",
    "decode.compute": "computed {tokens_computed} tokens at {worker} whose KV decode did not find{pace}",
    "publish": "published its blocks at {worker}",
    "generate": "generated {tokens} tokens at {worker}{pace}{preempted}",
    "call": "was at {worker}, which has not said what it did",
    "network": "was between processes",
    "router": "was at the router",
}
"""By a span's name, or by the part behind its worker's role."""
ENDS = {
    "UNAVAILABLE": "lost {worker}: it went away",
    "CANCELLED": "lost {worker}: it broke off",
    "WORKER_LEAVING": "{worker} gave it back: it drains",
}
"""By the reason of the error that an attempt ended with."""
UNITS = {"compute": "tokens_computed", "generate": "tokens"}
"""The count of a span whose pace tells a slow worker from others."""


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
    phase = TEXTS.get(span.name) or TEXTS.get(span.name.rpartition(".")[2], "was at {worker}")
    text = ENDS.get(span.error, "its attempt at {worker} ended with {error}") if span.error else phase
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
    return span.counts.get(UNITS.get(span.name.rpartition(".")[2], ""), 0)
