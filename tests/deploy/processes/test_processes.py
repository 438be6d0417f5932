import dataclasses
import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from deploy.processes.process import ProcessRef, end_session, spawn_leader, wait_for_end, wait_or_kill

STUBBORN = """
import signal, subprocess, sys
signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], process_group=0)
print(child.pid, flush=True)
child.wait()
"""
SLEEPER = "import time; print(0, flush=True); time.sleep(60)"


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "log"


@pytest.fixture
def sleeper(log: Path) -> Iterator[ProcessRef]:
    leader = _spawn(SLEEPER, log)
    yield leader
    end_session(leader, grace_s=5)


def _spawn(program: str, log: Path) -> ProcessRef:
    leader = spawn_leader([sys.executable, "-c", program], log)
    deadline = time.monotonic() + 20
    while not log.read_text().endswith("\n"):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return leader


def test_a_leader_outlives_nothing_it_should_not(sleeper: ProcessRef) -> None:
    assert os.getsid(sleeper.pid) == sleeper.pid
    assert (sleeper.is_alive, sleeper.session()) == (True, [sleeper.pid])
    end_session(sleeper, grace_s=5)
    assert (sleeper.is_alive, sleeper.session()) == (False, [])


def test_what_ignores_sigterm_is_killed_with_its_children(log: Path) -> None:
    leader = _spawn(STUBBORN, log)
    child = int(log.read_text())
    assert sorted(leader.session()) == sorted([leader.pid, child])
    end_session(leader, grace_s=0.1)
    assert wait_for_end(child, 1)
    assert not leader.is_alive


def test_a_leader_has_no_open_file_of_its_callers(log: Path, tmp_path: Path) -> None:
    """A shell's lock on a file would be held for as long as the leader lives."""
    with (tmp_path / "lock").open("w") as lock:
        os.set_inheritable(lock.fileno(), True)
        leader = _spawn(SLEEPER, log)
        opened = {os.readlink(path) for path in Path(f"/proc/{leader.pid}/fd").iterdir()}
        end_session(leader, grace_s=5)
    assert opened == {os.devnull, str(log)}


def test_children_of_a_leader_that_is_gone_are_found(log: Path) -> None:
    leader = _spawn(STUBBORN, log)
    child = int(log.read_text())
    os.kill(leader.pid, signal.SIGKILL)
    os.waitpid(leader.pid, 0)
    assert leader.session() == [child]
    end_session(leader, grace_s=5)
    assert wait_for_end(child, 1)


@pytest.mark.parametrize("change", [{"started": 1.0}, {"boot": "another"}])
def test_another_process_of_that_number_is_left_alone(sleeper: ProcessRef, change: dict[str, Any]) -> None:
    stranger = dataclasses.replace(sleeper, **change)
    assert not stranger.is_alive
    end_session(stranger, grace_s=0)
    assert wait_or_kill(stranger, 0.05)
    assert sleeper.is_alive


def test_what_ends_by_itself_is_waited_for(log: Path) -> None:
    leader = _spawn(SLEEPER, log)
    os.kill(leader.pid, signal.SIGTERM)
    assert wait_or_kill(leader, 5)
    assert os.waitpid(leader.pid, 0)[1] == signal.SIGTERM


def test_what_is_stopped_is_killed(log: Path) -> None:
    leader = _spawn(SLEEPER, log)
    os.kill(leader.pid, signal.SIGSTOP)
    assert wait_or_kill(leader, 1)
    assert os.waitpid(leader.pid, 0)[1] == signal.SIGKILL


def test_waiting_for_the_end_is_bounded(sleeper: ProcessRef) -> None:
    assert not wait_for_end(sleeper.pid, 0.05)
