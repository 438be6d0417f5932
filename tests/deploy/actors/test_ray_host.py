import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import ray
from ray.exceptions import RayActorError

from deploy.actors import ray_host
from deploy.actors.liveness import Liveness
from deploy.actors.ray_host import RayHost
from deploy.processes.process import ProcessRef
from wire.errors import Unavailable


class FakeHandle:
    """Ray's, of an actor that answers, or has died."""

    def __init__(self, failure: Exception | None = None) -> None:
        self.failure = failure
        self.ping = self

    def remote(self) -> Any:
        return self._answer()

    async def _answer(self) -> str:
        if self.failure is not None:
            raise self.failure
        return ""


@pytest.fixture
def handle(monkeypatch: pytest.MonkeyPatch) -> FakeHandle:
    """The handle of the only actor that Ray knows, `router`."""
    handle = FakeHandle()

    def get_actor(name: str) -> FakeHandle:
        if name != "router":
            raise ValueError(name)
        return handle

    monkeypatch.setattr(ray, "get_actor", get_actor)
    return handle


@pytest.fixture
def host(handle: FakeHandle, tmp_path: Path) -> RayHost:
    """A host that has taken over the router."""
    host = RayHost(tmp_path)
    assert host.adopt("router")
    return host


@pytest.fixture
def stopped() -> Iterator[subprocess.Popen[bytes]]:
    """A process that hears no signal but one."""
    with subprocess.Popen(["sleep", "60"]) as process:
        process.send_signal(signal.SIGSTOP)
        yield process
        process.kill()


async def test_an_actor_that_answers_lives(host: RayHost) -> None:
    assert await host.probe("router") is Liveness.ANSWERING


async def test_an_actor_that_ray_knows_to_have_died_is_dead(host: RayHost, handle: FakeHandle) -> None:
    handle.failure = RayActorError()
    assert await host.probe("router") is Liveness.DEAD


async def test_an_actor_that_never_was_is_dead(host: RayHost) -> None:
    assert not host.adopt("node")
    assert await host.probe("node") is Liveness.DEAD
    with pytest.raises(Unavailable):
        await host.call("node", "stop", timeout_s=1)
    await host.end("node")


async def test_the_end_of_an_actor_is_that_of_its_process(
    stopped: subprocess.Popen[bytes],
    host: RayHost,
    handle: FakeHandle,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ray, "kill", lambda _handle: None)
    monkeypatch.setattr(ray_host, "STOP_S", 0.05)
    (tmp_path / "router.process").write_text(json.dumps(asdict(ProcessRef.of(stopped.pid))))
    (tmp_path / "node.process").write_text(json.dumps(asdict(ProcessRef.of(os.getpid()))))
    handle.failure = RayActorError()
    await host.end("router")
    assert stopped.wait(timeout=5) == -signal.SIGKILL


GROWS = """
import mmap, sys
print(flush=True)
sys.stdin.readline()
shared, own = mmap.mmap(-1, 32 << 20), mmap.mmap(-1, 64 << 20, flags=mmap.MAP_PRIVATE)
for memory in (shared, own):
    memory.write(b"x" * len(memory))
print(flush=True)
sys.stdin.readline()
"""
"""Takes 32 MiB of shared memory and 64 MiB of its own once it reads a line, and ends at the next one."""


def test_the_memory_of_an_actor_is_its_own_alone(host: RayHost, tmp_path: Path) -> None:
    assert host.memory_bytes("router") == 0
    with subprocess.Popen([sys.executable, "-c", GROWS], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        told = asdict(ProcessRef.of(process.pid))
        (tmp_path / "router.process").write_text(json.dumps(told))
        process.stdout.readline()
        before = host.memory_bytes("router")
        process.stdin.write(b"\n")
        process.stdin.flush()
        process.stdout.readline()
        assert 60 << 20 < host.memory_bytes("router") - before < 68 << 20
        (tmp_path / "router.process").write_text(json.dumps({**told, "started": 1.0}))
        assert host.memory_bytes("router") == 0, "another process has the number now"


async def test_an_actor_whose_end_is_broken_off_is_ended_by_the_next_call(
    host: RayHost, handle: FakeHandle, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_end = threading.Event()
    killed: list[object] = []

    def kill(actor: object) -> None:
        assert may_end.wait(5)
        killed.append(actor)

    monkeypatch.setattr(ray, "kill", kill)
    handle.failure = TimeoutError()  # it is silent
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.01):
            await host.end("router")
    assert await host.probe("router") is Liveness.SILENT
    may_end.set()
    await host.end("router")
    assert killed[-1] is handle
    assert await host.probe("router") is Liveness.DEAD
