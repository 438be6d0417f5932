"""An event loop on which waiting takes no time: its clock jumps to the next timer when nothing is ready.

Work for threads runs on the loop, and takes no time.
"""

import asyncio
from collections.abc import Callable, Collection, Coroutine
from concurrent.futures import Executor
from contextlib import suppress
from contextvars import Context
from typing import Any, TypeVar, TypeVarTuple, Unpack

T = TypeVar("T")
Ts = TypeVarTuple("Ts")
MAX_CALLBACKS_AT_ONCE = 100_000


class Livelock(Exception):
    """Callbacks follow one another without end while time stands still."""


class TimelessLoop(asyncio.BaseEventLoop):
    """An event loop without connections and threads."""

    _scheduled: list[asyncio.TimerHandle]

    def __init__(self) -> None:
        super().__init__()
        self._now_s = 0.0
        self._num_at_once = 0
        self._selector = self

    @property
    def unfinished(self) -> Collection[asyncio.Task[Any]]:
        """The tasks that are still under way."""
        return asyncio.all_tasks(self)

    def time(self) -> float:
        return self._now_s

    def select(self, timeout: float | None) -> list[Any]:
        """Takes the place of a selector: moves the clock on if nothing is ready."""
        self._num_at_once += 1
        if self._num_at_once > MAX_CALLBACKS_AT_ONCE:
            raise Livelock(f"at {self._now_s:.6f} s")
        if timeout != 0:
            assert timeout is not None, "everything waits for something that no timer brings"
            self._now_s = max(self._now_s, self._scheduled[0].when())
            self._num_at_once = 0
        return []

    def run_in_executor(
        self, executor: Executor | None, func: Callable[[Unpack[Ts]], T], *args: *Ts
    ) -> asyncio.Future[T]:
        """Runs work soon, without its executor."""
        future = self.create_future()
        self.call_soon(self.work, future, func, args)
        return future

    def call_soon_threadsafe(
        self, callback: Callable[[Unpack[Ts]], object], *args: *Ts, context: Context | None = None
    ) -> asyncio.Handle:
        return self.call_soon(callback, *args, context=context)

    def drop(self) -> None:
        """Closes the loop, and all coroutines that are still under way."""
        self.set_exception_handler(lambda *_: None)  # which hears of tasks that never end
        for task in list(self.unfinished):
            with suppress(RuntimeError):  # what it would begin on its way out has no loop any more
                task.get_coro().close()
        self.close()

    def work(self, future: asyncio.Future[T], func: Callable[..., T], args: tuple[Any, ...]) -> None:
        """Does the work of a future, unless it was cancelled."""
        if future.done():
            return
        try:
            future.set_result(func(*args))
        except Exception as error:
            future.set_exception(error)

    def _process_events(self, events: list[Any]) -> None:
        pass


def run(main: Coroutine[Any, Any, T], loop: TimelessLoop | None = None) -> T:
    """Runs a coroutine that uses no connections and no threads of its own; what it leaves behind is dropped."""
    loop = loop or TimelessLoop()
    try:
        return loop.run_until_complete(main)
    finally:
        loop.drop()
