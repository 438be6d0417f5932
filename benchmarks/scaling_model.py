"""Two pools on a virtual clock: prompts queue at prefill workers, streams share decode workers, starts take time.

A prefill worker computes a step of one prompt after another, in the order of its batcher: the least left first, with
ageing, and prompts that can be in time before deferred ones that have not begun (`deferral_s`). Each step of a decode
worker gives each of its streams a token, and takes longer with more of them. A new prompt goes to the worker that is
free first, a new stream to the worker with the fewest. A prefill worker that starts, or has no prompt left, is given
queued prompts of others, as `router/moves.py` chooses them. A worker costs from its order to its end; a worker that
goes takes nothing new and finishes its own, streams for `grace_s` at most, which then go on elsewhere.
"""

import heapq
import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import cast

from cli.bench.schedule import TraceRow
from prefill_worker.behaviour import PrefillBatcher
from router.config import RouterSettings
from router.moves import QueuedPrompt, choose_moves
from router.observe.demand import Demand
from router.requests.forecast import deferral_s
from router.workers.members import Member
from wire.ids import WorkerId
from wire.load.fairness import deferred_between
from wire.pools import PoolSizes

POLL_EVERY_S = 2.0
NO_MEMBER = cast(Member, None)
"""The choice of prompts does not ask for their workers."""


@dataclass(frozen=True)
class Costs:
    """The costs of a real run, in seconds."""

    prefill_token_s: float
    step_s: float
    stream_s: float
    start_s: float
    hand_off_s: float
    grace_s: float

    def token_s(self, num_streams: int) -> float:
        return self.step_s + self.stream_s * num_streams


@dataclass(frozen=True, eq=False, kw_only=True)
class Prompt(QueuedPrompt):
    """The prompt of a request. A prompt that has begun, or has moved, stays.

    left: tokens to compute. place: by arrival at its worker.
    """

    request: int
    left: int
    place: int = 0

    @property
    def urgency(self) -> tuple[bool, int]:
        """The least is computed first, as `PrefillBatcher` has it."""
        is_deferred = self.left == self.num_tokens and self.is_deferred()
        return is_deferred, self.left + self.place * PrefillBatcher.patience_tokens


@dataclass(eq=False)
class PrefillWorker:
    """A prefill worker. free_s: the end of its queue, whose first prompt it computes. num_taken: prompts so far."""

    ordered_s: float
    ready_s: float
    free_s: float = 0.0
    num_taken: int = 0
    queue: deque[Prompt] = field(default_factory=deque)


@dataclass(eq=False)
class Stream:
    """A stream of a request. left: tokens to come; end: its end by its worker's progress."""

    request: int
    end: float


@dataclass(eq=False)
class DecodeWorker:
    """A decode worker. progress: the tokens that a stream had which was there from its start."""

    ordered_s: float
    ready_s: float
    streams: list[tuple[float, int]] = field(default_factory=list)
    progress: float = 0.0
    at_s: float = 0.0
    drained_s: float = math.inf

    def advance(self, now_s: float, costs: Costs) -> float:
        """Moves its clock; returns the tokens of a stream since the last time."""
        gained = (now_s - self.at_s) / costs.token_s(len(self.streams)) if self.streams else 0.0
        self.progress, self.at_s = self.progress + gained, now_s
        return gained

    def next_end_s(self, costs: Costs) -> float:
        if not self.streams:
            return math.inf
        return self.at_s + max(0.0, self.streams[0][0] - self.progress) * costs.token_s(len(self.streams))


@dataclass
class Outcome:
    """The outcome of a trace: times by request, worker-seconds by pool, and the orders (time, pool, from, to)."""

    first_s: list[float]
    end_s: list[float]
    worker_s: dict[str, float]
    orders: list[tuple[float, str, int, int]]

    @property
    def worker_hours(self) -> float:
        return sum(self.worker_s.values()) / 3600


Sizing = Callable[[float, Demand, PoolSizes, PoolSizes], PoolSizes]
"""Returns the sizes wanted by the time, the demand, the sizes ordered, the workers that are ready."""


class Pools:
    """Both pools, at work on a trace."""

    def __init__(self, rows: Sequence[TraceRow], costs: Costs, first: PoolSizes, ttft_s: float, itl_s: float) -> None:
        self._rows = rows
        self._costs = costs
        self._limits = ttft_s, itl_s
        self._prefill = [PrefillWorker(0.0, 0.0) for _ in range(first.prefill)]
        self._decode = [DecodeWorker(0.0, 0.0) for _ in range(first.decode)]
        self._going: list[PrefillWorker] = []
        self._leaving: list[DecodeWorker] = []
        self._worker_s = {"prefill": 0.0, "decode": 0.0}
        self._orders: list[tuple[float, str, int, int]] = []
        self._first_s, self._end_s = [math.inf] * len(rows), [math.inf] * len(rows)
        self._events: list[tuple[float, int, Callable[[float], None]]] = []
        self._num_events = self.num_moves = 0
        self._gaps = self._gaps_s = 0.0
        self._sums = dict.fromkeys(("num_prompts", "prompt_tokens", "num_judged", "late_first", "late_next"), 0)
        self._waiting = 0
        self._now_s = 0.0

    def run(self, sizing: Sizing) -> Outcome:
        """Runs the trace to its end, and asks for the sizes every POLL_EVERY_S."""
        place, poll_s, last_s = 0, 0.0, self._rows[-1].at_s
        while place < len(self._rows) or self._events or self._num_streams or poll_s <= last_s:
            arrival_s = self._rows[place].at_s if place < len(self._rows) else math.inf
            event_s = self._events[0][0] if self._events else math.inf
            every = [*self._decode, *self._leaving]
            ending = min(every, key=lambda one: one.next_end_s(self._costs))
            end_s = ending.next_end_s(self._costs)
            now_s = self._now_s = min(arrival_s, event_s, end_s, poll_s)
            if now_s == end_s:
                self._end(ending, now_s)
            elif now_s == arrival_s:
                self._arrive(place, now_s)
                place += 1
            elif now_s == event_s:
                heapq.heappop(self._events)[2](now_s)
            else:
                self._resize(sizing(now_s, self._demand(now_s), self._sizes, self._ready(now_s)), now_s)
                poll_s += POLL_EVERY_S
            self._give_up(now_s)
        for worker in self._prefill:
            self._worker_s["prefill"] += max(last_s, worker.free_s) - worker.ordered_s
        for one in [*self._decode, *self._leaving]:
            self._worker_s["decode"] += max(last_s, one.at_s) - one.ordered_s
        return Outcome(self._first_s, self._end_s, self._worker_s, self._orders)

    @property
    def _sizes(self) -> PoolSizes:
        return PoolSizes(len(self._prefill), len(self._decode))

    @property
    def _num_streams(self) -> int:
        return sum(len(one.streams) for one in (*self._decode, *self._leaving))

    def _ready(self, now_s: float) -> PoolSizes:
        return PoolSizes(*(sum(one.ready_s <= now_s for one in pool) for pool in (self._prefill, self._decode)))

    def _arrive(self, request: int, now_s: float) -> None:
        num_tokens = self._rows[request].input_len
        ready = [one for one in self._prefill if one.ready_s <= now_s] or self._prefill
        worker = min(ready, key=lambda one: max(one.free_s, one.ready_s))
        self._queue(
            worker,
            Prompt(
                member=NO_MEMBER,
                num_tokens=num_tokens,
                priority=0,
                missing=lambda _: num_tokens,
                recall=lambda: None,
                is_deferred=self._deferral(request),
                request=request,
                left=num_tokens,
            ),
            now_s,
        )
        self._waiting += num_tokens
        self._sums["num_prompts"] += 1
        self._sums["prompt_tokens"] += num_tokens

    def _deferral(self, request: int) -> Callable[[], bool]:
        computes_s = self._rows[request].input_len * self._costs.prefill_token_s
        found = deferral_s(self._limits[0], 0.0, computes_s, RouterSettings.max_deadline_s)
        return deferred_between(*(found or (0.0, 0.0)), lambda: self._now_s)

    def _at(self, at_s: float, event: Callable[[float], None]) -> None:
        heapq.heappush(self._events, (at_s, self._num_events, event))
        self._num_events += 1

    def _queue(self, worker: PrefillWorker, prompt: Prompt, now_s: float) -> None:
        worker.free_s = max(worker.free_s, worker.ready_s, now_s) + prompt.num_tokens * self._costs.prefill_token_s
        worker.queue.append(replace(prompt, place=worker.num_taken))
        worker.num_taken += 1
        if len(worker.queue) == 1:
            self._step(worker, max(worker.ready_s, now_s))

    def _step(self, worker: PrefillWorker, now_s: float) -> None:
        """Begins a step of the most urgent prompt of a queue, which becomes its first."""
        following = min(worker.queue, key=lambda one: one.urgency)
        num_tokens = min(following.left, PrefillBatcher.max_step_tokens)
        worker.queue.remove(following)
        worker.queue.appendleft(replace(following, may_move=False, left=following.left - num_tokens))
        self._at(now_s + num_tokens * self._costs.prefill_token_s, partial(self._stepped, worker))

    def _stepped(self, worker: PrefillWorker, now_s: float) -> None:
        prompt = worker.queue[0]
        if not prompt.left:
            worker.queue.popleft()
            self._at(now_s + self._costs.hand_off_s, partial(self._join, prompt.request))
        if worker.queue:
            self._step(worker, now_s)
        elif worker in self._going:
            self._end_prefill(worker, now_s)
        else:
            self._fill(now_s)

    def _fill(self, now_s: float) -> None:
        """Gives queued prompts to each prefill worker that is ready and has none."""
        every = [*self._prefill, *self._going]
        if max((len(one.queue) for one in every), default=0) < 2:
            return
        for worker in self._prefill:
            if not worker.queue and worker.ready_s <= now_s:
                queues = [one.queue for one in every]
                for prompt in choose_moves(
                    [list[QueuedPrompt](queue) for queue in queues], WorkerId(""), self._costs.prefill_token_s
                ):
                    assert isinstance(prompt, Prompt)
                    source = next(one for one in every if prompt in one.queue)
                    source.queue.remove(prompt)
                    source.free_s -= prompt.num_tokens * self._costs.prefill_token_s
                    self._queue(worker, replace(prompt, may_move=False), now_s)
                    self.num_moves += 1

    def _end_prefill(self, worker: PrefillWorker, now_s: float) -> None:
        self._going.remove(worker)
        self._worker_s["prefill"] += now_s - worker.ordered_s

    def _join(self, request: int, now_s: float) -> None:
        self._first_s[request] = now_s
        self._waiting -= self._rows[request].input_len
        if self._rows[request].output_len > 1:
            self._take(request, self._rows[request].output_len - 1, now_s)
        else:
            self._judge(request, now_s)

    def _take(self, request: int, num_tokens: float, now_s: float) -> None:
        ready = [one for one in self._decode if one.ready_s <= now_s] or self._decode
        worker = min(ready, key=lambda one: len(one.streams))
        self._advance(worker, now_s)
        heapq.heappush(worker.streams, (worker.progress + num_tokens, request))

    def _end(self, worker: DecodeWorker, now_s: float) -> None:
        self._advance(worker, now_s)
        _, request = heapq.heappop(worker.streams)
        self._judge(request, now_s)

    def _judge(self, request: int, now_s: float) -> None:
        self._end_s[request] = now_s
        late_first, late_next = self.is_late(request)
        self._sums["num_judged"] += 1
        self._sums["late_first"] += late_first
        self._sums["late_next"] += late_next

    def is_late(self, request: int) -> tuple[bool, bool]:
        """Whether a request that has ended was late, with its first token and with its next tokens."""
        row, first_s, num_gaps = self._rows[request], self._first_s[request], self._rows[request].output_len - 1
        itl_s = (self._end_s[request] - first_s) / num_gaps if num_gaps > 0 else 0.0
        return first_s - row.at_s > self._limits[0], itl_s > self._limits[1]

    def _advance(self, worker: DecodeWorker, now_s: float) -> None:
        num_streams, passed_s = len(worker.streams), now_s - worker.at_s
        self._gaps += worker.advance(now_s, self._costs) * num_streams
        self._gaps_s += num_streams * passed_s

    def _demand(self, now_s: float) -> Demand:
        for one in (*self._decode, *self._leaving):
            self._advance(one, now_s)
        loads = [len(one.streams) for one in (*self._decode, *self._leaving)]
        return Demand(
            streams_beside=sum(one * one for one in loads) / max(1, sum(loads)),
            started="virtual",
            known_tokens=self._sums["prompt_tokens"],
            uncached_tokens=self._sums["prompt_tokens"],
            gaps=round(self._gaps),
            gaps_s=self._gaps_s,
            waiting_tokens=self._waiting,
            num_streams=self._num_streams,
            prefill_token_s=self._costs.prefill_token_s,
            **self._sums,
        )

    def _resize(self, wanted: PoolSizes, now_s: float) -> None:
        for name, size, pool in (("prefill", wanted.prefill, self._prefill), ("decode", wanted.decode, self._decode)):
            if size != len(pool):
                self._orders.append((now_s, name, len(pool), size))
        start_s = now_s + self._costs.start_s
        for _ in range(wanted.prefill - len(self._prefill)):
            self._prefill.append(PrefillWorker(now_s, start_s))
            self._at(start_s, self._fill)
        self._decode += [DecodeWorker(now_s, start_s, at_s=now_s) for _ in range(wanted.decode - len(self._decode))]
        while len(self._prefill) > wanted.prefill:
            gone = min(self._prefill, key=lambda one: (one.ready_s <= now_s, one.free_s))
            self._prefill.remove(gone)
            self._going.append(gone)
            if not gone.queue:
                self._end_prefill(gone, now_s)
        while len(self._decode) > wanted.decode:
            left = min(self._decode, key=lambda one: (one.ready_s <= now_s, len(one.streams)))
            self._decode.remove(left)
            left.drained_s = now_s + self._costs.grace_s
            self._leaving.append(left)

    def _give_up(self, now_s: float) -> None:
        """Ends workers that have drained; after the grace their streams go on elsewhere."""
        for one in [one for one in self._leaving if not one.streams or now_s >= one.drained_s]:
            self._advance(one, now_s)
            self._leaving.remove(one)
            self._worker_s["decode"] += now_s - one.ordered_s
            for end, request in one.streams:
                self._take(request, end - one.progress, now_s)
