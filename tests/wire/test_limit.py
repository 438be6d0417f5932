"""Limits and paces: what is refused at once, who waits, and what is left of a taker that was cancelled."""

import asyncio
from itertools import pairwise
from random import Random

import pytest

from wire.errors import Overloaded
from wire.limit import Limit, Pace

WAIT_S = 10.0


class Takers:
    """Tasks that take weights of a limit, and hold each until it may go."""

    def __init__(self, limit: Limit) -> None:
        self.limit = limit
        self.began: list[str] = []
        self._may_go: dict[str, asyncio.Event] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}

    async def start(self, name: str, weight: int = 1) -> None:
        self._may_go[name] = asyncio.Event()
        self._tasks[name] = asyncio.create_task(self._take(name, weight))
        await settle()

    async def end(self, name: str) -> None:
        self._may_go[name].set()
        await settle()

    async def cancel(self, name: str) -> None:
        self._tasks[name].cancel()
        await settle()

    async def outcome(self, name: str) -> BaseException | None:
        async with asyncio.timeout(WAIT_S):
            await asyncio.wait([self._tasks[name]])
        return self._tasks[name].exception()

    async def _take(self, name: str, weight: int) -> None:
        async with self.limit.taken(weight):
            self.began.append(name)
            await self._may_go[name].wait()


async def settle() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


def waiting_limit(max_units: int, max_waiting: int = 8, max_wait_s: float = WAIT_S) -> Limit:
    return Limit(max_units, "units may be used", "part.max_units", max_waiting, max_wait_s)


async def test_beyond_a_limit_a_taker_is_refused_at_once_and_told_the_setting() -> None:
    limit = Limit(2048, "requests are open", "router.max_open_requests")
    limit.take(2047)
    async with limit.taken():
        with pytest.raises(Overloaded) as refused:
            limit.take()
        with pytest.raises(Overloaded):
            async with limit.taken():
                raise AssertionError("taken beyond the limit")
    assert refused.value.message == "2,048 requests are open, the limit (router.max_open_requests)"
    assert refused.value.retry_after_s == 1.0
    assert limit.num_used == 2047
    limit.take()


async def test_a_refused_weight_takes_nothing() -> None:
    limit = Limit(10, "bytes may be read")
    limit.take(8)
    with pytest.raises(Overloaded, match=r"10 bytes may be read, the limit \(fixed\)"):
        limit.take(3)
    limit.take(2)
    limit.take(0)
    limit.release(10)
    assert limit.num_used == 0


async def test_units_are_given_back_where_a_context_fails() -> None:
    limit = Limit(1, "texts are being read")
    for _ in range(3):
        with pytest.raises(KeyError):
            async with limit.taken():
                raise KeyError
    assert limit.num_used == 0


async def test_a_weight_that_waits_is_before_later_ones_that_would_fit() -> None:
    takers = Takers(waiting_limit(3))
    await takers.start("held", 2)
    await takers.start("large", 3)
    await takers.start("small", 1)
    with pytest.raises(Overloaded):
        takers.limit.take(1)
    takers.limit.take(0)
    await takers.start("none", 0)
    assert takers.began == ["held", "none"]
    await takers.end("held")
    assert takers.began == ["held", "none", "large"]
    await takers.end("large")
    assert takers.began == ["held", "none", "large", "small"]


@pytest.mark.parametrize("cancelled", ["first", "second", "third"])
async def test_a_taker_that_is_cancelled_while_it_waits_lets_the_others_by(cancelled: str) -> None:
    takers, names = Takers(waiting_limit(1)), ["first", "second", "third"]
    await takers.start("held")
    for name in names:
        await takers.start(name)
    await takers.cancel(cancelled)
    await takers.end("held")
    for name in names:
        await takers.end(name)
    assert takers.began == ["held", *(name for name in names if name != cancelled)]
    assert takers.limit.num_used == 0
    takers.limit.take()


async def test_a_taker_that_is_cancelled_as_its_turn_comes_has_taken_nothing() -> None:
    takers = Takers(waiting_limit(1))
    takers.limit.take()
    await takers.start("cancelled")
    await takers.start("next")
    takers.limit.release()
    await takers.cancel("cancelled")
    assert takers.began == ["next"]
    await takers.end("next")
    assert takers.limit.num_used == 0


async def test_takers_that_wait_are_bounded_in_number() -> None:
    takers = Takers(waiting_limit(1, max_waiting=1))
    await takers.start("held")
    await takers.start("waiting")
    await takers.start("refused")
    refusal = await takers.outcome("refused")
    assert isinstance(refusal, Overloaded)
    assert refusal.message == "1 units may be used, the limit (part.max_units); up to 1 wait for it, 10 s each"
    await takers.end("held")
    await takers.start("later")
    await takers.end("waiting")
    assert takers.began == ["held", "waiting", "later"]


async def test_takers_that_wait_are_bounded_in_time() -> None:
    takers = Takers(waiting_limit(2, max_wait_s=0.01))
    await takers.start("held", 1)
    await takers.start("late", 2)
    assert isinstance(await takers.outcome("late"), Overloaded)
    await takers.start("small", 1)
    assert takers.began == ["held", "small"]
    assert takers.limit.num_used == 2


@pytest.mark.parametrize("seed", range(20))
async def test_any_mix_of_takers_keeps_the_bound_and_the_order(seed: int) -> None:
    draw, limit = Random(seed), waiting_limit(5, max_waiting=100)
    arrived: list[int] = []
    began: list[int] = []

    async def take(number: int, weight: int, num_turns: int) -> None:
        arrived.append(number)
        async with limit.taken(weight):
            began.append(number)
            assert limit.num_used <= 5
            for _ in range(num_turns):
                await asyncio.sleep(0)

    tasks = []
    for number in range(60):
        tasks.append(asyncio.create_task(take(number, draw.randint(1, 5), draw.randint(0, 4))))
        if draw.random() < 0.3:
            draw.choice(tasks).cancel()
        if draw.random() < 0.5:
            await asyncio.sleep(0)
    async with asyncio.timeout(WAIT_S):
        await asyncio.wait(tasks)
    assert limit.num_used == 0
    assert all(one < other for one, other in pairwise(began))
    assert not [task for task in tasks if not task.cancelled() and task.exception() is not None]
    assert {number for number, task in enumerate(tasks) if not task.cancelled()} <= set(began) <= set(arrived)


async def test_long_work_takes_turns_and_short_work_needs_none() -> None:
    pace, clock = Pace(100, 5000), asyncio.get_running_loop().time
    start_s = clock()
    await pace.wait(500)
    following = [asyncio.create_task(pace.wait(500)) for _ in range(3)]
    for _ in range(10):
        await pace.wait(100)
        await asyncio.sleep(0)
    assert not any(task.done() for task in following)
    following[0].cancel()
    await asyncio.wait(following[:2])
    assert not following[2].done()
    await following[2]
    assert clock() - start_s > 0.19
