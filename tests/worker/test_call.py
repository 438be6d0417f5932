import asyncio

import pytest

from wire.errors import RequestExists, Unavailable
from wire.ids import RequestId
from worker.call import Call, Calls
from worker.update import ChoiceTokens, Update

ID = RequestId("r")


def update(position: int) -> Update:
    return Update((ChoiceTokens(0, position, (position,)),))


async def test_updates_that_nobody_took_become_one() -> None:
    call = Call(ID, 1)
    for position in range(3):
        call.send(update(position))
    assert await call.take() == Update((ChoiceTokens(0, 0, (0, 1, 2)),))


async def test_waits_for_news() -> None:
    call = Call(ID, 1)
    taking = asyncio.create_task(call.take())
    await asyncio.sleep(0)
    assert not taking.done()
    call.send(update(0))
    assert await taking == update(0)


async def test_what_was_sent_comes_before_the_end() -> None:
    call = Call(ID, 1)
    call.send(update(0))
    call.close(None)
    call.send(update(1))
    assert await call.take() == update(0)
    assert await call.take() is None
    assert await call.take() is None


async def test_the_first_end_counts() -> None:
    call = Call(ID, 1)
    call.send(update(0))
    call.close(Unavailable("gone"))
    call.close(None)
    assert await call.take() == update(0)
    with pytest.raises(Unavailable):
        await call.take()


async def test_a_later_attempt_displaces_an_earlier_one() -> None:
    calls, first, second = Calls(), Call(ID, 1), Call(ID, 2)
    assert calls.open(first) is None
    assert calls.open(second) is first
    for attempt in (1, 2):
        with pytest.raises(RequestExists):
            calls.open(Call(ID, attempt))
    calls.remove(first)
    assert list(calls) == [second]


async def test_waits_until_no_call_is_open() -> None:
    calls, call = Calls(), Call(ID, 1)
    await calls.wait_until_none()
    calls.open(call)
    waiting = asyncio.create_task(calls.wait_until_none())
    await asyncio.sleep(0)
    assert not waiting.done()
    calls.remove(call)
    await waiting
