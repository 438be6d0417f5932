"""Processes on an event loop of virtual time, many in one thread; each of them may die at any point.

A callback or task belongs to the process in whose context it was made; once the process is dead, none of them runs any
more.
"""

import asyncio
import random
from collections.abc import Callable, Collection, Coroutine, Generator
from concurrent.futures import Executor
from contextvars import Context, ContextVar, copy_context
from typing import Any, TypeVar, TypeVarTuple, Unpack

from cli.bench.plan import virtual_time
from cli.bench.plan.virtual_time import TimelessLoop

T = TypeVar("T")
Ts = TypeVarTuple("Ts")
MAX_THREAD_S = 0.002
_process: ContextVar["Process | None"] = ContextVar("process", default=None)


class Died(BaseException):
    """The end of the running process: no handler of its own may take it for an error."""


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


class VirtualLoop(TimelessLoop):
    """A loop of virtual time for many processes. `draw` makes the time that work for threads takes."""

    def __init__(self, draw: random.Random | None = None) -> None:
        super().__init__()
        self._draw = draw or random.Random(0)
        self._free_at: dict[Executor | None, float] = {}
        self._owners: dict[asyncio.Task[Any], Process | None] = {}

    @property
    def unfinished(self) -> Collection[asyncio.Task[Any]]:
        return self._owners.keys()

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

    def run_in_executor(
        self, executor: Executor | None, func: Callable[[Unpack[Ts]], T], *args: *Ts
    ) -> asyncio.Future[T]:
        """Runs work a little later, one after another for an executor, which is not used otherwise."""
        future = self.create_future()
        when = max(self._now_s, self._free_at.get(executor, 0.0)) + self._draw.random() * MAX_THREAD_S
        self._free_at[executor] = when
        self.call_at(when, self.work, future, func, args)
        return future

    def kill(self, process: Process) -> None:
        """Ends a process: none of its callbacks and tasks goes on."""
        process.is_dead = True
        if not process.death.done():
            process.death.set_result(None)

    def tasks_of(self, process: Process | None) -> list[str]:
        """Names the coroutines of a process's tasks; for None, of the tasks that belong to no process."""
        tasks = [task for task, owner in self._owners.items() if owner is process]
        return sorted(getattr(task.get_coro(), "__qualname__", "") for task in tasks)

    def call_soon(
        self, callback: Callable[[Unpack[Ts]], object], *args: *Ts, context: Context | None = None
    ) -> asyncio.Handle:
        return super().call_soon(_unless_dead(callback, context), *args, context=context)

    def call_at(
        self, when: float, callback: Callable[[Unpack[Ts]], object], *args: *Ts, context: Context | None = None
    ) -> asyncio.TimerHandle:
        return super().call_at(when, _unless_dead(callback, context), *args, context=context)


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
    return virtual_time.run(main, VirtualLoop(draw))
