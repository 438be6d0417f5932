"""The supervisor of Ray's head, in a process of its own, over commands that stand for the head."""

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from deploy.local.head_supervisor import HEAD
from deploy.processes.process import ProcessRef, end_session, recorded, wait_until
from wire.typed_reader import to_json

LONG = ("sleep", "1000")
SECONDS = 30.0
PROGRAM = """
import sys
from pathlib import Path
from deploy.local.head_supervisor import HeadSupervisor
from deploy.processes.logs import start_logging
from wire.errors import ConfigError
start_logging("head-supervisor")
try:
    HeadSupervisor(Path(sys.argv[1]), sys.argv[2], sys.argv[3:]).run()
except ConfigError as error:
    sys.exit(error.message)
"""
Supervise = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "head"


@pytest.fixture
def supervise(folder: Path) -> Iterator[Supervise]:
    """Starts supervisors, which end with the test, as do their heads."""
    started: list[subprocess.Popen[str]] = []

    def start(*command: str, port: int = 1) -> "subprocess.Popen[str]":
        whole = [sys.executable, "-c", PROGRAM, str(folder), str(port), *command]
        started.append(subprocess.Popen(whole, stderr=subprocess.PIPE, text=True))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.communicate()
    if (head := recorded(folder, HEAD)) is not None:
        end_session(head, 0)


def living_head(folder: Path, but: ProcessRef | None = None) -> ProcessRef:
    """Waits for a head that lives, another one than `but`."""
    found: list[ProcessRef] = []

    def is_there() -> bool:
        head = recorded(folder, HEAD)
        found[:] = [head] if head is not None and head != but and head.is_alive else []
        return bool(found)

    assert wait_until(is_there, SECONDS)
    return found[0]


def told(process: "subprocess.Popen[str]") -> str:
    """Reads the next message of a supervisor's log."""
    assert process.stderr is not None
    message: str = json.loads(process.stderr.readline())["message"]
    return message


def test_a_head_that_is_killed_is_started_again_with_the_same_tables(folder: Path, supervise: Supervise) -> None:
    supervise("sh", "-c", "mkdir -p $RAY_gcs_storage_path; echo $$ >>$RAY_gcs_storage_path/heads; exec sleep 1000")
    first = living_head(folder)
    assert wait_until((folder / "tables" / "heads").exists, SECONDS)
    psutil.Process(first.pid).kill()
    second = living_head(folder, but=first)
    assert wait_until(lambda: len((folder / "tables" / "heads").read_text().split()) == 2, SECONDS)
    assert second.pid != first.pid
    assert folder.stat().st_mode & 0o077 == 0, "the tables hold code"


def test_remains_of_a_head_are_ended_before_the_next_one_starts(folder: Path, supervise: Supervise) -> None:
    supervise("sh", "-c", "sleep 1000 & sleep 1000")
    first = living_head(folder)
    assert wait_until(lambda: len(first.session()) > 1, SECONDS)
    psutil.Process(first.pid).kill()
    living_head(folder, but=first)
    assert first.session() == []


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_the_head_and_removes_its_tables(
    folder: Path, supervise: Supervise, number: signal.Signals
) -> None:
    supervisor = supervise("sh", "-c", "mkdir -p $RAY_gcs_storage_path; exec sleep 1000")
    head = living_head(folder)
    assert wait_until((folder / "tables").exists, SECONDS)
    supervisor.send_signal(number)
    assert supervisor.wait(SECONDS) == 0
    assert head.session() == []
    assert not (folder / "tables").exists()


def test_a_signal_during_the_back_off_ends_the_supervisor(folder: Path, supervise: Supervise) -> None:
    supervisor = supervise("false")
    while "starts again in 4 s" not in told(supervisor):
        pass
    supervisor.terminate()
    assert supervisor.wait(SECONDS) == 0


def test_a_head_that_dies_at_once_is_started_after_longer_and_longer_pauses_with_the_reason(
    folder: Path, supervise: Supervise
) -> None:
    supervisor = supervise("sh", "-c", "echo no room on the disk; exit 3")
    lines = [told(supervisor) for _ in range(4)][1::2]
    assert ["starts again in 1 s" in lines[0], "starts again in 2 s" in lines[1]] == [True, True]
    assert all(line.endswith("no room on the disk") for line in lines)


def test_a_second_supervisor_is_refused(folder: Path, supervise: Supervise) -> None:
    supervise(*LONG)
    head = living_head(folder)
    second = supervise(*LONG)
    assert "another supervisor keeps the head at port 1" in second.communicate(timeout=SECONDS)[1]
    assert second.returncode == 1
    assert recorded(folder, HEAD) == head
    assert head.is_alive


def test_a_head_that_has_outlived_its_supervisor_goes_on_under_the_next(folder: Path, supervise: Supervise) -> None:
    first = supervise(*LONG)
    head = living_head(folder)
    first.kill()
    first.wait(SECONDS)
    second = supervise(*LONG)
    assert f"process {head.pid}, lives" in told(second)
    assert recorded(folder, HEAD) == head
    psutil.Process(head.pid).kill()
    living_head(folder, but=head)


def test_another_process_with_the_pid_of_an_earlier_head_is_none_and_stays(folder: Path, supervise: Supervise) -> None:
    with subprocess.Popen(LONG, start_new_session=True) as other:
        folder.mkdir(mode=0o700)
        own = ProcessRef.of(other.pid)
        stale = ProcessRef(own.pid, own.started - 1000, own.boot)
        (folder / "head.process").write_text(to_json(stale))
        supervise(*LONG)
        assert living_head(folder, but=stale).pid != other.pid
        assert other.poll() is None
        other.kill()


def test_a_port_at_which_another_process_listens_is_refused(folder: Path, supervise: Supervise) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        supervisor = supervise(*LONG, port=listener.getsockname()[1])
        assert "a process that is not supervised listens on port" in supervisor.communicate(timeout=SECONDS)[1]
    assert recorded(folder, HEAD) is None


@pytest.mark.parametrize("options", [("--port", "{}"), ("--num-cpus=2", "--port={}")])
def test_the_script_supervises(tmp_path: Path, options: tuple[str, ...]) -> None:
    """A port that is in use is named in one line, with exit status 78."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        env = {**os.environ, "XDG_STATE_HOME": str(tmp_path), "RAY_AUTH_TOKEN": "0" * 64}
        command = ["bash", "deploy/head.sh", "--supervise", *(one.format(port) for one in options)]
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 78
    assert f"listens on port {port}" in done.stderr
