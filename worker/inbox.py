"""The inbox of the engine's thread, and the commands that other threads put into it."""

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Protocol

from engine.core import EngineCore
from wire.errors import BatonError
from wire.ids import AttemptId
from worker.job import Job
from worker.update import Update


class Listener(Protocol):
    """The receiver of updates: the line to a router."""

    def send(self, attempt: AttemptId, update: Update) -> None: ...


@dataclass(frozen=True, eq=False)
class Call:
    """An attempt at a request, begun on a line. The loop delivers updates with the very call that began it."""

    id: AttemptId
    line: Listener

    def is_the_same_as(self, other: "Call") -> bool:
        """Compares attempts: True for one attempt that was begun twice on one line."""
        return self.id == other.id and self.line is other.line


@dataclass(frozen=True)
class Begin:
    """The command to start an attempt, of which updates go to `call`."""

    call: Call
    job: Job


@dataclass(frozen=True)
class Withdraw:
    """The command to end the attempt of a call, if it has not ended."""

    call: Call
    error: BatonError


@dataclass(frozen=True)
class EndChoice:
    """The command to end a choice of a call's attempt, if it has not ended."""

    call: Call
    index: int


@dataclass(frozen=True)
class Ask:
    """The command to look at the engine between two steps."""

    question: Callable[[EngineCore], list[str]]
    answer: Future[list[str]]

    def put_to(self, engine: EngineCore) -> None:
        """Answers, with the error of a question that fails. Does nothing if nothing awaits the answer any more."""
        if self.answer.set_running_or_notify_cancel():
            try:
                self.answer.set_result(self.question(engine))
            except Exception as error:
                self.answer.set_exception(error)

    def refuse(self, error: BatonError) -> None:
        if self.answer.set_running_or_notify_cancel():
            self.answer.set_exception(error)


Command = Begin | Withdraw | EndChoice | Ask


class Inbox:
    """Commands in order of arrival, and a bell. Safe to use from any thread; one thread takes."""

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
        """Takes all commands, after a command, the bell or `close`; blocks at most `timeout_s`."""
        with self._condition:
            self._condition.wait_for(lambda: self._commands or self._rung or self._closed, timeout_s)
            commands = list(self._commands)
            self._commands.clear()
            self._rung = False
            return commands

    def close(self) -> None:
        """Closes the inbox for further commands; `take` still returns earlier ones."""
        with self._condition:
            self._closed = True
            self._condition.notify()
