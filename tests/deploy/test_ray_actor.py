import os
import subprocess
from typing import Any

import pytest
import ray

from deploy import ray_actor
from deploy.ray_actor import RayActor, Resources
from deploy.worker_host import Life


class FakeRay:
    """Makes actors whose process has the number `pid`, as far as they tell."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self.ping = self

    def options(self, **_options: Any) -> "FakeRay":
        return self

    def remote(self, *_arguments: str) -> Any:
        return self if _arguments else self._answer()

    async def _answer(self) -> int:
        return self._pid


@pytest.fixture
def gone() -> int:
    """The number of a process that there was."""
    process = subprocess.Popen(["true"])
    process.wait()
    return process.pid


def actor_of(pid: int, monkeypatch: pytest.MonkeyPatch) -> RayActor:
    monkeypatch.setattr(ray, "remote", lambda _shell: FakeRay(pid))
    monkeypatch.setattr(ray_actor, "_options", lambda _name, _resources: {})
    return RayActor.create("router", "router.actor", "RouterActor", Resources())


async def test_an_actor_that_answers_lives(monkeypatch: pytest.MonkeyPatch) -> None:
    assert await actor_of(os.getpid(), monkeypatch).look() is Life.ANSWERING


async def test_an_actor_that_dies_right_after_its_answer_is_dead(gone: int, monkeypatch: pytest.MonkeyPatch) -> None:
    assert await actor_of(gone, monkeypatch).look() is Life.DEAD
