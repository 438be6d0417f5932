"""What a host does with its actors, which stand in for Ray's here."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from deploy.actors.ray_actor import RayActor, Resources
from deploy.actors.ray_worker_host import RayWorkerHost
from deploy.actors.worker_host import Life
from wire.ids import WorkerId
from wire.pools import Role

A = WorkerId("decode-0")


class SlowActor:
    """Takes until `may_end` to end."""

    def __init__(self) -> None:
        self.may_end = asyncio.Event()
        self.life = Life.ANSWERING

    async def look(self) -> Life:
        return self.life

    async def end(self) -> None:
        await self.may_end.wait()
        self.life = Life.DEAD


async def test_a_worker_whose_end_is_broken_off_is_ended_by_the_next_call(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    actor = SlowActor()

    def create(*_: Any) -> SlowActor:
        return actor

    monkeypatch.setattr(RayActor, "create", create)
    config: Any = None
    host = RayWorkerHost(config, Resources(), tmp_path, asyncio.Event())
    starting = asyncio.create_task(host.start(A, Role.DECODE))
    await asyncio.sleep(0)
    starting.cancel()
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(host.end(A), 0.01)
    assert await host.look(A) is Life.ANSWERING
    actor.may_end.set()
    await host.end(A)
    assert actor.life is Life.DEAD
    assert await host.look(A) is Life.DEAD
