import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from deploy.actors.liveness import MAX_GAP_S, Liveness
from deploy.actors.ray_actor import RayActor
from deploy.controller import singleton, tasks
from deploy.controller.event_log import EventLog
from deploy.controller.singleton import Singleton
from wire.errors import ConfigError, Unavailable


class FakeActor:
    """Answers from its making to its end, whether its object has started or not."""

    def __init__(self, failure: Exception | None) -> None:
        self.liveness = Liveness.ANSWERING
        self.num_probes = 0
        self._failure = failure
        self.num_starts = 0

    async def start(self, config_json: str, _timeout_s: float) -> str:
        self.num_starts += 1
        if self._failure is not None:
            raise self._failure
        return config_json

    async def probe(self) -> Liveness:
        self.num_probes += 1
        return self.liveness

    async def end(self) -> None:
        self.liveness = Liveness.DEAD


class World:
    """A service that has started, the actors that were made for it, and how the next starts fail."""

    def __init__(self, run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.run_dir = run_dir
        self.now_s = 0.0
        self.actors: list[FakeActor] = []
        self.failures: list[Exception] = []
        self.left_behind: FakeActor | None = None
        self.events = EventLog(lambda: self.now_s)
        self._is_back = asyncio.Event()
        monkeypatch.setattr(RayActor, "create", self._make)
        monkeypatch.setattr(RayActor, "find", lambda _name, _run_dir: self.left_behind)
        self.service = self.make_service()

    def make_service(self) -> Singleton:
        return Singleton("node", "a:B", "{}", self.run_dir, self.events, lambda: self.now_s)

    @asynccontextmanager
    async def watched(self) -> AsyncIterator["World"]:
        task = asyncio.create_task(self.service.watch(self._is_back.set))
        await asyncio.sleep(0)
        yield self
        task.cancel()

    async def is_back(self) -> None:
        async with asyncio.timeout(5):
            await self._is_back.wait()

    async def probes(self, num_probes: int) -> None:
        """Returns after so many more probes of the actor."""
        wanted = self.actors[-1].num_probes + num_probes
        async with asyncio.timeout(5):
            while self.actors[-1].num_probes < wanted:  # noqa: ASYNC110
                await asyncio.sleep(0.001)

    @property
    def current(self) -> object:
        return self.service.actor

    @property
    def living(self) -> list[FakeActor]:
        return [actor for actor in self.actors if actor.liveness is not Liveness.DEAD]

    def _make(self, *_what: Any) -> FakeActor:
        self.actors.append(FakeActor(self.failures.pop(0) if self.failures else None))
        return self.actors[-1]


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    monkeypatch.setattr(singleton, "PROBE_EVERY_S", 0.001)
    monkeypatch.setattr(singleton, "FIRST_PAUSE_S", 0.001)
    monkeypatch.setattr(tasks, "PAUSE_S", 0.001)
    return World(tmp_path, monkeypatch)


async def test_a_service_that_dies_is_replaced(world: World) -> None:
    async with world.watched():
        world.actors[0].liveness = Liveness.DEAD
        await world.is_back()
    assert len(world.actors) == 2
    assert "the node was lost" in world.events.encode()


async def test_a_restart_that_fails_is_tried_again_and_leaves_no_process(world: World) -> None:
    world.failures = [ConfigError("too little memory"), Unavailable("no answer"), Unavailable("no answer")]
    async with world.watched():
        world.actors[0].liveness = Liveness.DEAD
        await world.is_back()
    assert len(world.actors) == 5
    assert world.living == [world.actors[-1]] == [world.current]
    assert "did not start again: too little memory" in world.events.encode()


async def test_a_service_that_is_silent_for_long_is_replaced(world: World) -> None:
    async with world.watched():
        world.actors[0].liveness = Liveness.SILENT
        while len(world.actors) == 1:
            world.now_s += 1
            await asyncio.sleep(0.002)
        await world.is_back()
    assert world.living == [world.current] == [world.actors[1]]
    assert "the node was silent for 3" in world.events.encode()


async def test_a_service_that_is_silent_for_a_while_gets_time(world: World) -> None:
    async with world.watched():
        for _ in range(3):
            world.actors[0].liveness = Liveness.SILENT
            await world.probes(2)
            for _ in range(4):
                world.now_s += MAX_GAP_S
                await world.probes(2)
            world.actors[0].liveness = Liveness.ANSWERING
            await world.probes(2)
    assert len(world.actors) == 1


async def test_a_service_is_not_taken_for_dead_because_the_controller_slept(world: World) -> None:
    async with world.watched():
        world.actors[0].liveness = Liveness.SILENT
        await world.probes(2)
        world.now_s += 3600
        await world.probes(2)
    assert len(world.actors) == 1


async def test_what_nobody_thought_of_does_not_end_the_watch(world: World) -> None:
    world.failures = [ValueError("the name is taken")]
    async with world.watched():
        world.actors[0].liveness = Liveness.DEAD
        await world.is_back()
    assert world.current is world.actors[-1]
    assert "the name is taken" in world.events.encode()


async def test_one_that_is_there_already_is_taken_over(world: World) -> None:
    world.left_behind = world.actors[0]
    world.service = world.make_service()
    assert world.service.answer is None
    assert await world.service.take_over() == "{}"
    assert world.actors == [world.current]
    assert world.make_service().answer == "{}"
    assert world.actors[0].num_starts == 1
    assert world.events.encode() == "[]"


async def test_one_that_was_left_behind_dead_or_broken_is_replaced(world: World) -> None:
    world.left_behind = FakeActor(Unavailable("died"))
    world.service = world.make_service()
    assert await world.service.take_over() == "{}"
    assert world.left_behind.liveness is Liveness.DEAD
    assert world.current is world.actors[-1]
    assert "the node did not start again: died" in world.events.encode()
