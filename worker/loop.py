"""The thread that owns the engine: takes commands, steps, delivers the outcome.

Attempts ─ Add, Abort, EndChoice, Recall, BlocksAhead ─┐
WorkerService ─ Consult ───────────────────────────────┴─▶ Inbox ─▶ WorkerLoop ─▶ EngineCore
Attempts ◀─ WorkerService ◀─ a StepReport ──── WorkerLoop ◀─ StepOutput
"""

import asyncio
import logging
import os
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from engine.core import EngineCore
from engine.events import Event, Failed, Finished, StepOutput
from engine.request import BlocksAhead, EngineRequest
from wire.errors import BatonError, PromptReturned, Unavailable
from wire.ids import AttemptId
from wire.sampling import FinishReason

T = TypeVar("T")

log = logging.getLogger(__name__)

ENGINE_NICENESS = 10
"""With few cores, threads that pass tokens on come before threads that compute tokens."""
MAX_IDLE_S = 1.0
MAX_FAILED_STEPS = 4
"""Failed steps in a row, without a token, after which the engine counts as broken: the requests are not to blame."""
LOOK_EVERY_S = 0.5


@dataclass(frozen=True)
class Add:
    """The command to start an attempt."""

    request: EngineRequest


@dataclass(frozen=True)
class Abort:
    """The command to end an attempt, if it has not ended."""

    attempt: AttemptId


@dataclass(frozen=True)
class EndChoice:
    """The command to end a choice of an attempt, as a stop token does, if it has not ended."""

    attempt: AttemptId
    index: int


@dataclass(frozen=True)
class Recall:
    """The command to return an attempt to its router, if it has not begun."""

    attempt: AttemptId


@dataclass(frozen=True)
class Consult(Generic[T]):
    """The command to run short work with the engine, between two steps."""

    work: Callable[[EngineCore], T]
    answer: Future[T]

    def obey(self, engine: EngineCore) -> None:
        """Runs the work; its result or error is the answer. Does nothing if the caller has gone."""
        if self.answer.set_running_or_notify_cancel():
            try:
                self.answer.set_result(self.work(engine))
            except Exception as error:
                self.answer.set_exception(error)

    def refuse(self, error: BatonError) -> None:
        if self.answer.set_running_or_notify_cancel():
            self.answer.set_exception(error)


Command = Add | Abort | EndChoice | Recall | BlocksAhead | Consult[Any]


class Inbox:
    """Commands in order of arrival, and a wake-up signal. Thread-safe; one thread takes."""

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._commands: deque[Command] = deque()
        self._rung = False
        self._closed = False

    def put(self, command: Command) -> bool:
        """Adds a command; returns False if the inbox is closed."""
        with self._condition:
            if not self._closed:
                self._commands.append(command)
                self._condition.notify()
            return not self._closed

    def ring(self) -> None:
        """Wakes the taking thread, even without a command."""
        with self._condition:
            self._rung = True
            self._condition.notify()

    def take(self, timeout_s: float) -> list[Command]:
        """Takes all commands, once there is a command, a `ring` or `close`; blocks at most `timeout_s`."""
        with self._condition:
            self._condition.wait_for(lambda: self._commands or self._rung or self._closed, timeout_s)
            commands = list(self._commands)
            self._commands.clear()
            self._rung = False
            return commands

    def close(self) -> None:
        """Closes the inbox to further commands; `take` still returns earlier commands."""
        with self._condition:
            self._closed = True
            self._condition.notify()


@dataclass(kw_only=True)
class StepReport:
    """The report of an iteration: the commands obeyed, and the engine's step after them.

    Commands' events and `output.before` happened at `began_s`, tokens and `output.after` at `ended_s`.

    added: new requests; a request that the engine refused also has a Failed event. aborted: attempts taken out of the
    engine, by command or for the failure. failure: ends every attempt added so far.
    """

    began_s: float
    added: list[EngineRequest] = field(default_factory=list)
    aborted: list[AttemptId] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
    output: StepOutput = field(default_factory=StepOutput)
    ended_s: float = 0.0
    failure: BatonError | None = None

    @property
    def is_news(self) -> bool:
        return bool(self.added or self.aborted or self.events or self.failure) or self.output.is_news


class WorkerLoop:
    """The driver of an engine. `put` is thread-safe and does not block.

    A request that the engine fails ends alone. A failed step ends all attempts with Unavailable, so that the router
    tries elsewhere; the loop goes on if the engine's invariants hold.

    deliver: takes the outcome of a step, on the engine's thread; must not block. on_broken: runs on the engine's
    thread, after the last delivery, if the loop broke. is_broken: the engine's invariants are violated, or it fails
    again and again, so that this process must end. num_steps: steps so far, idle steps included, at least one every
    MAX_IDLE_S, unless a step takes longer or hangs.
    """

    def __init__(
        self,
        engine: EngineCore,
        inbox: Inbox,
        deliver: Callable[[StepReport], None],
        on_broken: Callable[[], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.is_running = True
        self.is_broken = False
        self.stats = engine.stats()
        self.num_steps = 0
        self._engine = engine
        self._inbox = inbox
        self._deliver = deliver
        self._on_broken = on_broken
        self._clock = clock
        self._commands: deque[Command] = deque()
        self._has_more_to_do = False
        self._num_failed_steps = 0
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    @property
    def num_attempts(self) -> int:
        """Attempts in the engine."""
        return len(self._engine.attempts)

    def start(self) -> None:
        self._thread.start()

    def stop(self, timeout_s: float) -> bool:
        """Ends all attempts and the thread; returns False if a step outlasts `timeout_s`."""
        self.is_running = False
        self._inbox.ring()
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def abandon(self) -> None:
        """Abandons the loop, whose thread may hang: it takes no more commands, and winds up if the thread goes on."""
        self._break()
        self._inbox.close()

    def put(self, command: Command) -> bool:
        """Adds a command, to be obeyed before the next step. Returns False if the loop has ended."""
        return self._inbox.put(command)

    def run_once(self) -> None:
        """Obeys commands, steps the engine once, and delivers the outcome. Without work blocks up to MAX_IDLE_S."""
        self._commands += self._inbox.take(0.0 if self._has_more_to_do else MAX_IDLE_S)
        outcome = StepReport(began_s=self._clock())
        try:
            while self._commands:
                self._obey(self._commands.popleft(), outcome)
            if outcome.events:  # a returned prompt must not wait for the step
                self._deliver(outcome)
                outcome = StepReport(began_s=self._clock())
            outcome.began_s = self._clock()
            output = outcome.output = self._engine.step()
            outcome.ended_s = self._clock()
            self._has_more_to_do = output.is_news or self._engine.can_step
            if output.token_ids:
                self._num_failed_steps = 0
        except Exception as error:  # of whatever the model's step may raise; the thread has to outlive it
            self._recover(error, outcome)
        self.stats = self._engine.stats()
        if outcome.is_news:
            self._deliver(outcome)
        self.num_steps += 1

    def run_or_wind_up(self) -> bool:
        """Runs once; after the loop's end answers everything that waits for it, and returns False."""
        try:
            if self.is_running:
                self.run_once()
                return True
        except Exception:  # a bug of ours outside of a step: nothing may go on waiting for this thread
            log.critical("the engine's thread has failed", exc_info=True)
            self._break()
        self._wind_up()
        if self.is_broken:
            self._on_broken()
        return False

    def _run(self) -> None:
        os.nice(ENGINE_NICENESS)  # of this thread and the threads that it starts
        while self.run_or_wind_up():
            pass

    def _obey(self, command: Command, outcome: StepReport) -> None:
        match command:
            case Add(request):
                outcome.added.append(request)
                try:
                    self._engine.add(request)
                except BatonError as error:
                    outcome.events.append(Failed(request.attempt_id, error))
            case Abort(attempt):
                self._engine.abort(attempt)
                outcome.aborted.append(attempt)
            case EndChoice(attempt, index):
                if self._engine.end(attempt, index):
                    outcome.events.append(Finished(attempt, index, FinishReason.STOP))
            case Recall(attempt):
                if self._engine.recall(attempt):
                    outcome.events.append(Failed(attempt, PromptReturned("another worker computes it sooner")))
            case BlocksAhead():
                self._engine.prefetch(command)
            case Consult():
                command.obey(self._engine)

    def _recover(self, failure: Exception, outcome: StepReport) -> None:
        incident = secrets.token_hex(8)
        log.error("incident %s: a step failed", incident, exc_info=failure)
        self._num_failed_steps += 1
        self._has_more_to_do = bool(self._commands)
        outcome.failure = Unavailable(f"a step of the worker failed, incident {incident}")
        problems = self._abort_all(outcome) + self._check()
        if problems or self._num_failed_steps == MAX_FAILED_STEPS:
            log.critical("incident %s: the engine is given up: %s", incident, "; ".join(problems) or "it fails on")
            self._break()

    def _abort_all(self, outcome: StepReport) -> list[str]:
        """Takes every attempt out of the engine, in whatever state it is; returns the problems."""
        problems = []
        for attempt in list(self._engine.attempts):
            outcome.aborted.append(attempt)
            try:
                self._engine.abort(attempt)
            except Exception:  # the others have to be taken out, too
                log.exception("not taken out of the engine", extra={"attempt_id": attempt})
                problems.append("a request cannot be taken out of the engine")
        return problems

    def _check(self) -> list[str]:
        try:
            return self._engine.check()
        except Exception as error:  # books that cannot be read are wrong
            return [f"the engine's check fails: {type(error).__name__}"]

    def _break(self) -> None:
        self.is_broken = True
        self.is_running = False

    def _wind_up(self) -> None:
        """Closes the inbox, and ends every attempt and every question."""
        stopped = Unavailable("the worker has stopped")
        outcome = StepReport(began_s=self._clock(), failure=stopped)
        self._inbox.close()
        self._commands += self._inbox.take(0.0)
        self._abort_all(outcome)
        for command in self._commands:
            if isinstance(command, Add):
                outcome.added.append(command.request)
            elif isinstance(command, Consult):
                command.refuse(stopped)
        self._deliver(outcome)


class EngineWatch:
    """A watch over the engine: compares its number of finished steps with the number at the last look.

    It counts silence in looks, not by a clock: a stop of the whole process stops the count, too, and is not taken for a
    hang.
    """

    def __init__(self, num_steps: Callable[[], int], max_silence_s: float) -> None:
        self.silent_s = 0.0
        self._num_steps = num_steps
        self._max_silence_s = max_silence_s
        self._num_steps_seen = num_steps()

    async def wait_for_silence(self) -> None:
        """Waits until the engine has finished no step for `max_silence_s`."""
        while self.silent_s < self._max_silence_s:
            await asyncio.sleep(LOOK_EVERY_S)
            self.look()

    def look(self) -> None:
        """Compares once. Call it every LOOK_EVERY_S."""
        num_steps = self._num_steps()
        self.silent_s = self.silent_s + LOOK_EVERY_S if num_steps == self._num_steps_seen else 0.0
        self._num_steps_seen = num_steps
