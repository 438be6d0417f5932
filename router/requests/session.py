"""One request under way: carries out what its lifecycle asks for, and tells it what came of it."""

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable
from functools import partial

from router.observe.pace import Pace
from router.observe.record import OK, RequestRecord, outcome_of
from router.observe.timeline import Timeline
from router.requests.events import (
    AttemptFailed,
    BeginTrial,
    CancelCall,
    ChooseDecode,
    ChoosePrefill,
    DropHold,
    EndTrial,
    Event,
    Instruction,
    KeepHold,
    PutInQuarantine,
    SendChunk,
    SendComplete,
    SendError,
    StartDecode,
    StartPrefill,
    Stopped,
    Tokenize,
)
from router.requests.lifecycle import RequestLifecycle
from router.requests.outbox import Outbox
from router.requests.steps import Order, Services, Steps
from router.workers.members import Member
from text.incremental import IncrementalText
from wire import incident
from wire.errors import BatonError, DeadlineExceeded, Overloaded, Unavailable, WorkerLeaving
from wire.ids import RequestId
from wire.pb import inference_pb2 as pb
from wire.pools import WorkerState
from wire.sampling import SamplingParams

log = logging.getLogger(__name__)

Step = Callable[[], Awaitable[Event]]


class Session:
    """Belongs to the running event loop. At any time one task of it waits for something: a thread, a turn, a worker.

    `on_first_token` is called when there is one, `on_end` once when the request is over.
    """

    def __init__(
        self,
        order: Order,
        services: Services,
        outbox: Outbox,
        on_first_token: Callable[[], None],
        on_end: Callable[[], None],
    ) -> None:
        self.outbox = outbox
        self._order = order
        self._services = services
        self._on_first_token = on_first_token
        self._on_end = on_end
        self._loop = asyncio.get_running_loop()
        self._timeline = Timeline(order.arrived_s)
        self._steps = Steps(order, services, self._timeline)
        self._lifecycle = RequestLifecycle(self._new_text)
        self._pace = Pace(services.metrics, order.arrived_s)
        self._inbox: deque[Event] = deque()
        self._is_working = False
        self._tasks: set[asyncio.Task[None]] = set()
        self._deadline = self._loop.call_at(
            order.deadline_s, self.on, Stopped(DeadlineExceeded("the request's deadline has passed"))
        )

    @property
    def request_id(self) -> RequestId:
        return self._order.request_id

    def start(self) -> None:
        self._timeline.reached("check", self._loop.time())
        for instruction in self._lifecycle.start():
            self._do(instruction)

    def on(self, event: Event) -> None:
        """Something happened. Events that come of carrying out instructions wait until these are all carried out."""
        self._inbox.append(event)
        if self._is_working:
            return
        self._is_working = True
        try:
            while self._inbox:
                for instruction in self._lifecycle.handle(self._inbox.popleft()):
                    self._do(instruction)
        finally:
            self._is_working = False

    def _do(self, instruction: Instruction) -> None:
        match instruction:
            case Tokenize():
                self._begin(self._steps.tokenize, Stopped)
            case BeginTrial():
                self._begin(partial(self._steps.begin_trial, instruction), Stopped)
            case EndTrial():
                self._services.trials.end(self.request_id)
            case PutInQuarantine():
                self._steps.put_in_quarantine()
            case ChoosePrefill():
                self._begin(partial(self._steps.choose_prefill, instruction), Stopped)
            case ChooseDecode():
                self._begin(partial(self._steps.choose_decode, instruction), Stopped)
            case StartPrefill() | StartDecode():
                self._call(instruction)
            case CancelCall():
                self._cancel()
            case KeepHold():
                self._services.holds.keep(self.request_id)
            case DropHold():
                self._services.holds.release(self.request_id)
            case SendChunk(chunk):
                self._send(chunk)
            case SendComplete() | SendError():
                self._end(instruction)

    def _call(self, instruction: StartPrefill | StartDecode) -> None:
        assignment = self._steps.assign(instruction)
        client = assignment.member.client
        step: Step = (
            partial(self._steps.prefill, instruction, client)
            if isinstance(instruction, StartPrefill)
            else partial(self._steps.decode, instruction, client, self.on)
        )
        task = self._begin(step, partial(_attempt_failed, instruction.attempt, assignment.member))
        # Not in the task: one that is cancelled before its first step never runs.
        task.add_done_callback(lambda _: self._services.pool.unassign(assignment))

    def _begin(self, step: Step, failed: Callable[[BatonError], Event]) -> asyncio.Task[None]:
        task = asyncio.create_task(self._run(step, failed))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _run(self, step: Step, failed: Callable[[BatonError], Event]) -> None:
        try:
            self.on(await step())
        except BatonError as error:
            self.on(failed(error))
        except Exception as error:  # a bug of ours, in the step or in what followed from it, ends this request alone
            self.on(Stopped(incident.report(error, request_id=self.request_id)))

    def _cancel(self) -> None:
        for task in self._tasks:
            task.cancel()

    def _send(self, chunk: pb.Chunk) -> None:
        self._on_first_token()
        self._pace.gained(chunk.index, len(chunk.token_ids), self._loop.time())
        if not self.outbox.put(pb.GenerateResponse(request_id=self.request_id, chunk=chunk)):
            self.on(Stopped(Overloaded("the client reads more slowly than its tokens come")))

    def _end(self, last: SendComplete | SendError) -> None:
        self._deadline.cancel()
        self._on_end()
        timeline = self._timeline.finish(self._loop.time())
        if isinstance(last, SendError):
            self.outbox.fail(last.error)
            self._record(outcome_of(last.error), timeline)
        else:
            self._complete(last, timeline)
            self._record(OK, timeline)

    def _complete(self, last: SendComplete, timeline: pb.Timeline) -> None:
        last.complete.timeline.CopyFrom(timeline)
        last.complete.timeline.prefill_worker = last.prefill_worker or ""
        last.complete.timeline.decode_worker = last.decode_worker or ""
        self.outbox.complete(pb.GenerateResponse(request_id=self.request_id, complete=last.complete))

    def _record(self, outcome: str, timeline: pb.Timeline) -> None:
        summary = self._lifecycle.summary
        record = RequestRecord(self.request_id, outcome, summary, self._pace.ttft_s, timeline)
        self._services.metrics.ended(record)
        log.info("request ended", extra=record.values)

    def _new_text(self, sampling: SamplingParams) -> IncrementalText:
        return IncrementalText(self._services.codec, sampling.stop, sampling.min_tokens)


def _attempt_failed(attempt: int, member: Member, error: BatonError) -> AttemptFailed:
    """A worker that leaves gives its requests back, also where the line to it ends before its word arrives."""
    is_given_back = isinstance(error, Unavailable) and member.state is WorkerState.DRAINING
    return AttemptFailed(attempt, WorkerLeaving(error.message) if is_given_back else error)
