import asyncio

import pytest

from router.requests.outbox import Outbox
from wire.errors import DeadlineExceeded
from wire.pb import inference_pb2 as pb


def event(name: str) -> pb.GenerateResponse:
    return pb.GenerateResponse(request_id=name)


async def read(outbox: Outbox) -> list[str]:
    return [response.request_id async for response in outbox]


async def test_events_come_in_order_and_end_with_the_last() -> None:
    outbox = Outbox(10)
    reading = asyncio.create_task(read(outbox))
    for name in "ab":
        assert outbox.put(event(name))
        await asyncio.sleep(0)
    outbox.complete(event("c"))
    assert await reading == ["a", "b", "c"]


async def test_an_error_comes_after_what_is_there() -> None:
    outbox = Outbox(10)
    outbox.put(event("a"))
    outbox.fail(DeadlineExceeded("too late"))
    assert (await anext(outbox)).request_id == "a"
    for _ in range(2):
        with pytest.raises(DeadlineExceeded):
            await anext(outbox)


async def test_it_is_bounded_but_for_the_last_message() -> None:
    outbox = Outbox(2)
    assert [outbox.put(event(name)) for name in "abc"] == [True, True, False]
    outbox.complete(event("d"))
    assert await read(outbox) == ["a", "b", "d"]


async def test_it_tells_since_when_the_reader_has_been_away() -> None:
    outbox = Outbox(2)

    def is_away() -> bool:
        return outbox.writing_since is not None

    assert not is_away()
    outbox.put(event("a"))
    await anext(outbox)
    assert is_away()
    waiting = asyncio.create_task(read(outbox))
    await asyncio.sleep(0)
    assert not is_away()
    outbox.complete(event("b"))
    await waiting
    assert is_away()
