"""What other threads ask of the engine's thread."""

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass

from engine.core import EngineCore
from wire.errors import BatonError
from worker.call import Call
from worker.lifecycle import Lifecycle


@dataclass(frozen=True)
class Begin:
    """A new life, whose instructions concern `call`."""

    call: Call
    lifecycle: Lifecycle


@dataclass(frozen=True)
class Withdraw:
    """Ends the life of a call, if it still has one."""

    call: Call
    error: BatonError


@dataclass(frozen=True)
class Ask:
    """Looks at the engine between two steps."""

    question: Callable[[EngineCore], list[str]]
    answer: Future[list[str]]

    def put_to(self, engine: EngineCore) -> None:
        """Answers; an error is the asker's, unless it has stopped waiting."""
        if self.answer.set_running_or_notify_cancel():
            try:
                self.answer.set_result(self.question(engine))
            except Exception as error:  # raised again where the answer is awaited
                self.answer.set_exception(error)

    def refuse(self, error: BatonError) -> None:
        if self.answer.set_running_or_notify_cancel():
            self.answer.set_exception(error)


Command = Begin | Withdraw | Ask
