"""The requests that ended last, for the operator: each with the causes of its time, and sums over all."""

import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from statistics import median

from router.observe.journal import RequestJournal
from wire.convert import tiers_to_pb
from wire.errors import RequestNotFound
from wire.ids import tenant_of
from wire.journal import row_of
from wire.pb import cluster_pb2, worker_pb2
from wire.pb import inference_pb2 as pb
from wire.tier import Tier

MAX_KEPT = 1000
MAX_LISTED = 200
MINUTES_SUMMED = 60
MAX_CAUSES = 4
MIN_SHARE = 0.05
"""Least part of a request's time that counts as a cause."""
SLOW = 3.0
"""A worker is slow if a token takes this many times as long as at other workers."""
KEPT = 0.8
"""Weight of a worker's earlier pace over its last request's."""
MAX_PACES = 4096
ENDS = {
    "UNAVAILABLE": "lost {worker}: it went away",
    "CANCELLED": "lost {worker}: it broke off",
    "WORKER_LEAVING": "{worker} gave it back: it drains",
    "PROMPT_RETURNED": "waited at {worker}, then moved to a worker that was free",
}
"""Words for the end of an attempt, by its error's reason."""


class RecentRequests:
    """The last MAX_KEPT requests that ended, well or not. wall_clock: seconds since 1970."""

    def __init__(self, wall_clock: Callable[[], float] = time.time) -> None:
        self._wall_clock = wall_clock
        self._ended: deque[tuple[int, float, RequestJournal]] = deque(maxlen=MAX_KEPT)
        self._num_ended = 0
        self._paces = Paces()
        self._uncached: deque[tuple[int, Counter[str]]] = deque(maxlen=MINUTES_SUMMED)

    def add(self, journal: RequestJournal) -> None:
        """Adds an ended request."""
        self._num_ended += 1
        now_s = self._wall_clock()
        self._ended.append((self._num_ended, now_s, journal))
        self._sum(int(now_s // 60), journal.misses)
        self._paces.add(journal.timeline)

    def list(self, asked: cluster_pb2.ListRequestsRequest) -> cluster_pb2.ListRequestsResponse:
        """Lists the newest matching requests, up to MAX_LISTED. Raises RequestNotFound for an unknown id."""
        after = asked.after if asked.after <= self._num_ended else 0  # else of a router before this one
        listed = [one for one in self._ended if one[0] > after and asked.request_id in ("", one[2].request_id)]
        if asked.request_id and not listed:
            raise RequestNotFound("no request of that id is among the last that ended")
        limit = min(asked.limit or MAX_LISTED, MAX_LISTED)
        return cluster_pb2.ListRequestsResponse(requests=[self._shown(*one) for one in listed[-limit:]])

    def find(self, number: int) -> RequestJournal | None:
        """Returns the request with this number, unless it is forgotten."""
        return next((journal for each, _, journal in self._ended if each == number), None)

    @property
    def uncached_blocks(self) -> Mapping[str, int]:
        """Counts the uncached blocks of prompts, by cause, over requests that ended in the last hour."""
        oldest = int(self._wall_clock() // 60) - MINUTES_SUMMED
        return sum((blocks for minute, blocks in self._uncached if minute > oldest), Counter[str]())

    def _sum(self, minute: int, misses: Sequence[worker_pb2.MissRun]) -> None:
        if not self._uncached or self._uncached[-1][0] != minute:
            self._uncached.append((minute, Counter()))
        for run in misses:
            self._uncached[-1][1][run.cause] += run.blocks

    def _shown(self, number: int, ended_s: float, journal: RequestJournal) -> cluster_pb2.EndedRequest:
        return cluster_pb2.EndedRequest(
            number=number,
            request_id=journal.request_id,
            tenant=tenant_of(journal.request_id),
            outcome=journal.outcome,
            reason=journal.reason,
            message=journal.message,
            ended_s=ended_s,
            prompt_tokens=journal.num_prompt_tokens,
            output_tokens=journal.num_output_tokens,
            attempts=journal.num_attempts,
            ttft_ms=None if journal.ttft_s is None else journal.ttft_s * 1000,
            cached_tokens=tiers_to_pb(journal.cached),
            timeline=journal.timeline,
            causes=causes_of(journal.timeline, self._paces),
            misses=journal.misses,
        )


class Paces:
    """The time of a token at each worker, by phase and by the magnitude of the number of tokens."""

    def __init__(self) -> None:
        self._ms: dict[tuple[str, int], dict[str, float]] = defaultdict(dict)

    def add(self, timeline: pb.Timeline) -> None:
        """Notes the pace of each phase of an ended request, but not of phases that an error cut short."""
        for span in timeline.spans:
            if not span.error and (num_tokens := _num_units(span)):
                paces, ms = self._ms[_kind(span, num_tokens)], span.duration_ms / num_tokens
                if len(paces) > MAX_PACES:
                    paces.clear()
                paces[span.worker] = KEPT * paces.get(span.worker, ms) + (1 - KEPT) * ms

    def slowness(self, span: pb.Span) -> float:
        """Returns how many times as long a token took as at other workers; 1.0 without other workers."""
        num_tokens = _num_units(span)
        others = [ms for worker, ms in self._ms[_kind(span, num_tokens)].items() if worker != span.worker]
        return span.duration_ms / num_tokens / max(median(others), 1e-6) if others and num_tokens else 1.0


def causes_of(timeline: pb.Timeline, paces: Paces) -> Iterator[str]:
    """Yields failed attempts, then the longest spans, up to MAX_CAUSES, each with its milliseconds."""
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
