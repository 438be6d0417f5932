import asyncio
import logging

import pytest

from deploy.controller import supervised
from deploy.controller.supervised import EventLog, Tasks, persist
from wire.errors import Unavailable


async def fail() -> None:
    raise RuntimeError("no such thing")


async def test_a_failure_is_logged_and_a_wait_does_not_raise_it(caplog: pytest.LogCaptureFixture) -> None:
    begun = Tasks()
    begun.begin(fail())
    await begun.wait()
    [record] = caplog.records
    assert record.levelno == logging.ERROR
    assert record.exc_info is not None
    assert str(record.exc_info[1]) == "no such thing"


async def test_a_wait_that_is_cancelled_does_not_end_tasks() -> None:
    begun, may_end, ended = Tasks(), asyncio.Event(), asyncio.Event()

    async def work() -> None:
        await may_end.wait()
        ended.set()

    begun.begin(work())
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(begun.wait(), 0.01)
    may_end.set()
    await begun.wait()
    assert ended.is_set()
    await begun.wait()


async def test_a_step_that_fails_for_one_reason_is_one_event(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else it would push all other events out within a minute."""
    monkeypatch.setattr(supervised, "PAUSE_S", 0)
    failures = [Unavailable("away")] * 60 + [Unavailable("elsewhere")] * 60

    async def step() -> None:
        if failures:
            raise failures.pop()

    events = EventLog(lambda: 0.0)
    await persist("the step", step, events)
    assert [event.text for event in events.report()] == [
        "the step failed, and goes on: elsewhere",
        "the step failed, and goes on: away",
    ]


async def test_cancelled_ones_end_without_a_word(caplog: pytest.LogCaptureFixture) -> None:
    begun = Tasks()
    begun.begin(asyncio.sleep(60))
    begun.cancel()
    await begun.wait()
    assert caplog.records == []
