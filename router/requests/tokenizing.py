"""Threads on which prompts are tokenized: the shortest first, and long ones never in the way of short ones."""

import asyncio
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

T = TypeVar("T")
MAX_SHORT_LEN = 32 << 10
"""Characters or tokens of a short prompt: some 15 ms of work, where a text of 4 MiB takes seconds."""
LONG_NICENESS = 10
"""As the engine's thread: tokenizing megabytes takes no time from the event loop."""


class TokenizerThreads:
    """A thread for short prompts and one for long ones. Belongs to the running event loop."""

    def __init__(self) -> None:
        self._short = TokenizerThread(0)
        self._long = TokenizerThread(LONG_NICENESS)

    async def run(self, length: int, work: Callable[[], T]) -> T:
        """Runs the work for a prompt of that length when it is its turn; a cancelled wait takes it out."""
        thread = self._short if length <= MAX_SHORT_LEN else self._long
        result: T = await thread.run(length, work)
        return result

    def close(self) -> None:
        """Lets the work under way end by itself."""
        self._short.close()
        self._long.close()


@dataclass(frozen=True, eq=False)
class _Turn:
    length: int
    work: Callable[[], Any]
    result: asyncio.Future[Any]


class TokenizerThread:
    """A thread that works on one prompt at a time; of all prompts that wait, the shortest is next."""

    def __init__(self, niceness: int) -> None:
        self._thread = ThreadPoolExecutor(1, "tokenize", os.nice, (niceness,))
        self._loop = asyncio.get_running_loop()
        self._waiting: list[_Turn] = []
        self._is_busy = False

    async def run(self, length: int, work: Callable[[], Any]) -> Any:
        turn = _Turn(length, work, self._loop.create_future())
        self._waiting.append(turn)
        self._begin_next()
        try:
            return await turn.result
        finally:
            if turn in self._waiting:  # cancelled: its text is to be let go at once
                self._waiting.remove(turn)

    def close(self) -> None:
        self._waiting.clear()
        self._thread.shutdown(wait=False)

    def _begin_next(self) -> None:
        if self._waiting and not self._is_busy:
            turn = min(self._waiting, key=lambda one: one.length)
            self._waiting.remove(turn)
            self._is_busy = True
            self._loop.run_in_executor(self._thread, turn.work).add_done_callback(partial(self._ended, turn.result))

    def _ended(self, result: asyncio.Future[Any], done: asyncio.Future[Any]) -> None:
        self._is_busy = False
        error = done.exception()
        if not result.done():
            result.set_result(done.result()) if error is None else result.set_exception(error)
        self._begin_next()
