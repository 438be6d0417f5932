"""The event loops of tests."""

import asyncio

import pytest


async def test_a_loop_that_has_ended_drops_what_others_call() -> None:
    """Else an event of grpc.aio that comes behind the end of its test ends the poller of all tests."""
    loop = asyncio.new_event_loop()
    loop.close()
    loop.call_soon_threadsafe(print)
    assert type(asyncio.get_running_loop()) is type(loop)
    with pytest.raises(RuntimeError):
        loop.call_soon(print)
