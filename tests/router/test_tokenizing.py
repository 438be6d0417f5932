import asyncio
import gc
import threading
import weakref
from collections.abc import AsyncIterator

import pytest

from router.requests.tokenizing import MAX_SHORT_LEN, TokenizerThreads
from tests.router.fake_cluster import WAIT_S, until

LONG = MAX_SHORT_LEN + 1


class Text:
    """A text that is not to be tokenized."""

    def tokenize(self) -> None:
        raise AssertionError("tokenized")


class Work:
    """Pieces of work that note their beginning, and last until they may end."""

    def __init__(self, threads: TokenizerThreads) -> None:
        self.threads = threads
        self.begun: list[int] = []
        self.may_end: dict[int, threading.Event] = {}

    def begin(self, length: int) -> asyncio.Task[int]:
        """Hands in the work for a prompt of that length."""
        may_end = self.may_end[length] = threading.Event()

        def work() -> int:
            self.begun.append(length)
            assert may_end.wait(WAIT_S)
            return length

        return asyncio.create_task(self.threads.run(length, work))

    async def has_begun(self, *lengths: int) -> None:
        await until(lambda: self.begun == list(lengths))


@pytest.fixture
async def work() -> AsyncIterator[Work]:
    work = Work(TokenizerThreads())
    yield work
    for may_end in work.may_end.values():
        may_end.set()
    work.threads.close()


async def test_a_long_prompt_never_keeps_a_short_one_waiting(work: Work) -> None:
    long = [work.begin(LONG + more) for more in range(3)]
    await work.has_begun(LONG)
    short = work.begin(MAX_SHORT_LEN)
    await work.has_begun(LONG, MAX_SHORT_LEN)
    work.may_end[MAX_SHORT_LEN].set()
    assert await short == MAX_SHORT_LEN
    assert not any(task.done() for task in long)


@pytest.mark.parametrize("first", [1, LONG])
async def test_the_shortest_is_next(work: Work, first: int) -> None:
    tasks = [work.begin(first + more) for more in (0, 30, 10, 20)]
    await work.has_begun(first)
    for may_end in work.may_end.values():
        may_end.set()
    assert await asyncio.gather(*tasks) == [first, first + 30, first + 10, first + 20]
    assert work.begun == [first, first + 10, first + 20, first + 30]


async def test_a_prompt_whose_request_has_ended_is_let_go_and_not_worked_on(work: Work) -> None:
    running, last = work.begin(LONG), work.begin(LONG + 2)
    await work.has_begun(LONG)

    waited_for = Text()
    gone = weakref.ref(waited_for)
    waiting = asyncio.create_task(work.threads.run(LONG + 1, waited_for.tokenize))
    await asyncio.sleep(0)
    waiting.cancel()
    await asyncio.wait([waiting])
    del waited_for, waiting
    gc.collect()
    assert gone() is None
    work.may_end[LONG].set()
    await work.has_begun(LONG, LONG + 2)
    work.may_end[LONG + 2].set()
    assert [await running, await last] == [LONG, LONG + 2]


async def test_a_thread_works_on_one_prompt_at_a_time_even_if_its_request_has_ended(work: Work) -> None:
    running, following = work.begin(LONG), work.begin(LONG + 1)
    await work.has_begun(LONG)
    running.cancel()
    await asyncio.wait([running])
    assert work.begun == [LONG]
    work.may_end[LONG].set()
    await work.has_begun(LONG, LONG + 1)
    work.may_end[LONG + 1].set()
    assert await following == LONG + 1


async def test_errors_go_to_their_request(work: Work) -> None:
    def fail() -> None:
        raise ValueError("of this one")

    with pytest.raises(ValueError, match="of this one"):
        await work.threads.run(LONG, fail)
    assert await work.threads.run(LONG, lambda: "the next") == "the next"
