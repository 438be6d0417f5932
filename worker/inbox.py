"""How other threads reach the engine's thread: an inbox, and what may be put into it."""

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Protocol

from engine.core import EngineCore
from wire.errors import BatonError
from wire.ids import AttemptId, RequestId
from worker.job import Job
from worker.update import Update


class Listener(Protocol):
    """Where updates go: the line to a router."""

    def send(self, attempt: AttemptId, update: Update) -> None: ...


@dataclass(frozen=True, eq=False)
class Call:
    """One attempt at a request, begun on a line. Updates are delivered with the very call that began it."""

    id: AttemptId
    line: Listener

    @property
    def name(self) -> RequestId:
        """The id under which engine and store know the attempt."""
        return self.id.name

    def is_the_same_as(self, other: "Call") -> bool:
        """Whether both are of one attempt, begun twice on one line."""
        return self.id == other.id and self.line is other.line


@dataclass(frozen=True)
class Begin:
    """Starts an attempt, of which updates go to `call`."""

    call: Call
    job: Job


@dataclass(frozen=True)
class Withdraw:
    """Ends the attempt of a call, if it has not ended."""

    call: Call
    error: BatonError


@dataclass(frozen=True)
class Ask:
    """Looks at the engine between two steps."""

    question: Callable[[EngineCore], list[str]]
    answer: Future[list[str]]

    def put_to(self, engine: EngineCore) -> None:
        """Answers; an error is raised again where the answer is awaited, if it still is."""
        if self.answer.set_running_or_notify_cancel():
            try:
                self.answer.set_result(self.question(engine))
            except Exception as error:
                self.answer.set_exception(error)

    def refuse(self, error: BatonError) -> None:
        if self.answer.set_running_or_notify_cancel():
            self.answer.set_exception(error)


Command = Begin | Withdraw | Ask


class Inbox:
    """Commands in order of arrival, and a bell. Safe to use from any thread; one thread takes."""

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._commands: deque[Command] = deque()
        self._rung = False
        self._closed = False

    def put(self, command: Command) -> bool:
        """Adds a command; False if the inbox is closed and nothing takes it."""
        with self._condition:
            if not self._closed:
                self._commands.append(command)
                self._condition.notify()
            return not self._closed

    def ring(self) -> None:
        """Wakes the taking thread, though there may be nothing to take."""
        with self._condition:
            self._rung = True
            self._condition.notify()

    def take(self, timeout_s: float) -> list[Command]:
        """All commands, once there are any, the bell has rung or the inbox is closed; blocks at most `timeout_s`."""
        with self._condition:
            self._condition.wait_for(lambda: self._commands or self._rung or self._closed, timeout_s)
            commands = list(self._commands)
            self._commands.clear()
            self._rung = False
            return commands

    def close(self) -> None:
        """Lets nothing more in. What is in can still be taken."""
        with self._condition:
            self._closed = True
            self._condition.notify()
