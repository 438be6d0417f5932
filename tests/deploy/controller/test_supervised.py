import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from deploy.actors.actor_host import LocalHost
from deploy.actors.liveness import MAX_GAP_S, Liveness
from deploy.controller import supervised
from deploy.controller.supervised import EventLog, KeptActor, Supervision
from wire.errors import ConfigError, Unavailable
from wire.pools import Addresses
from wire.typed_reader import to_json

ANSWER = Addresses("a:1")


class CountingHost(LocalHost):
    """A host that counts probes and starts."""

    def __init__(self) -> None:
        super().__init__()
        self.num_probes = 0
        self.num_starts = 0

    async def start(self, name: str, config_json: str, timeout_s: float) -> str:
        self.num_starts += 1
        await super().start(name, config_json, timeout_s)
        return config_json

    async def probe(self, name: str) -> Liveness:
        self.num_probes += 1
        return await super().probe(name)


class World:
    """A service that has started, its host, and a clock that tests move."""

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir
        self.now_s = 0.0
        self.host = CountingHost()
        self.events = EventLog(lambda: self.now_s)
        self._is_back = asyncio.Event()
        self.service = self.make_service()

    def make_service(self) -> KeptActor:
        means = Supervision(self.host, self.run_dir, self.events, lambda: self.now_s)
        made = KeptActor("node", "a:B", lambda: to_json(ANSWER), "head", means)
        made.prepare()
        return made

    def becomes(self, liveness: Liveness) -> None:
        self.host.actors["node"] = liveness

    @asynccontextmanager
    async def watched(self) -> AsyncIterator["World"]:
        task = asyncio.create_task(self.service.keep(self._is_back.set))
        await asyncio.sleep(0)
        yield self
        task.cancel()

    async def is_back(self) -> None:
        async with asyncio.timeout(5):
            await self._is_back.wait()

    async def probes(self, num_probes: int) -> None:
        """Returns after so many more probes of the actor."""
        wanted = self.host.num_probes + num_probes
        async with asyncio.timeout(5):
            while self.host.num_probes < wanted:  # noqa: ASYNC110
                await asyncio.sleep(0.001)

    @property
    def num_launched(self) -> int:
        return len(self.host.launched)


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    monkeypatch.setattr(supervised, "PROBE_EVERY_S", 0.001)
    monkeypatch.setattr(supervised, "backoff_s", lambda _: 0.001)
    monkeypatch.setattr(supervised, "PAUSE_S", 0.001)
    return World(tmp_path)


async def test_a_service_that_dies_is_replaced(world: World) -> None:
    async with world.watched():
        world.becomes(Liveness.DEAD)
        await world.is_back()
    assert world.num_launched == 2
    assert "the node was lost" in str(world.events.report())


async def test_a_restart_that_fails_is_tried_again_and_leaves_no_process(world: World) -> None:
    world.host.failures = [ConfigError("too little memory"), Unavailable("no answer"), Unavailable("no answer")]
    async with world.watched():
        world.becomes(Liveness.DEAD)
        await world.is_back()
    assert world.num_launched == 5
    assert world.host.actors == {"node": Liveness.ANSWERING}
    assert "did not start again: too little memory" in str(world.events.report())


async def test_a_restart_that_fails_alike_again_and_again_is_told_once(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    world.host.failures = [
        Unavailable("no node"),
        Unavailable("no node"),
        ConfigError("no port"),
        Unavailable("no node"),
    ]
    async with world.watched():
        world.becomes(Liveness.DEAD)
        await world.is_back()
    told = [f"the node {what}" for what in ("was lost", *3 * ("did not start again",), "is back")]
    reasons = ("", ": no node", ": no port", ": no node", "")
    expected = [what + reason for what, reason in zip(told, reasons, strict=True)]
    assert [event.text for event in world.events.report()] == expected
    assert [record.getMessage() for record in caplog.records] == expected


async def test_a_service_that_is_silent_for_long_is_replaced(world: World) -> None:
    async with world.watched():
        world.becomes(Liveness.SILENT)
        while world.num_launched == 1:
            world.now_s += 1
            await asyncio.sleep(0.002)
        await world.is_back()
    assert world.host.actors == {"node": Liveness.ANSWERING}
    assert world.num_launched == 2
    assert "the node was silent for 3" in str(world.events.report())


async def test_a_service_that_is_silent_for_a_while_gets_time(world: World) -> None:
    async with world.watched():
        for _ in range(3):
            world.becomes(Liveness.SILENT)
            await world.probes(2)
            for _ in range(4):
                world.now_s += MAX_GAP_S
                await world.probes(2)
            world.becomes(Liveness.ANSWERING)
            await world.probes(2)
    assert world.num_launched == 1


async def test_a_service_is_not_taken_for_dead_because_the_controller_slept(world: World) -> None:
    async with world.watched():
        world.becomes(Liveness.SILENT)
        await world.probes(2)
        world.now_s += 3600
        await world.probes(2)
    assert world.num_launched == 1


async def test_an_unforeseen_error_does_not_end_the_watch(world: World) -> None:
    world.host.failures = [ValueError("the name is taken")]
    async with world.watched():
        world.becomes(Liveness.DEAD)
        await world.is_back()
    assert world.host.actors == {"node": Liveness.ANSWERING}
    assert "the name is taken" in str(world.events.report())


async def test_one_that_is_there_already_is_taken_over(world: World) -> None:
    world.service = world.make_service()
    await world.service.take_over()
    assert world.num_launched == 1
    assert world.make_service().answer == world.service.answer == ANSWER
    assert world.host.num_starts == 1
    assert world.events.report() == ()


async def test_one_that_was_left_behind_dead_or_broken_is_replaced(world: World) -> None:
    world.host.failures = [Unavailable("died")]
    world.service = world.make_service()
    await world.service.take_over()
    assert world.service.answer == ANSWER
    assert world.num_launched == 2
    assert world.host.actors == {"node": Liveness.ANSWERING}
    assert "the node did not start again: died" in str(world.events.report())
