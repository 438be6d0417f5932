"""What a request waits for: one coroutine a step, each of which ends in the event that tells how it went."""

import asyncio
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Executor
from contextlib import aclosing, contextmanager
from dataclasses import dataclass
from functools import partial

from router.observe.metrics import RequestMetrics
from router.observe.timeline import Timeline
from router.placement.worker_pool import Assignment, WorkerPool
from router.requests.events import (
    BeginTrial,
    ChooseDecode,
    ChoosePrefill,
    DecodeChosen,
    DecodeEnded,
    DecodeUpdated,
    NoPrefillWorker,
    PrefillAnswered,
    PrefillChosen,
    StartDecode,
    StartPrefill,
    Tokenized,
    TrialBegun,
)
from router.requests.prepare import Prepared, prepare
from router.requests.quarantine import Quarantine
from router.requests.trials import Trials
from router.requests.validator import Limits, ValidRequest
from router.workers.hold_keeper import HoldKeeper
from router.workers.worker_client import WorkerClient
from text.codec import TextCodec
from wire.convert import sampling_to_pb
from wire.errors import AttemptsExhausted, Cancelled, Unavailable
from wire.ids import NamespaceRoot, RequestId, WorkerId
from wire.pb import inference_pb2 as pb
from wire.pb import worker_pb2


@dataclass(frozen=True)
class Services:
    """What all requests share. `suspect` is told of a worker that broke off a call."""

    root: NamespaceRoot
    codec: TextCodec
    threads: Executor
    pool: WorkerPool
    holds: HoldKeeper
    trials: Trials
    quarantine: Quarantine
    suspect: Callable[[WorkerId], None]
    metrics: RequestMetrics


@dataclass(frozen=True)
class Order:
    """A request that was let in. Times are of the event loop's clock."""

    request_id: RequestId
    valid: ValidRequest
    limits: Limits
    arrived_s: float
    deadline_s: float


class Steps:
    """Of one request. Raises what its workers raise; each step may be cancelled at any time."""

    def __init__(self, order: Order, services: Services, timeline: Timeline) -> None:
        self._order = order
        self._services = services
        self._timeline = timeline
        self._prepared: Prepared | None = None

    @property
    def prepared(self) -> Prepared:
        """Set by `tokenize`."""
        assert self._prepared is not None, "not tokenized yet"
        return self._prepared

    async def tokenize(self) -> Tokenized:
        services, order = self._services, self._order
        work = partial(prepare, order.valid, services.codec, order.limits, services.root)
        began_s, self._prepared = await asyncio.get_running_loop().run_in_executor(services.threads, _timed, work)
        self._timeline.reached("wait_tokenizer", began_s)
        self._timeline.reached("tokenize", self._now_s)
        if services.quarantine.holds(self.prepared.keys[-1], self._now_s):
            raise AttemptsExhausted("workers were lost over this prompt; it is not tried again for a while")
        return Tokenized(len(self.prepared.prompt_ids), self.prepared.sampling)

    async def begin_trial(self, step: BeginTrial) -> TrialBegun:
        await self._services.trials.begin(self._order.request_id)
        self._timeline.reached("wait_trial", self._now_s)
        return TrialBegun(step.attempt)

    def put_in_quarantine(self) -> None:
        """Other requests with the same prompt are refused for a while."""
        self._services.quarantine.add(self.prepared.keys[-1], self._now_s)

    async def choose_prefill(self, step: ChoosePrefill) -> PrefillChosen | NoPrefillWorker:
        """Waits until holds leave room; where there is no prefill worker, there is nothing to wait for."""
        pool, keys = self._services.pool, self.prepared.keys
        if pool.has_prefill:
            await self._services.holds.enter(self._order.request_id, keys)
            self._timeline.reached("wait_room", self._now_s)
        worker = pool.choose_prefill(keys, len(self.prepared.prompt_ids))
        return NoPrefillWorker(step.attempt) if worker is None else PrefillChosen(step.attempt, worker)

    async def choose_decode(self, step: ChooseDecode) -> DecodeChosen:
        worker = await self._services.pool.choose_decode(self.prepared.keys, len(self.prepared.prompt_ids))
        self._timeline.reached("wait_decode", self._now_s)
        return DecodeChosen(step.attempt, worker)

    def assign(self, step: StartPrefill | StartDecode) -> Assignment:
        """Counts the work of a step as given to its worker, from now on."""
        num_prompt_tokens = len(self.prepared.prompt_ids)
        if isinstance(step, StartPrefill):
            return self._services.pool.assign(step.worker, self.prepared.sampling.n, num_prompt_tokens)
        num_tokens = sum(num_prompt_tokens + len(choice.output.ids) for choice in step.choices)
        return self._services.pool.assign(step.worker, len(step.choices), num_tokens)

    async def prefill(self, step: StartPrefill, client: WorkerClient) -> PrefillAnswered:
        request = worker_pb2.PrefillRequest(
            request_id=self._order.request_id,
            attempt=step.attempt,
            namespace_root=self._services.root,
            prompt=pb.TokenIds(ids=self.prepared.prompt_ids),
            sampling_params=sampling_to_pb(self.prepared.sampling),
        )
        with self._called("prefill", step.worker) as spans:
            response = await client.prefill(request, self._time_left_s)
            spans += response.spans
        return PrefillAnswered(step.attempt, response)

    async def decode(
        self, step: StartDecode, client: WorkerClient, report: Callable[[DecodeUpdated], None]
    ) -> DecodeEnded:
        """Reports every update as it comes."""
        request = worker_pb2.DecodeRequest(
            request_id=self._order.request_id,
            attempt=step.attempt,
            namespace_root=self._services.root,
            prompt=pb.TokenIds(ids=self.prepared.prompt_ids),
            sampling_params=sampling_to_pb(self.prepared.sampling),
            choices=step.choices,
        )
        with self._called("decode", step.worker) as spans:
            async with aclosing(client.decode(request, self._time_left_s)) as updates:
                async for update in updates:
                    if update.HasField("summary"):
                        spans += update.summary.spans
                    report(DecodeUpdated(step.attempt, update))
        return DecodeEnded(step.attempt)

    @contextmanager
    def _called(self, name: str, worker: WorkerId) -> Iterator[list[pb.Span]]:
        """Puts a call into the timeline with the spans it brings, and its worker under suspicion if it broke off."""
        spans: list[pb.Span] = []
        call = self._timeline.sent(name, worker, self._now_s)
        try:
            yield spans
        except (Unavailable, Cancelled):
            self._services.suspect(worker)
            raise
        finally:
            self._timeline.ended(call, self._now_s, spans)

    @property
    def _now_s(self) -> float:
        return asyncio.get_running_loop().time()

    @property
    def _time_left_s(self) -> float:
        return max(self._order.deadline_s - self._now_s, 0.001)


def _timed(work: Callable[[], Prepared]) -> tuple[float, Prepared]:
    """On a thread: when the work was begun, by the event loop's clock, and what came of it."""
    return time.monotonic(), work()
