"""The service of a worker to its routers: attempts begun on lines, holds, questions; without gRPC."""

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Protocol, TypeVar

from engine.core import EngineCore
from engine.grammar.grammars import NO_GRAMMARS, Grammars
from wire import errors
from wire.convert import error_to_pb
from wire.errors import Unavailable, Unsupported
from wire.ids import AttemptId
from wire.pb import worker_pb2
from wire.pools import WorkerState
from wire.tier import Tier
from worker.attempts import Attempts
from worker.convert import cursor_from_pb, events_to_pb, selection_from_pb, status_to_pb
from worker.job import Behaviour
from worker.line import WorkerLine
from worker.loop import Consult, EngineWatch, Inbox, StepReport, WorkerLoop
from worker.store_control import AsyncStore

T = TypeVar("T")

log = logging.getLogger(__name__)


class Warm(Protocol):
    """The count of kernels and graphs that were made since a worker was ready, while requests waited."""

    @property
    def num_late(self) -> int: ...


@dataclass(frozen=True)
class Cold:
    """The warmth of a model that compiles nothing."""

    num_late: int = 0


COLD = Cold()
STOP_TIMEOUT_S = 10.0
CHECK_TIMEOUT_S = 30.0


class WorkerService:
    """The lines of a worker, its attempts, its engine's thread and its store. Belongs to the event loop of `start`."""

    def __init__(
        self,
        info: worker_pb2.WorkerInfo,
        behaviour: Behaviour,
        engine: EngineCore,
        inbox: Inbox,
        store: AsyncStore,
        on_broken: Callable[[], None],
        max_silence_s: float,
        clock: Callable[[], float] = time.monotonic,
        new_loop: Callable[..., WorkerLoop] = WorkerLoop,
        grammars: Grammars = NO_GRAMMARS,
        warm: Warm = COLD,
    ) -> None:
        """Takes the parts. max_silence_s: a longer step of the engine counts as a hang.

        on_broken: called on any thread when the worker must end, and again if a hung thread goes on.
        """
        self.info = info
        self._store = store
        self._lines: set[WorkerLine] = set()
        self._is_closed = False
        self._event_loop: asyncio.AbstractEventLoop | None = None
        self._on_broken = on_broken
        self._warm = warm
        self._loop = new_loop(engine, inbox, self._deliver, on_broken, clock)
        self.attempts = Attempts(behaviour, self._loop, grammars, info.vocab_size, clock)
        self.watch = EngineWatch(lambda: self._loop.num_steps, max_silence_s)
        self._tasks: set[asyncio.Task[None]] = set()
        self._leaving = asyncio.Lock()

    async def start(self) -> None:
        """Starts the engine's thread. Call it once, first."""
        self._event_loop = asyncio.get_running_loop()
        self._loop.start()
        self._begin_task(self._watch_engine())

    async def close(self) -> None:
        """Ends all attempts with Unavailable, then the engine's thread, then the lines."""
        for task in self._tasks:
            task.cancel()
        if not await asyncio.to_thread(self._loop.stop, STOP_TIMEOUT_S):
            log.error("the engine's thread is still in a step after %s s", STOP_TIMEOUT_S)
        self.attempts.end_all(Unavailable("the worker has stopped"))
        await self._store.close()
        self._is_closed = True
        for line in self._lines:
            line.finish()

    async def drain(self, grace_s: float) -> int:
        """Drains the attempts, behind a change of role under way; see `Attempts.drain`."""
        async with self._leaving:
            return await self.attempts.drain(grace_s)

    async def serve_as(self, behaviour: Behaviour, grace_s: float) -> int:
        """Drains the attempts, then serves another role with the same engine; returns what `Attempts.drain` returns.

        Ends all lines, for they are lines to a worker of the role before. Does nothing in that role already. Raises
        Unavailable, and takes no more attempts, if the worker drains, or its engine is not well.
        """
        async with self._leaving:
            if self.info.role == behaviour.role.value:
                return 0
            if self.attempts.state is not WorkerState.READY:
                raise Unavailable(f"the worker is {self.attempts.state.value}")
            num_left = await self.attempts.drain(grace_s)
            if problems := await self._check_engine():
                raise Unavailable("; ".join(problems))
            # In a later iteration than the check: by its answer, the role before has taken the outcome of all aborts.
            await self._consult(lambda engine: engine.plan_by(behaviour.batcher))
            self.info.role = behaviour.role.value
            self.attempts.serve_as(behaviour)
            for line in self._lines:
                line.finish()
            return num_left

    def connect(self) -> WorkerLine:
        """Makes the worker's end of a new line."""
        line = WorkerLine(self.attempts, self)
        self._lines.add(line)
        if self._is_closed:
            line.finish()
        return line

    def renew(self, line: WorkerLine, attempts: list[AttemptId]) -> None:
        """Renews the holds of these attempts; tells the line about holds that have ended."""
        self._store.renew_soon(attempts, line.send_ended_holds)

    def release(self, attempts: list[AttemptId]) -> None:
        """Ends the holds of these attempts."""
        self._store.release_soon(attempts)

    def answer(self, line: WorkerLine, ask: worker_pb2.Ask) -> None:
        """Answers a question on the line, in a task."""
        self._begin_task(self._answer(line, ask))

    def line_ended(self, line: WorkerLine) -> None:
        """Forgets a line, and ends its attempts. Holds stay until they expire."""
        self._lines.discard(line)
        self.attempts.end_line(line)

    async def status(self, check: bool = False) -> worker_pb2.WorkerStatus:
        """Describes the state of the worker. Raises StoreError if its store does not answer."""
        problems = [*await self._check_engine(), *await self._store.check()] if check else []
        if num_late := self._warm.num_late:
            problems.append(
                f"{num_late} kernels or graphs were made while requests waited: restart it, or report a bug"
            )
        store = await self._store.status()
        return status_to_pb(
            self.info, self.attempts.state.value, self.watch.silent_s, self._loop.stats, store, problems
        )

    def check(self) -> list[str]:
        """Lists running attempts; empty once all have ended."""
        counts = {"attempts": len(self.attempts), "attempts at the engine": self._loop.num_attempts}
        return [f"{what}: {count}" for what, count in counts.items() if count]

    def _begin_task(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _answer(self, line: WorkerLine, ask: worker_pb2.Ask) -> None:
        try:
            reply = await self._reply(ask)
        except Exception as error:  # a bug, too: the router waits for an answer
            reply = worker_pb2.WorkerReply(error=error_to_pb(errors.known(error)))
        reply.number = ask.number
        line.send_answer(reply)

    async def _reply(self, ask: worker_pb2.Ask) -> worker_pb2.WorkerReply:
        match ask.WhichOneof("question"):
            case "info":
                return worker_pb2.WorkerReply(info=self.info)
            case "status":
                return worker_pb2.WorkerReply(status=await self.status(ask.status.check))
            case "events":
                page = await self._store.events(cursor_from_pb(ask.events.after))
                return worker_pb2.WorkerReply(events=events_to_pb(page))
            case "room":
                return worker_pb2.WorkerReply(room=await self._store.share_room(ask.room))
            case "count":
                return worker_pb2.WorkerReply(holdings=await self._store.count(selection_from_pb(ask.count)))
            case "clear":
                return worker_pb2.WorkerReply(holdings=await self._store.clear(selection_from_pb(ask.clear)))
            case "drop_pages":
                keys = selection_from_pb(ask.drop_pages).keys
                dropped = worker_pb2.Holding(
                    tier=Tier.DEVICE, blocks=await self._consult(lambda engine: engine.drop_cached(keys))
                )
                return worker_pb2.WorkerReply(holdings=worker_pb2.Holdings(holdings=[dropped]))
            case _:
                raise Unsupported("this worker does not know that question")

    async def _watch_engine(self) -> None:
        await self.watch.wait_for_silence()
        log.critical("the engine's thread has not finished a step for %s s: it is given up", self.watch.silent_s)
        self._loop.abandon()
        self.attempts.end_all(Unavailable("the worker's engine hangs"))
        self._on_broken()

    async def _check_engine(self) -> list[str]:
        try:
            return await self._consult(EngineCore.check)
        except Unavailable as error:
            return [error.message]

    async def _consult(self, work: Callable[[EngineCore], T]) -> T:
        """Has the engine's thread run short work between two steps. Raises Unavailable."""
        answer: Future[T] = Future()
        if not self._loop.put(Consult(work, answer)):
            raise Unavailable("the engine's thread has ended")
        try:
            async with asyncio.timeout(CHECK_TIMEOUT_S):
                return await asyncio.wrap_future(answer)
        except TimeoutError as error:
            raise Unavailable(f"the engine's thread has been in one step for {CHECK_TIMEOUT_S} s") from error
        except Unavailable as error:
            raise Unavailable("the engine's thread has ended") from error

    def _deliver(self, outcome: StepReport) -> None:
        """Passes a step's outcome to the event loop, with one wake-up. Runs on the engine's thread."""
        if self._event_loop is not None and not self._event_loop.is_closed():
            self._event_loop.call_soon_threadsafe(self._apply, outcome)

    def _apply(self, outcome: StepReport) -> None:
        if released := self.attempts.take(outcome):
            self._store.release_soon(released)
