"""The service of a worker to its routers: attempts begun on lines, holds, questions; without gRPC."""

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field

from engine.core import EngineCore
from engine.events import Abandoned
from engine.grammar.grammars import NO_GRAMMARS, Grammars
from engine.request import EngineRequest
from kv_store.block_store import BlockStore
from wire import errors
from wire.convert import error_to_pb, logprobs_to_pb
from wire.errors import BatonError, Cancelled, DeadlineExceeded, RequestExists, Unavailable, Unsupported, WorkerLeaving
from wire.ids import AttemptId, number_of, request_of
from wire.pb import worker_pb2
from wire.pools import Role, WorkerState
from worker.job import Behaviour, Job, News
from worker.line import WorkerLine
from worker.loop import Abort, Add, CheckBooks, EndChoice, EngineWatch, Inbox, StepOutcome, WorkerLoop
from worker.messages import request_from_pb, status_to_pb
from worker.store import AsyncStore

log = logging.getLogger(__name__)

MAX_REQUEST_S = 600.0
STOP_TIMEOUT_S = 10.0
CHECK_TIMEOUT_S = 30.0


@dataclass(eq=False)
class BegunAttempt:
    """An attempt begun on a line. is_added: the engine has it; news before that are of an earlier one of its id."""

    line: WorkerLine
    job: Job
    is_added: bool = False
    timer: asyncio.TimerHandle = field(init=False)

    @property
    def id(self) -> AttemptId:
        return self.job.request.attempt_id


class WorkerService:
    """The attempts of all lines: their orders go to the engine's thread, and the outcomes of its steps to their jobs.

    Belongs to the event loop on which it starts. An abort takes an attempt out of the engine before its next step, and
    so does the end of its time or of its line.
    """

    def __init__(
        self,
        info: worker_pb2.WorkerInfo,
        behaviour: Behaviour,
        engine: EngineCore,
        inbox: Inbox,
        store: BlockStore,
        on_broken: Callable[[], None],
        max_silence_s: float,
        clock: Callable[[], float] = time.monotonic,
        new_loop: Callable[..., WorkerLoop] = WorkerLoop,
        grammars: Grammars = NO_GRAMMARS,
    ) -> None:
        """Takes the parts. max_silence_s: a longer step of the engine's thread passes for a hang.

        on_broken: runs on any thread when the worker is of no use any more; again if a thread that hung goes on.
        """
        self.info = info
        self._behaviour = behaviour
        self._grammars = grammars
        self._store = AsyncStore(store)
        self._lines: set[WorkerLine] = set()
        self._attempts: dict[AttemptId, BegunAttempt] = {}
        self._is_idle = asyncio.Event()
        self._is_idle.set()
        self._is_draining = False
        self._is_closed = False
        self._event_loop: asyncio.AbstractEventLoop | None = None
        self._on_broken = on_broken
        self._clock = clock
        self._loop = new_loop(engine, inbox, self._deliver, on_broken, clock)
        self.watch = EngineWatch(lambda: self._loop.num_steps, max_silence_s)
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def num_attempts(self) -> int:
        """Attempts under way."""
        return len(self._attempts)

    @property
    def state(self) -> WorkerState:
        if not self._loop.is_running:
            return WorkerState.BROKEN
        return WorkerState.DRAINING if self._is_draining else WorkerState.READY

    async def start(self) -> None:
        """Starts the engine's thread. Comes once, before anything else."""
        self._event_loop = asyncio.get_running_loop()
        self._loop.start()
        self._begin_task(self._watch_engine())

    async def close(self) -> None:
        """Ends all attempts with Unavailable, the engine's thread, and then the lines."""
        for task in self._tasks:
            task.cancel()
        if not await asyncio.to_thread(self._loop.stop, STOP_TIMEOUT_S):
            log.error("the engine's thread is still in a step after %s s", STOP_TIMEOUT_S)
        await self._store.close()
        self._is_closed = True
        for line in self._lines:
            line.finish()

    def connect(self) -> WorkerLine:
        """Makes the worker's end of a new line."""
        line = WorkerLine(self)
        self._lines.add(line)
        if self._is_closed:
            line.finish()
        return line

    def begin(self, line: WorkerLine, begin: worker_pb2.Begin) -> None:
        """Starts an attempt; it ousts an earlier attempt at the request, and any attempt of another line.

        Does nothing for an attempt that runs on its line already. Raises RequestExists while a later attempt runs
        there, InvalidRequest, or Unavailable while the worker takes no attempts.
        """
        request = request_from_pb(begin, self._behaviour.request_class, self.info.vocab_size)
        if self.state is not WorkerState.READY:
            refusal = WorkerLeaving if self.state is WorkerState.DRAINING else Unavailable
            raise refusal(f"the worker is {self.state.value}", attempt_id=begin.id)
        attempt = BegunAttempt(line, self._behaviour.new_job(request, self._clock()))
        qualified_id = request_of(attempt.id)
        for earlier in [one for one in self._attempts.values() if request_of(one.id) == qualified_id]:
            if (earlier.id, earlier.line) == (attempt.id, line):
                return
            self._oust(earlier, attempt)
        if request.sampling.response_format is not None:
            self._begin_task(self._add_constrained(attempt, request))
        elif not self._loop.put(Add(request)):
            raise Unavailable("the worker has stopped")
        out_of_time = DeadlineExceeded("the request's deadline has passed", attempt_id=attempt.id)
        life_s = min(begin.time_left_s, MAX_REQUEST_S)
        attempt.timer = asyncio.get_running_loop().call_later(life_s, self._end, attempt, out_of_time)
        self._attempts[attempt.id] = attempt
        self._is_idle.clear()

    def abort(self, line: WorkerLine, attempt_id: AttemptId) -> None:
        """Ends an attempt of this line. Does nothing if there is none."""
        attempt = self._attempts.get(attempt_id)
        if attempt is not None and attempt.line is line:
            self._end(attempt, Cancelled("the router has aborted it", attempt_id=attempt_id))

    def end_choice(self, line: WorkerLine, attempt_id: AttemptId, index: int) -> None:
        """Ends a choice of an attempt of this line. Does nothing if there is none."""
        attempt = self._attempts.get(attempt_id)
        if attempt is not None and attempt.line is line:
            self._loop.put(EndChoice(attempt_id, index))

    def renew(self, line: WorkerLine, attempts: list[AttemptId]) -> None:
        """Lets the holds of these attempts live on; the line hears of holds that have ended."""
        self._store.renew_soon(attempts, line.send_ended_holds)

    def release(self, attempts: list[AttemptId]) -> None:
        """Ends the holds of these attempts."""
        self._store.release_soon(attempts)

    def answer(self, line: WorkerLine, ask: worker_pb2.Ask) -> None:
        """Answers a question on the line, in a task of its own."""
        self._begin_task(self._answer(line, ask))

    def line_ended(self, line: WorkerLine) -> None:
        """Ends the attempts of a line. Holds stay until they run out."""
        self._lines.discard(line)
        for attempt in tuple(self._attempts.values()):
            if attempt.line is line:
                self._end(attempt, Cancelled("the line to the router has ended", attempt_id=attempt.id))

    async def drain(self, grace_s: float) -> int:
        """Refuses new attempts, waits for running ones, and after the grace ends the rest with WorkerLeaving.

        Returns the number of attempts that it ends so; the router goes on with them elsewhere.
        """
        self._is_draining = True
        try:
            async with asyncio.timeout(grace_s):
                await self._is_idle.wait()
        except TimeoutError:
            log.warning("%d requests outlast the grace of %s s", len(self._attempts), grace_s)
        left = list(self._attempts.values())
        for attempt in left:
            self._end(attempt, WorkerLeaving("the worker is going away"))
        return len(left)

    async def status(self, check: bool = False) -> worker_pb2.WorkerStatus:
        """Describes the state of the worker. Raises StoreError if its store does not answer."""
        problems = [*await self._check_engine(), *await self._store.check()] if check else []
        store = await self._store.status()
        return status_to_pb(self.info, self.state.value, self.watch.silent_s, self._loop.stats, store, problems)

    def check(self) -> list[str]:
        """Lists attempts under way; empty once all have ended."""
        counts = {"attempts": len(self._attempts), "attempts at the engine": self._loop.num_attempts}
        return [f"{what}: {count}" for what, count in counts.items() if count]

    async def _add_constrained(self, attempt: BegunAttempt, request: EngineRequest) -> None:
        """Hands an attempt to the engine once its grammar is built, on a thread; a fault of it ends the attempt."""
        error: BatonError | None = None
        try:
            request = attempt.job.request = await asyncio.to_thread(self._grammars.prepare, request)
        except BatonError as refusal:
            error = refusal
        except Exception as bug:  # the router waits for an end
            error = errors.report(bug, attempt_id=attempt.id)
        if self._attempts.get(attempt.id) is not attempt:
            return
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
        attempt.line.send(attempt.job.withdraw(error))
        self._loop.put(Abort(attempt.id))

    def _forget(self, attempt: BegunAttempt) -> None:
        del self._attempts[attempt.id]
        attempt.timer.cancel()
        if not self._attempts:
            self._is_idle.set()

    def _begin_task(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _answer(self, line: WorkerLine, ask: worker_pb2.Ask) -> None:
        answer = worker_pb2.WorkerReply(number=ask.number)
        try:
            match ask.WhichOneof("question"):
                case "info":
                    answer.info.CopyFrom(self.info)
                case "status":
                    answer.status.CopyFrom(await self.status(ask.status.check))
                case _:
                    raise Unsupported("this worker does not know that question")
        except BatonError as error:
            answer.error.CopyFrom(error_to_pb(error))
        except Exception as bug:  # the router waits for an answer
            answer.error.CopyFrom(error_to_pb(errors.report(bug)))
        line.send_answer(answer)

    async def _watch_engine(self) -> None:
        await self.watch.wait_for_silence()
        log.critical("the engine's thread has not finished a step for %s s: it is given up", self.watch.silent_s)
        self._loop.abandon()
        for attempt in tuple(self._attempts.values()):
            self._end(attempt, Unavailable("the worker's engine hangs", attempt_id=attempt.id))
        self._on_broken()

    async def _check_engine(self) -> list[str]:
        answer: Future[list[str]] = Future()
        if not self._loop.put(CheckBooks(answer)):
            return ["the engine's thread has ended"]
        try:
            async with asyncio.timeout(CHECK_TIMEOUT_S):
                return await asyncio.wrap_future(answer)
        except TimeoutError:
            return [f"the engine's thread has been in one step for {CHECK_TIMEOUT_S} s"]
        except Unavailable:
            return ["the engine's thread has ended"]

    def _deliver(self, outcome: StepOutcome) -> None:
        """Hands a step's outcome to the event loop, with one wake-up. Runs on the engine's thread."""
        if self._event_loop is not None and not self._event_loop.is_closed():
            self._event_loop.call_soon_threadsafe(self._apply, outcome)

    def _apply(self, outcome: StepOutcome) -> None:
        """Takes the outcome of a step: news go to the jobs of their attempts, and updates of these to their lines."""
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
        if released:
            self._store.release_soon(released)

    def _tell(self, attempt_id: AttemptId, news: News, now_s: float) -> bool:
        """Hands news to the job of their attempt, whose bugs end it alone. Tells whether its hold is over."""
        attempt = self._attempts.get(attempt_id)
        if attempt is None or not attempt.is_added:
            return isinstance(news, Abandoned)
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


def _news_of(outcome: StepOutcome) -> Iterator[tuple[AttemptId, News, float]]:
    """Yields the news of a step, in order, with the attempt that it is of and the time at which it happened."""
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
