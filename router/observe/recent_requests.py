"""The last requests that ended, as the operator lists them, and what is summed over them."""

import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence

from router.observe.journal import RequestJournal
from router.observe.latency_causes import Paces, causes_of
from wire.convert import tiers_to_pb
from wire.errors import RequestNotFound
from wire.ids import tenant_of
from wire.pb import cluster_pb2, worker_pb2

MAX_KEPT = 1000
MAX_LISTED = 200
MINUTES_SUMMED = 60


class RecentRequests:
    """The last MAX_KEPT requests that ended, well or not. wall_clock: seconds since 1970."""

    def __init__(self, wall_clock: Callable[[], float] = time.time) -> None:
        self._wall_clock = wall_clock
        self._ended: deque[tuple[int, float, RequestJournal]] = deque(maxlen=MAX_KEPT)
        self._num_ended = 0
        self._paces = Paces()
        self._uncached: deque[tuple[int, Counter[str]]] = deque(maxlen=MINUTES_SUMMED)

    def add(self, journal: RequestJournal) -> None:
        """Takes a request that has ended."""
        self._num_ended += 1
        now_s = self._wall_clock()
        self._ended.append((self._num_ended, now_s, journal))
        self._sum(int(now_s // 60), journal.misses)
        self._paces.add(journal.timeline)

    def list(self, asked: cluster_pb2.ListRequestsRequest) -> cluster_pb2.ListRequestsResponse:
        """Lists the newest ones that are asked for, up to MAX_LISTED. Raises RequestNotFound for an unknown id."""
        after = asked.after if asked.after <= self._num_ended else 0  # else of a router before this one
        listed = [one for one in self._ended if one[0] > after and asked.request_id in ("", one[2].request_id)]
        if asked.request_id and not listed:
            raise RequestNotFound("no request of that id is among the last that ended")
        limit = min(asked.limit or MAX_LISTED, MAX_LISTED)
        return cluster_pb2.ListRequestsResponse(requests=[self._shown(*one) for one in listed[-limit:]])

    def find(self, number: int) -> RequestJournal | None:
        """Returns the request of that number, unless it is forgotten."""
        return next((journal for each, _, journal in self._ended if each == number), None)

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
