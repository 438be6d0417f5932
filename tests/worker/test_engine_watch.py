import asyncio

import pytest

from worker import loop
from worker.loop import EngineWatch

TIMEOUT_S = 20.0


class Engine:
    """Counts its turns, or hangs."""

    def __init__(self) -> None:
        self.num_steps = 0
        self.hangs = False

    def turn(self) -> int:
        self.num_steps += not self.hangs
        return self.num_steps


def test_an_engine_that_turns_is_never_silent() -> None:
    engine = Engine()
    watch = EngineWatch(lambda: engine.num_steps, 5.0)
    for _ in range(100):
        engine.turn()
        watch.look()
        assert watch.silent_s == 0.0


def test_silence_grows_with_each_look_and_ends_with_a_turn() -> None:
    engine = Engine()
    watch = EngineWatch(lambda: engine.num_steps, 5.0)
    seen = []
    for _ in range(4):
        watch.look()
        seen.append(watch.silent_s)
    assert seen == [0.5, 1.0, 1.5, 2.0]
    engine.turn()
    watch.look()
    assert watch.silent_s == 0.0


async def test_waits_while_the_engine_turns_and_not_when_it_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop, "LOOK_EVERY_S", 0.01)
    engine = Engine()
    watch = EngineWatch(engine.turn, 0.05)
    waiting = asyncio.create_task(watch.wait_for_silence())
    async with asyncio.timeout(TIMEOUT_S):
        while engine.num_steps < 50:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        assert not waiting.done()
        engine.hangs = True
        await waiting
    assert watch.silent_s == pytest.approx(0.05)
