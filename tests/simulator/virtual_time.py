"""An event loop on which waiting takes no time, for many processes in one thread; each of them may die at any point.

Its clock jumps to the next timer when nothing is ready. Work for threads runs on it, a little later. A callback or
task belongs to the process in whose context it was made; once the process is dead, none of them runs any more.
"""

import asyncio
import random
from collections.abc import Callable, Coroutine, Generator
from concurrent.futures import Executor
from contextlib import suppress
from contextvars import Context, ContextVar, copy_context
from typing import Any, TypeVar, TypeVarTuple, Unpack

T = TypeVar("T")
Ts = TypeVarTuple("Ts")
MAX_THREAD_S = 0.002
MAX_CALLBACKS_AT_ONCE = 100_000
_process: ContextVar["Process | None"] = ContextVar("process", default=None)


class Died(BaseException):
    """The end of the running process: no handler of its own may take it for an error."""


class Livelock(Exception):
    """Callbacks follow one another without end while time stands still."""


class Process:
    """A process of the simulated cluster, and the context of all that it runs."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.is_dead = False
        self.death = asyncio.get_running_loop().create_future()

    @property
    def context(self) -> Context:
        """A new one at each call, for a context can be entered once only."""
        context = copy_context()
        context.run(_process.set, self)
        return context

    def run(self, work: Callable[[Unpack[Ts]], T], *arguments: *Ts) -> T:
        return self.context.run(work, *arguments)

    def spawn(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        return asyncio.get_running_loop().create_task(work, context=self.context)

    async def finish(self, work: Coroutine[Any, Any, T]) -> T | None:
        """Waits for work of the process; None if it dies meanwhile."""
        task = self.spawn(work)
        await asyncio.wait([task, self.death], return_when=asyncio.FIRST_COMPLETED)
        return None if self.is_dead else task.result()

    def require_alive(self) -> None:
        """Raises Died."""
        if self.is_dead:
            raise Died(self.name)


class VirtualLoop(asyncio.BaseEventLoop):
    """An event loop without connections and threads. `draw` makes the time that work for threads takes."""

    _scheduled: list[asyncio.TimerHandle]

    def __init__(self, draw: random.Random | None = None) -> None:
        super().__init__()
        self._draw = draw or random.Random(0)
        self._now_s = 0.0
        self._num_at_once = 0
        self._selector = self
        self._free_at: dict[Executor | None, float] = {}
        self._owners: dict[asyncio.Task[Any], Process | None] = {}

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
        """Runs work soon, one after another for an executor, which is not used otherwise."""
        future = self.create_future()
        when = max(self._now_s, self._free_at.get(executor, 0.0)) + self._draw.random() * MAX_THREAD_S
        self._free_at[executor] = when
        self.call_at(when, self._work, future, func, args)
        return future

    def create_task(
        self,
        coro: Generator[Any, None, T] | Coroutine[Any, Any, T],
        *,
        name: object = None,
        context: Context | None = None,
    ) -> asyncio.Task[T]:
        task = super().create_task(coro, name=name, context=context)
        self._owners[task] = (context or copy_context()).get(_process)
        task.add_done_callback(self._owners.pop, context=Context())
        return task

    def kill(self, process: Process) -> None:
        """Ends a process: none of its callbacks and tasks goes on."""
        process.is_dead = True
        if not process.death.done():
            process.death.set_result(None)

    def tasks_of(self, process: Process | None) -> list[str]:
        """Names the coroutines of a process's tasks; for None, of the tasks that belong to no process."""
        tasks = [task for task, owner in self._owners.items() if owner is process]
        return sorted(getattr(task.get_coro(), "__qualname__", "") for task in tasks)

    def drop(self) -> None:
        """Closes the loop, and all coroutines that are still under way."""
        self.set_exception_handler(lambda *_: None)  # which hears of tasks that never end
        for task in list(self._owners):
            with suppress(RuntimeError):  # what it would begin on its way out has no loop any more
                task.get_coro().close()
        self.close()

    def call_soon(
        self, callback: Callable[[Unpack[Ts]], object], *args: *Ts, context: Context | None = None
    ) -> asyncio.Handle:
        return super().call_soon(_unless_dead(callback, context), *args, context=context)

    def call_at(
        self, when: float, callback: Callable[[Unpack[Ts]], object], *args: *Ts, context: Context | None = None
    ) -> asyncio.TimerHandle:
        return super().call_at(when, _unless_dead(callback, context), *args, context=context)

    def call_soon_threadsafe(
        self, callback: Callable[[Unpack[Ts]], object], *args: *Ts, context: Context | None = None
    ) -> asyncio.Handle:
        return self.call_soon(callback, *args, context=context)

    def _work(self, future: asyncio.Future[T], func: Callable[..., T], args: tuple[Any, ...]) -> None:
        if future.done():
            return
        try:
            future.set_result(func(*args))
        except Exception as error:
            future.set_exception(error)

    def _process_events(self, events: list[Any]) -> None:
        pass


def _unless_dead(callback: Callable[[Unpack[Ts]], object], context: Context | None) -> Callable[[Unpack[Ts]], object]:
    """Makes a callback do nothing once its process is dead."""
    process = _process.get() if context is None else context.get(_process)
    if process is None:
        return callback

    def unless_dead(*args: *Ts) -> None:
        if not process.is_dead:
            callback(*args)

    return unless_dead


def run(main: Coroutine[Any, Any, T], draw: random.Random | None = None) -> T:
    """Runs a coroutine that uses no connections and no threads of its own; what it leaves behind is dropped."""
    loop = VirtualLoop(draw)
    try:
        return loop.run_until_complete(main)
    finally:
        loop.drop()
