import json
import os
import signal
import socket
import subprocess
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from deploy.local import run_dir, shutdown
from deploy.local.state import ClusterPhase, ClusterState
from deploy.processes.process import ProcessRef


@pytest.fixture
def ray_address() -> Iterator[str]:
    """Where something listens."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield f"127.0.0.1:{listener.getsockname()[1]}"


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Commands that were run; none of them does anything."""
    commands: list[list[str]] = []

    def run(command: list[str], **_options: Any) -> subprocess.CompletedProcess[str]:
        commands.append(command)
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(subprocess, "run", run)
    return commands


def joined(address: str) -> ClusterState:
    """A cluster on a Ray cluster of somebody else, of whose actors none is known to live."""
    folder = str(run_dir.create("joined"))
    return ClusterState(
        "joined", ClusterPhase.RUNNING, ProcessRef.of(os.getpid()), folder, "token", ray_address=address
    )


def test_actors_are_ended_though_none_is_known_to_live(ray_address: str, ran: list[list[str]]) -> None:
    state = joined(ray_address)
    assert shutdown.tear_down(state) == []
    assert [command[-3:] for command in ran] == [["deploy.actors.end_actors", ray_address, "baton-joined"]]
    assert not Path(state.run_dir).exists()


def test_an_actor_that_does_not_hear_ray_is_ended_all_the_same(
    ray_address: str, ran: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutdown, "ACTOR_GRACE_S", 0.05)
    state = joined(ray_address)
    with subprocess.Popen(["sleep", "60"]) as process:
        reference = json.dumps(asdict(ProcessRef.of(process.pid)))
        Path(state.run_dir, "router.process").write_text(reference)
        assert shutdown.tear_down(state) == []
        assert process.wait(timeout=5) == -signal.SIGKILL
    assert len(ran) == 1


def test_a_ray_cluster_that_is_gone_has_no_actors(ran: list[list[str]]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        gone = f"127.0.0.1:{listener.getsockname()[1]}"
    assert shutdown.tear_down(joined(gone)) == []
    assert ran == []


def test_a_ray_cluster_that_does_not_answer_is_told(ray_address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(command: list[str], **_options: Any) -> None:
        raise subprocess.TimeoutExpired(command, 60)

    monkeypatch.setattr(subprocess, "run", run)
    state = joined(ray_address)
    assert shutdown.tear_down(state) == [f"Ray at {ray_address} did not end the actors within 60 s"]
    assert not Path(state.run_dir).exists()
