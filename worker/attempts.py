"""The attempts of a worker, on all its lines: begun, ended, and given the outcomes of the engine's steps."""

import asyncio
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial

from engine.events import HoldOrphaned
from engine.grammar.grammars import Grammars
from engine.request import EngineRequest, HandOff
from wire import errors
from wire.convert import logprobs_to_pb
from wire.errors import (
    BatonError,
    Cancelled,
    DeadlineExceeded,
    InvalidRequest,
    RequestExists,
    Unavailable,
    WorkerLeaving,
)
from wire.ids import AttemptId, QualifiedId, incarnation_of, number_of, request_of
from wire.pb import worker_pb2
from wire.pools import Role, WorkerState
from worker.convert import ahead_from_pb, request_from_pb
from worker.job import Behaviour, Job, News
from worker.line import WorkerLine
from worker.loop import Abort, Add, EndChoice, Recall, StepReport, WorkerLoop

log = logging.getLogger(__name__)

MAX_REQUEST_S = 600.0


@dataclass(eq=False)
class BegunAttempt:
    """An attempt begun on a line. is_added: the engine has accepted it.

    Events before that belong to an earlier attempt with this id.

    building: the task that builds the attempt's grammar, if it has one.
    """

    line: WorkerLine
    job: Job
    is_added: bool = False
    building: asyncio.Task[None] | None = None
    timer: asyncio.TimerHandle = field(init=False)

    @property
    def id(self) -> AttemptId:
        return self.job.request.attempt_id


class Attempts:
    """The running attempts: passes their orders to the engine's thread, and the outcomes of its steps to their jobs.

    An abort, a deadline or the end of its line takes an attempt out of the engine before the next step.
    """

    def __init__(
        self,
        behaviour: Behaviour,
        loop: WorkerLoop,
        grammars: Grammars,
        vocab_size: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._behaviour = behaviour
        self._loop = loop
        self._grammars = grammars
        self._vocab_size = vocab_size
        self._clock = clock
        self._attempts: dict[AttemptId, BegunAttempt] = {}
        self._is_idle = asyncio.Event()
        self._is_idle.set()
        self._is_draining = False

    def __len__(self) -> int:
        return len(self._attempts)

    @property
    def state(self) -> WorkerState:
        if not self._loop.is_running:
            return WorkerState.BROKEN
        return WorkerState.DRAINING if self._is_draining else WorkerState.READY

    def begin(self, line: WorkerLine, begin: worker_pb2.Begin) -> None:
        """Starts an attempt; aborts its router's earlier attempt at the request, and that router's on another line.

        Does nothing if the attempt runs on its line already. Raises RequestExists while a later attempt runs there,
        InvalidRequest, or Unavailable while the worker takes no attempts.
        """
        request = request_from_pb(begin, self._behaviour.request_class, self._vocab_size, self._clock)
        if isinstance(request, HandOff):
            loop = asyncio.get_running_loop()
            request = replace(request, on_stored=partial(_tell, loop, self._stored, line, request.attempt_id))
        if self.state is not WorkerState.READY:
            refusal = WorkerLeaving if self.state is WorkerState.DRAINING else Unavailable
            raise refusal(f"the worker is {self.state.value}", attempt_id=begin.id)
        attempt = BegunAttempt(line, self._behaviour.new_job(request, self._clock()))
        for earlier in [one for one in self._attempts.values() if _origin_of(one.id) == _origin_of(attempt.id)]:
            if (earlier.id, earlier.line) == (attempt.id, line):
                return
            self._oust(earlier, attempt)
        if request.sampling.response_format is not None:
            attempt.building = asyncio.create_task(self._add_constrained(attempt, request))
        elif not self._loop.put(Add(request)):
            raise Unavailable("the worker has stopped")
        out_of_time = DeadlineExceeded("the request's deadline has passed", attempt_id=attempt.id)
        life_s = min(begin.time_left_s, MAX_REQUEST_S)
        attempt.timer = asyncio.get_running_loop().call_later(life_s, self._end, attempt, out_of_time)
        self._attempts[attempt.id] = attempt
        self._is_idle.clear()

    def abort(self, line: WorkerLine, attempt_id: AttemptId) -> None:
        """Ends an attempt on this line. Does nothing if there is none."""
        attempt = self._attempts.get(attempt_id)
        if attempt is not None and attempt.line is line:
            self._end(attempt, Cancelled("the router has aborted it", attempt_id=attempt_id))

    def end_choice(self, line: WorkerLine, attempt_id: AttemptId, index: int) -> None:
        """Ends a choice of an attempt on this line. Does nothing if there is none."""
        attempt = self._attempts.get(attempt_id)
        if attempt is not None and attempt.line is line:
            self._loop.put(EndChoice(attempt_id, index))

    def recall(self, line: WorkerLine, attempt_id: AttemptId) -> None:
        """Ends an attempt on this line with PromptReturned if its prompt has not begun; the engine decides."""
        attempt = self._attempts.get(attempt_id)
        if attempt is not None and attempt.line is line:
            self._loop.put(Recall(attempt_id))

    def prefetch(self, order: worker_pb2.Prefetch) -> None:
        """Begins to read blocks of an attempt that may come; logs a wrong order, and drops it."""
        try:
            ahead = ahead_from_pb(order, self._behaviour.block_size)
        except InvalidRequest as error:
            log.warning("an order to read blocks ahead is dropped: %s", error)
        else:
            self._loop.put(ahead)

    def end_line(self, line: WorkerLine) -> None:
        """Ends the attempts of a line. Holds stay until they expire."""
        for attempt in tuple(self._attempts.values()):
            if attempt.line is line:
                self._end(attempt, Cancelled("the line to the router has ended", attempt_id=attempt.id))

    async def drain(self, grace_s: float) -> int:
        """Refuses new attempts, waits for running attempts, and after the grace ends the rest with WorkerLeaving.

        Returns the number of attempts that it ended; the router continues them elsewhere.
        """
        self._is_draining = True
        try:
            async with asyncio.timeout(grace_s):
                await self._is_idle.wait()
        except TimeoutError:
            log.warning("%d requests outlast the grace of %s s", len(self._attempts), grace_s)
        num_left = len(self._attempts)
        self.end_all(WorkerLeaving("the worker is going away"))
        return num_left

    def serve_as(self, behaviour: Behaviour) -> None:
        """Takes attempts of another role from now on; call it after `drain`, when the engine plans for the role."""
        self._behaviour = behaviour
        self._is_draining = False

    def end_all(self, error: BatonError) -> None:
        """Ends all attempts with an error."""
        for attempt in tuple(self._attempts.values()):
            self._end(attempt, error)

    def take(self, outcome: StepReport) -> list[AttemptId]:
        """Takes the outcome of a step: passes its events to the attempts' jobs, and their updates to the lines.

        Returns the attempts whose holds are over.
        """
        for request in outcome.added:
            added = self._attempts.get(request.attempt_id)
            if added is not None and added.job.request is request:
                added.is_added = True
        released = [attempt_id for attempt_id, news, now_s in _news_of(outcome) if self._tell(attempt_id, news, now_s)]
        if outcome.failure is not None:
            for attempt in [one for one in self._attempts.values() if one.is_added]:
                self._end(attempt, outcome.failure)
        if self._behaviour.role is Role.PREFILL:
            released += outcome.aborted
        return released

    def _stored(self, line: WorkerLine, attempt_id: AttemptId, num_blocks: int) -> None:
        """Tells the router how many blocks of a running attempt's prompt the store has."""
        attempt = self._attempts.get(attempt_id)
        if attempt is not None and attempt.line is line:
            line.send(worker_pb2.Update(id=attempt_id, num_stored_blocks=num_blocks))

    async def _add_constrained(self, attempt: BegunAttempt, request: EngineRequest) -> None:
        """Builds an attempt's grammar on a thread, then passes the attempt to the engine; a fault ends the attempt."""
        error: BatonError | None = None
        try:
            request = attempt.job.request = await asyncio.to_thread(self._grammars.prepare, request)
        except BatonError as refusal:
            error = refusal
        except Exception as bug:  # the router waits for an end
            error = errors.report(bug, attempt_id=attempt.id)
        if error is None and not self._loop.put(Add(request)):
            error = Unavailable("the worker has stopped")
        if error is not None:
            self._end(attempt, error)

    def _oust(self, earlier: BegunAttempt, attempt: BegunAttempt) -> None:
        if earlier.line is attempt.line and number_of(earlier.id) > number_of(attempt.id):
            raise RequestExists("a later attempt at the request is running", attempt_id=attempt.id)
        self._end(earlier, Cancelled("another attempt took its place", attempt_id=earlier.id))

    def _end(self, attempt: BegunAttempt, error: BatonError) -> None:
        self._forget(attempt)
        attempt.line.send(attempt.job.withdraw(error, self._clock()))
        self._loop.put(Abort(attempt.id))

    def _forget(self, attempt: BegunAttempt) -> None:
        del self._attempts[attempt.id]
        attempt.timer.cancel()
        if attempt.building is not None:
            attempt.building.cancel()
        if not self._attempts:
            self._is_idle.set()

    def _tell(self, attempt_id: AttemptId, news: News, now_s: float) -> bool:
        """Passes events to an attempt's job; a bug there ends this attempt alone. Returns whether its hold is over."""
        attempt = self._attempts.get(attempt_id)
        if attempt is None or not attempt.is_added:
            return isinstance(news, HoldOrphaned)
        try:
            update = attempt.job.take(news, now_s)
        except Exception as bug:
            self._end(attempt, errors.report(bug, attempt_id=attempt_id))
            return False
        if update is None:
            return False
        if update.HasField("end"):
            self._forget(attempt)
        attempt.line.send(update)
        return attempt.job.releases_hold(update)


def _tell(loop: asyncio.AbstractEventLoop, work: Callable[..., None], *arguments: object) -> None:
    """Has an event loop do work soon, from any thread. Does nothing once the loop is closed."""
    with suppress(RuntimeError):
        loop.call_soon_threadsafe(work, *arguments)


def _origin_of(attempt: AttemptId) -> tuple[QualifiedId, int]:
    """Returns the request of an attempt, and its router's incarnation."""
    return request_of(attempt), incarnation_of(attempt)


def _news_of(outcome: StepReport) -> Iterator[tuple[AttemptId, News, float]]:
    """Yields the events of a step, in order, each with its attempt and its time."""
    output = outcome.output
    for event in (*outcome.events, *output.before):
        yield event.attempt_id, event, outcome.began_s
    for place, (choice, position) in enumerate(zip(output.choices, output.positions, strict=True)):
        gained, token_ids = worker_pb2.Update(id=choice.attempt_id), output.token_ids[place : place + 1]
        tokens = gained.choices.add(index=choice.index, first_position=position, token_ids=token_ids)
        if place in output.logprobs:
            tokens.logprobs.extend(logprobs_to_pb(token_ids, (output.logprobs[place],)))
        yield choice.attempt_id, gained, outcome.ended_s
    for event in output.after:
        yield event.attempt_id, event, outcome.ended_s
