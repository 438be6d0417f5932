import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from deploy.local import run_dir, shutdown
from deploy.local.state import ClusterPhase, ClusterState, StateFile
from deploy.processes.process import ProcessRef
from wire.errors import Unavailable
from wire.typed_reader import to_json

SUCCESSOR = """
import os, signal, sys
mine, place = sys.argv[1:]
signal.signal(signal.SIGTERM, lambda *_: (os.replace(mine, place), sys.exit()))
print(flush=True)
while True:
    signal.pause()
"""
"""A `baton up` that makes way for another one as it ends."""


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
        name="joined",
        phase=ClusterPhase.RUNNING,
        command=ProcessRef.of(os.getpid()),
        run_dir=folder,
        token="token",
        ray_address=address,
    )


def test_actors_are_ended_though_none_is_known_to_live(ray_address: str, ran: list[list[str]]) -> None:
    state = joined(ray_address)
    assert shutdown.tear_down(state) == []
    assert [command[-3:] for command in ran] == [["deploy.actors.end_actors", ray_address, Path(state.run_dir).name]], (
        "those of its own run folder, and of no other cluster of the name"
    )
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


def test_a_later_cluster_of_the_name_is_left_alone(tmp_path: Path) -> None:
    file = StateFile("race")
    later = ClusterState(
        name="race",
        phase=ClusterPhase.STARTING,
        command=ProcessRef.of(os.getpid()),
        run_dir=str(run_dir.create("race")),
        token="later",
    )
    (tmp_path / "later").write_text(to_json(later))
    command = [sys.executable, "-c", SUCCESSOR, str(tmp_path / "later"), str(file.path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        file.write(replace(later, command=ProcessRef.of(process.pid), token="earlier"))
        earlier = file.read()
        assert earlier is not None
        assert shutdown.shut_down(file, earlier) == []
    assert file.read() == later
    assert Path(later.run_dir).exists()
    run_dir.remove(Path(later.run_dir))


def test_nothing_is_touched_while_another_command_has_the_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutdown, "COMMAND_GRACE_S", 0.05)
    file = StateFile("race")
    state = ClusterState(
        name="race",
        phase=ClusterPhase.RUNNING,
        command=ProcessRef.of(os.getpid()),
        run_dir=str(run_dir.create("race")),
        token="t",
    )
    file.write(state)
    with StateFile("race").lock(0), pytest.raises(Unavailable, match="is at work"):
        shutdown.shut_down(file, state)
    assert Path(state.run_dir).exists()
    assert shutdown.shut_down(file, state) == []
    assert file.read() is None
    assert not Path(state.run_dir).exists()


def test_processes_of_strangers_and_other_arenas_outlive_a_cluster() -> None:
    folder, other = run_dir.create("one"), run_dir.create("one")
    arenas = {(each, node): Path(f"/dev/shm/{each.name}.{node}") for each in (folder, other) for node in ("n1", "n2")}
    for arena in arenas.values():
        arena.touch()
    Path(f"{folder}.n1").mkdir()
    with subprocess.Popen(["sleep", "60"], start_new_session=True) as process:
        stranger = replace(ProcessRef.of(process.pid), started=1.0)
        state = ClusterState(
            name="one",
            phase=ClusterPhase.RUNNING,
            command=stranger,
            run_dir=str(folder),
            token="t",
            head=stranger,
            redis=stranger,
        )
        assert shutdown.tear_down(state) == []
        assert process.poll() is None
        process.kill()
    assert (folder.exists(), Path(f"{folder}.n1").exists(), other.exists()) == (False, False, True)
    assert [each for each, arena in arenas.items() if arena.exists()] == [(other, "n1"), (other, "n2")]
    assert run_dir.remove(other) == []
