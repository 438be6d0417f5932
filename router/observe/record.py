"""The record of a request: its progress while it runs, its line in the log when it is over; the last of them."""

import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import cached_property

from router.disaggregation import PrefillReason
from router.observe.latency_causes import Paces, causes_of
from router.other_namespaces import OtherName
from wire.convert import tiers_to_pb
from wire.errors import RequestNotFound
from wire.ids import QualifiedId, WorkerId, tenant_of
from wire.journal import GATES
from wire.pb import cluster_pb2, worker_pb2
from wire.pb import inference_pb2 as pb
from wire.tier import Tier

MAX_KEPT = 1000
MAX_LISTED = 200
MINUTES_SUMMED = 60


@dataclass
class RequestSummary:
    """The progress of a request that runs.

    cached: prompt tokens by the tier that had their KV; None before that is known. misses: the causes of the rest.
    prefill_reason: of the first attempt; None before it is placed. others: names of its first missing block under other
    namespaces of its tenant, once a thread has made them; None where there are none.
    """

    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    cached: Mapping[str, int] | None = None
    prefill_worker: WorkerId | None = None
    decode_worker: WorkerId | None = None
    num_attempts: int = 1
    misses: Sequence[worker_pb2.MissRun] = ()
    prefill_reason: PrefillReason | None = None
    others: Future[list[OtherName]] | None = None

    def sign(self, timeline: pb.Timeline) -> None:
        """Names in a timeline the workers, and the reason for the pool of the prompt."""
        timeline.prefill_worker = self.prefill_worker or ""
        timeline.decode_worker = self.decode_worker or ""
        timeline.prefill_reason = self.prefill_reason or ""


@dataclass(frozen=True)
class RequestRecord:
    """A request that is over. `outcome`: its gRPC status; `ttft_s`: from arrival to first token, None without one.

    finish_reasons: of its choices, of a request that ended well. reason, message: of the error that it ended with,
    without text of the request.
    """

    request_id: QualifiedId
    outcome: str
    summary: RequestSummary
    ttft_s: float | None
    timeline: pb.Timeline
    finish_reasons: Sequence[str] = ()
    reason: str = ""
    message: str = ""

    @property
    def total_s(self) -> float:
        return self.timeline.total_ms / 1000

    @cached_property
    def waits_s(self) -> Mapping[str, float]:
        """Time spent at each gate."""
        waits_s: dict[str, float] = {}
        for span in self.timeline.spans:
            if span.name in GATES:
                waits_s[span.name] = waits_s.get(span.name, 0.0) + span.duration_ms / 1000
        return waits_s

    @property
    def values(self) -> Mapping[str, object]:
        """The fields of its line in the log; nothing that the client sent or got."""
        summary, waits_s = self.summary, self.waits_s
        cached = summary.cached or {}
        return {
            "request_id": self.request_id,
            "outcome": self.outcome,
            "prompt_tokens": summary.num_prompt_tokens,
            "output_tokens": summary.num_output_tokens,
            **{f"cached_{tier}": cached.get(tier, 0) for tier in Tier},
            "prefill_worker": summary.prefill_worker,
            "decode_worker": summary.decode_worker,
            "prefill_reason": summary.prefill_reason,
            "attempts": summary.num_attempts,
            "ttft_ms": None if self.ttft_s is None else round(self.ttft_s * 1000, 1),
            "total_ms": round(self.timeline.total_ms, 1),
            "waited_ms": round(sum(waits_s.values()) * 1000, 1),
            "longest_wait": max(waits_s, key=waits_s.__getitem__, default=None),
        }


class RecentRequests:
    """The last MAX_KEPT requests that ended, well or not. wall_clock: seconds since 1970."""

    def __init__(self, wall_clock: Callable[[], float] = time.time) -> None:
        self._wall_clock = wall_clock
        self._ended: deque[tuple[int, float, RequestRecord]] = deque(maxlen=MAX_KEPT)
        self._num_ended = 0
        self._paces = Paces()
        self._uncached: deque[tuple[int, Counter[str]]] = deque(maxlen=MINUTES_SUMMED)

    def add(self, record: RequestRecord) -> None:
        """Takes a request that has ended."""
        self._num_ended += 1
        now_s = self._wall_clock()
        self._ended.append((self._num_ended, now_s, record))
        self._sum(int(now_s // 60), record.summary.misses)
        self._paces.add(record.timeline)

    def list(self, asked: cluster_pb2.ListRequestsRequest) -> cluster_pb2.ListRequestsResponse:
        """Lists the newest ones that are asked for, up to MAX_LISTED. Raises RequestNotFound for an unknown id."""
        after = asked.after if asked.after <= self._num_ended else 0  # else of a router before this one
        listed = [one for one in self._ended if one[0] > after and asked.request_id in ("", one[2].request_id)]
        if asked.request_id and not listed:
            raise RequestNotFound("no request of that id is among the last that ended")
        limit = min(asked.limit or MAX_LISTED, MAX_LISTED)
        return cluster_pb2.ListRequestsResponse(requests=[self._shown(*one) for one in listed[-limit:]])

    def find(self, number: int) -> RequestRecord | None:
        """Returns the request of that number, unless it is forgotten."""
        return next((record for each, _, record in self._ended if each == number), None)

    @property
    def uncached_blocks(self) -> Mapping[str, int]:
        """Blocks of prompts that were not cached, by cause, of requests that ended in the last hour."""
        oldest = int(self._wall_clock() // 60) - MINUTES_SUMMED
        return sum((blocks for minute, blocks in self._uncached if minute > oldest), Counter[str]())

    def _sum(self, minute: int, misses: Sequence[worker_pb2.MissRun]) -> None:
        if not self._uncached or self._uncached[-1][0] != minute:
            self._uncached.append((minute, Counter()))
        for run in misses:
            self._uncached[-1][1][run.cause] += run.blocks

    def _shown(self, number: int, ended_s: float, record: RequestRecord) -> cluster_pb2.EndedRequest:
        summary = record.summary
        shown = cluster_pb2.EndedRequest(
            number=number,
            request_id=record.request_id,
            tenant=tenant_of(record.request_id),
            outcome=record.outcome,
            reason=record.reason,
            message=record.message,
            ended_s=ended_s,
            prompt_tokens=summary.num_prompt_tokens,
            output_tokens=summary.num_output_tokens,
            attempts=summary.num_attempts,
            ttft_ms=None if record.ttft_s is None else record.ttft_s * 1000,
            cached_tokens=tiers_to_pb(summary.cached or {}),
            timeline=record.timeline,
            causes=causes_of(record.timeline, self._paces),
            misses=summary.misses,
        )
        summary.sign(shown.timeline)
        return shown
