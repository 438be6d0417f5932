import json
import os
import signal
import subprocess
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import ray
from ray.exceptions import RayActorError

from deploy.actors import ray_actor
from deploy.actors.liveness import Liveness
from deploy.actors.ray_actor import RayActor
from deploy.processes.process import ProcessRef


class FakeHandle:
    """Ray's, of an actor that answers, or has died."""

    def __init__(self, failure: Exception | None = None) -> None:
        self._failure = failure
        self.ping = self

    def remote(self) -> Any:
        return self._answer()

    async def _answer(self) -> str:
        if self._failure is not None:
            raise self._failure
        return ""


@pytest.fixture
def stopped() -> Iterator[subprocess.Popen[bytes]]:
    """A process that hears no signal but one."""
    with subprocess.Popen(["sleep", "60"]) as process:
        process.send_signal(signal.SIGSTOP)
        yield process
        process.kill()


async def test_an_actor_that_answers_lives(tmp_path: Path) -> None:
    assert await RayActor("router", FakeHandle(), tmp_path).probe() is Liveness.ANSWERING


async def test_an_actor_that_ray_knows_to_have_died_is_dead(tmp_path: Path) -> None:
    assert await RayActor("router", FakeHandle(RayActorError()), tmp_path).probe() is Liveness.DEAD


async def test_the_end_of_an_actor_is_that_of_its_process(
    stopped: subprocess.Popen[bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray, "kill", lambda _handle: None)
    monkeypatch.setattr(ray_actor, "END_TIMEOUT_S", 0.05)
    (tmp_path / "router.process").write_text(json.dumps(asdict(ProcessRef.of(stopped.pid))))
    (tmp_path / "node.process").write_text(json.dumps(asdict(ProcessRef.of(os.getpid()))))
    await RayActor("router", FakeHandle(RayActorError()), tmp_path).end()
    assert stopped.wait(timeout=5) == -signal.SIGKILL
