"""What a host does with its actors, which stand in for Ray's here."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from deploy.actors.liveness import Liveness
from deploy.actors.ray_actor import RayActor, Resources
from deploy.actors.ray_worker_host import RayWorkerHost
from wire.ids import WorkerId
from wire.pools import Role, Worker

A = WorkerId("decode-0")


class SlowActor:
    """Takes until `may_end` to end."""

    def __init__(self) -> None:
        self.may_end = asyncio.Event()
        self.liveness = Liveness.ANSWERING

    async def probe(self) -> Liveness:
        return self.liveness

    async def end(self) -> None:
        await self.may_end.wait()
        self.liveness = Liveness.DEAD


async def test_a_worker_whose_end_is_broken_off_is_ended_by_the_next_call(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    actor = SlowActor()

    def create(*_: Any) -> SlowActor:
        return actor

    monkeypatch.setattr(RayActor, "create", create)
    template: Any = None
    host = RayWorkerHost(template, Resources(), tmp_path, asyncio.Event())
    starting = asyncio.create_task(host.start(Worker(A, Role.DECODE)))
    await asyncio.sleep(0)
    starting.cancel()
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(host.end(A), 0.01)
    assert await host.probe(A) is Liveness.ANSWERING
    actor.may_end.set()
    await host.end(A)
    assert actor.liveness is Liveness.DEAD
    assert await host.probe(A) is Liveness.DEAD
