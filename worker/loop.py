"""The thread that owns the engine: take commands, step, tell the requests, deliver."""

import logging
import os
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from enum import Enum

from engine.core import EngineCore
from engine.events import Emitted
from wire.errors import BatonError, Unavailable
from worker.call import Call
from worker.commands import Ask, Begin, Command, Withdraw
from worker.inbox import Inbox
from worker.instructions import Close
from worker.lifecycle import Lifecycle
from worker.lives import Deliveries, Lives

log = logging.getLogger(__name__)

ENGINE_NICENESS = 10
"""Where cores are few, those who only pass tokens on come before those who compute them."""
MAX_IDLE_S = 1.0
MAX_FAILED_STEPS = 4
"""Steps that fail, with no token in between, until the engine is given up: then it is not the requests."""


class LoopState(Enum):
    """BROKEN: the engine's books are wrong, or it fails again and again; this process is of no use any more."""

    RUNNING = "running"
    BROKEN = "broken"
    STOPPED = "stopped"


class WorkerLoop:
    """Runs an engine for calls. `begin`, `withdraw` and `ask` may be used from any thread and do not block.

    A request that the engine fails ends alone. A step that fails ends all requests with Unavailable, so that they are
    tried elsewhere, and the loop goes on if the engine's books are in order.

    deliver: takes what is wanted of others than the engine; called on the engine's thread, must not block.
    on_broken: called on the engine's thread, after the last delivery, if the state became BROKEN.
    num_turns: finished so far. There is one at least every MAX_IDLE_S, unless a step takes longer or hangs.
    """

    def __init__(
        self,
        engine: EngineCore,
        inbox: Inbox[Command],
        deliver: Callable[[Deliveries], None],
        on_broken: Callable[[], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.state = LoopState.RUNNING
        self.stats = engine.stats()
        self.num_turns = 0
        self._engine = engine
        self._inbox = inbox
        self._deliver = deliver
        self._on_broken = on_broken
        self._clock = clock
        self._lives = Lives(engine, clock)
        self._commands: deque[Command] = deque()
        self._has_more_to_do = False
        self._num_failed_steps = 0
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self, timeout_s: float) -> bool:
        """Ends all requests and the thread; False if a step took longer than that."""
        if self.state is LoopState.RUNNING:
            self.state = LoopState.STOPPED
        self._inbox.ring()
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def abandon(self) -> None:
        """Makes the loop BROKEN, though its thread may hang: it takes nothing more, and winds up should it go on."""
        self.state = LoopState.BROKEN
        self._inbox.close()

    def begin(self, call: Call, lifecycle: Lifecycle) -> None:
        """Starts a request's life. Unavailable if the loop has ended."""
        if not self._inbox.put(Begin(call, lifecycle)):
            raise Unavailable("the worker has stopped")

    def withdraw(self, call: Call, error: BatonError) -> None:
        """Ends a request before the next step. Does nothing if it has ended."""
        self._inbox.put(Withdraw(call, error))

    def ask(self, question: Callable[[EngineCore], list[str]]) -> Future[list[str]]:
        """What `question` says of the engine between two steps. Unavailable if the loop has ended."""
        answer: Future[list[str]] = Future()
        if not self._inbox.put(Ask(question, answer)):
            raise Unavailable("the worker has stopped")
        return answer

    def _run(self) -> None:
        os.nice(ENGINE_NICENESS)  # of this thread and of those it starts
        try:
            while self.state is LoopState.RUNNING:
                self._commands += self._inbox.take(0.0 if self._has_more_to_do else MAX_IDLE_S)
                self._turn()
                self.stats = self._engine.stats()
                self._deliver(self._lives.take_deliveries())
                self.num_turns += 1
        except Exception:  # a bug of ours outside of a step: nobody may go on waiting for this thread
            log.critical("the engine's thread has failed", exc_info=True)
            self.state = LoopState.BROKEN
        self._wind_up()
        if self.state is LoopState.BROKEN:
            self._on_broken()

    def _turn(self) -> None:
        try:
            while self._commands:
                self._obey(self._commands.popleft())
            began_s = self._clock()
            events = self._engine.step()
            self._lives.tell(events, began_s)
            self._has_more_to_do = bool(events) or self._engine.can_step
            if any(isinstance(event, Emitted) for event in events):
                self._num_failed_steps = 0
        except Exception as error:  # of whatever the model's step may raise; the thread has to outlive it
            self._recover(error)

    def _obey(self, command: Command) -> None:
        match command:
            case Begin():
                self._lives.begin(command)
            case Withdraw(call, error):
                self._lives.withdraw(call, error)
            case Ask():
                command.put_to(self._engine)

    def _recover(self, failure: Exception) -> None:
        incident = secrets.token_hex(8)
        log.error("incident %s: a step failed", incident, exc_info=failure)
        self._num_failed_steps += 1
        self._has_more_to_do = bool(self._commands)
        problems = self._lives.withdraw_all(Unavailable(f"a step of the worker failed, incident {incident}"))
        problems += self._check()
        if problems or self._num_failed_steps == MAX_FAILED_STEPS:
            log.critical("incident %s: the engine is given up: %s", incident, "; ".join(problems) or "it fails on")
            self.state = LoopState.BROKEN

    def _check(self) -> list[str]:
        try:
            return self._engine.check()
        except Exception as error:  # books that cannot be read are wrong
            return [f"the engine's check fails: {type(error).__name__}"]

    def _wind_up(self) -> None:
        """Lets nobody in any more, and nobody wait."""
        stopped = Unavailable("the worker has stopped")
        self._inbox.close()
        self._commands += self._inbox.take(0.0)
        self._lives.withdraw_all(stopped)
        deliveries = self._lives.take_deliveries()
        for command in self._commands:
            if isinstance(command, Begin):
                deliveries.replies.append((command.call, Close(stopped)))
            elif isinstance(command, Ask):
                command.refuse(stopped)
        self._deliver(deliveries)
