import asyncio
import logging

import pytest

from deploy.controller.tasks import Tasks


async def fail() -> None:
    raise RuntimeError("no such thing")


async def test_a_failure_is_logged_and_a_wait_does_not_raise_it(caplog: pytest.LogCaptureFixture) -> None:
    tasks = Tasks()
    tasks.begin(fail())
    await tasks.wait()
    [record] = caplog.records
    assert record.levelno == logging.ERROR
    assert record.exc_info is not None
    assert str(record.exc_info[1]) == "no such thing"


async def test_a_wait_that_is_cancelled_does_not_end_tasks() -> None:
    tasks, may_end, ended = Tasks(), asyncio.Event(), asyncio.Event()

    async def work() -> None:
        await may_end.wait()
        ended.set()

    tasks.begin(work())
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(tasks.wait(), 0.01)
    may_end.set()
    await tasks.wait()
    assert ended.is_set()
    await tasks.wait()


async def test_cancelled_ones_end_without_a_word(caplog: pytest.LogCaptureFixture) -> None:
    tasks = Tasks()
    tasks.begin(asyncio.sleep(60))
    tasks.cancel()
    await tasks.wait()
    assert caplog.records == []
