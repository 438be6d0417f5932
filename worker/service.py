"""The service of a worker to its routers: attempts begun on lines, holds, questions; without gRPC."""

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine

from engine.core import EngineCore
from kv_store.block_store import BlockStore
from wire import errors
from wire.convert import error_to_pb
from wire.errors import BatonError, Cancelled, DeadlineExceeded, RequestExists, Unavailable, Unsupported, WorkerLeaving
from wire.ids import AttemptId, QualifiedId, number_of, request_of
from wire.pb import worker_pb2
from wire.pools import WorkerState
from worker.engine_watch import EngineWatch
from worker.inbox import Call, Inbox
from worker.job import Behaviour
from worker.line import WorkerLine
from worker.loop import Deliveries, WorkerLoop
from worker.messages import request_from_pb, status_to_pb
from worker.store import AsyncStore
from worker.update import End, Update

log = logging.getLogger(__name__)

MAX_REQUEST_S = 600.0
STOP_TIMEOUT_S = 10.0
CHECK_TIMEOUT_S = 30.0


class WorkerService:
    """The orders of all lines. Belongs to the event loop on which it starts.

    An abort takes an attempt out of the engine before its next step, and so does the end of its time or of its line.
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
    ) -> None:
        """Takes the parts. max_silence_s: a longer turn of the engine's thread passes for a hang.

        on_broken: runs on any thread when the worker is of no use any more; again if a thread that hung goes on.
        """
        self.info = info
        self._behaviour = behaviour
        self._store = AsyncStore(store)
        self._lines: set[WorkerLine] = set()
        self._calls: dict[QualifiedId, tuple[Call, asyncio.TimerHandle]] = {}
        self._is_idle = asyncio.Event()
        self._is_idle.set()
        self._is_draining = False
        self._is_closed = False
        self._event_loop: asyncio.AbstractEventLoop | None = None
        self._on_broken = on_broken
        self._clock = clock
        self._loop = new_loop(engine, inbox, self._deliver, on_broken, clock)
        self.watch = EngineWatch(lambda: self._loop.num_turns, max_silence_s)
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def num_calls(self) -> int:
        """Attempts under way."""
        return len(self._calls)

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
        line = WorkerLine(self, self.info.worker_id)
        self._lines.add(line)
        if self._is_closed:
            line.finish()
        return line

    def begin(self, call: Call, begin: worker_pb2.Begin) -> None:
        """Starts an attempt; it ousts an earlier attempt at the request, and any attempt of another line.

        Does nothing for an attempt that runs on its line already. Raises RequestExists while a later attempt runs
        there, InvalidRequest, or Unavailable while the worker takes no attempts.
        """
        request = request_from_pb(begin, self._behaviour.request_class, self.info.vocab_size)
        if self.state is not WorkerState.READY:
            refusal = WorkerLeaving if self.state is WorkerState.DRAINING else Unavailable
            raise refusal(f"the worker is {self.state.value}", attempt_id=call.id)
        earlier = self._call_of(call.id)
        if earlier is not None and earlier.is_the_same_as(call):
            return
        self._oust(earlier, call)
        self._remember(call, begin.time_left_s)
        try:
            self._loop.begin(call, self._behaviour.new_job(request, self._clock()))
        except BatonError:
            self._forget(call)
            raise

    def abort(self, line: WorkerLine, attempt: AttemptId) -> None:
        """Ends an attempt of this line. Does nothing if there is none."""
        call = self._call_of(attempt)
        if call is not None and call.id == attempt and call.line is line:
            self._end(call, Cancelled("the router has aborted it", attempt_id=attempt))

    def end_choice(self, line: WorkerLine, attempt: AttemptId, index: int) -> None:
        """Ends a choice of an attempt of this line. Does nothing if there is none."""
        call = self._call_of(attempt)
        if call is not None and call.id == attempt and call.line is line:
            self._loop.end_choice(call, index)

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
        for call, _ in tuple(self._calls.values()):
            if call.line is line:
                self._end(call, Cancelled("the line to the router has ended", attempt_id=call.id))

    async def drain(self, grace_s: float) -> int:
        """Refuses new attempts, waits for running ones, and after the grace ends the rest with WorkerLeaving.

        Returns the number of attempts that it ends so; the router goes on with them elsewhere.
        """
        self._is_draining = True
        try:
            async with asyncio.timeout(grace_s):
                await self._is_idle.wait()
        except TimeoutError:
            log.warning("%d requests outlast the grace of %s s", len(self._calls), grace_s)
        left = [call for call, _ in self._calls.values()]
        for call in left:
            self._end(call, WorkerLeaving("the worker is going away"))
        return len(left)

    async def status(self, check: bool = False) -> worker_pb2.WorkerStatus:
        """Describes the state of the worker. Raises StoreError if its store does not answer."""
        problems = [*await self._check_engine(), *await self._store.check()] if check else []
        store = await self._store.status()
        return status_to_pb(self.info, self.state.value, self.watch.silent_s, self._loop.stats, store, problems)

    def check(self) -> list[str]:
        """Lists attempts under way; empty once all have ended."""
        counts = {"calls": len(self._calls), "attempts at the engine": self._loop.num_begun}
        return [f"{what}: {count}" for what, count in counts.items() if count]

    def _oust(self, earlier: Call | None, call: Call) -> None:
        if earlier is None:
            return
        if earlier.line is call.line and number_of(earlier.id) > number_of(call.id):
            raise RequestExists("a later attempt at the request is running", attempt_id=call.id)
        self._end(earlier, Cancelled("another attempt took its place", attempt_id=earlier.id))

    def _call_of(self, attempt: AttemptId) -> Call | None:
        call, _ = self._calls.get(request_of(attempt), (None, None))
        return call

    def _end(self, call: Call, error: BatonError) -> None:
        self._forget(call)
        call.line.send(call.id, Update(end=End(error)))
        self._loop.withdraw(call, error)

    def _remember(self, call: Call, time_left_s: float) -> None:
        out_of_time = DeadlineExceeded("the request's deadline has passed", attempt_id=call.id)
        life_s = min(time_left_s, MAX_REQUEST_S)
        timer = asyncio.get_running_loop().call_later(life_s, self._end, call, out_of_time)
        self._calls[request_of(call.id)] = call, timer
        self._is_idle.clear()

    def _forget(self, call: Call) -> None:
        _, timer = self._calls.pop(request_of(call.id))
        timer.cancel()
        if not self._calls:
            self._is_idle.set()

    def _begin_task(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _answer(self, line: WorkerLine, ask: worker_pb2.Ask) -> None:
        answer = worker_pb2.Answer(number=ask.number)
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
        for call, _ in tuple(self._calls.values()):
            self._end(call, Unavailable("the worker's engine hangs", attempt_id=call.id))
        self._on_broken()

    async def _check_engine(self) -> list[str]:
        try:
            async with asyncio.timeout(CHECK_TIMEOUT_S):
                return await asyncio.wrap_future(self._loop.ask(EngineCore.check))
        except TimeoutError:
            return [f"the engine's thread has been in one step for {CHECK_TIMEOUT_S} s"]
        except Unavailable:
            return ["the engine's thread has ended"]

    def _deliver(self, deliveries: Deliveries) -> None:
        """Hands a turn's outcome to the event loop, with one wake-up. Runs on the engine's thread."""
        if self._event_loop is not None and not self._event_loop.is_closed():
            self._event_loop.call_soon_threadsafe(self._apply, deliveries)

    def _apply(self, deliveries: Deliveries) -> None:
        for call, update in deliveries.updates.items():
            if self._call_of(call.id) is call:
                if update.end is not None:
                    self._forget(call)
                call.line.send(call.id, update)
        if deliveries.released:
            self._store.release_soon(deliveries.released)
