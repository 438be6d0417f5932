"""Limits, shares of them, and paces: what is refused, and what is given back."""

import asyncio
from contextlib import ExitStack
from random import Random

import pytest

from wire.errors import Overloaded
from wire.load.limit import Limit, Pace, Share


async def test_beyond_a_limit_a_taker_is_refused_at_once_and_told_the_setting() -> None:
    limit = Limit(2048, "requests are open", "router.max_open_requests")
    limit.take(2047)
    with limit.taken():
        with pytest.raises(Overloaded) as refused:
            limit.take()
        with pytest.raises(Overloaded), limit.taken():
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


def test_beyond_the_bound_a_limit_refuses_until_all_excess_is_given_back() -> None:
    limit = Limit(2, "tokens wait")
    limit.exceed(3)
    assert (limit.num_used, limit.num_free) == (3, -1)
    limit.release(1)
    with pytest.raises(Overloaded):
        limit.take()
    limit.release(1)
    limit.take()


async def test_units_are_given_back_where_a_context_fails() -> None:
    limit = Limit(1, "texts are being read")
    for _ in range(3):
        with pytest.raises(KeyError), limit.taken():
            raise KeyError
    assert limit.num_used == 0


def test_a_share_grows_up_to_the_free_rest() -> None:
    limit = Limit(90, "bytes may be held")
    with Share(limit) as large:
        for _ in range(45):
            large.take(1)
        with pytest.raises(Overloaded, match=r"^90 bytes may be held, the limit \(fixed\)$"):
            large.take(1)
        large.take(0)
        with Share(limit) as small:
            small.take(22)
            with pytest.raises(Overloaded):
                small.take(1)
        assert limit.num_used == large.num_taken == 45
    assert limit.num_used == 0


def test_small_shares_find_room_beside_any_number_of_large_ones() -> None:
    limit = Limit(1 << 20, "bytes may be held")
    with ExitStack() as held:
        for _ in range(10):
            large = held.enter_context(Share(limit))
            while True:
                try:
                    large.take(16)
                except Overloaded:
                    break
        held.enter_context(Share(limit)).take(256)
    assert limit.num_used == 0


@pytest.mark.parametrize("seed", range(20))
def test_any_mix_of_shares_keeps_the_bound_and_is_given_back(seed: int) -> None:
    draw, limit, held = Random(seed), Limit(1000, "bytes may be held"), list[Share]()
    for _ in range(2000):
        match draw.randrange(4):
            case 0:
                held.append(Share(limit).__enter__())
            case 1 if held:
                held.pop(draw.randrange(len(held))).__exit__()
            case _ if held:
                share, weight = draw.choice(held), draw.randrange(100)
                before = limit.num_used
                try:
                    share.take(weight)
                    assert not weight or share.num_taken <= limit.num_free
                except Overloaded:
                    assert limit.num_used == before
        assert limit.num_used == sum(one.num_taken for one in held) <= 1000


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
