import os
import shutil
import socket
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from deploy.local.state import ClusterPhase, ClusterState
from deploy.processes.process import ProcessRef
from wire.pools import Addresses

NAME = f"left{os.getpid()}"


@pytest.fixture
def leave() -> Iterator[list[Path]]:
    """Files to be removed at the end."""
    paths: list[Path] = []
    yield paths
    for path in paths:
        path.unlink()


def nothing_left(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = ["bash", "deploy/nothing_left.sh", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)


def test_nothing_is_left_of_a_cluster_that_never_was() -> None:
    assert nothing_left(NAME).returncode == 0


@pytest.mark.parametrize(("suffix", "is_ours"), [("-abcd_123", True), ("", True), ("-b-abcd_123", False), ("7", False)])
def test_files_of_a_cluster_and_not_of_one_with_a_longer_name(suffix: str, is_ours: bool, leave: list[Path]) -> None:
    leave.append(Path(f"/dev/shm/baton-{NAME}{suffix}"))
    leave[0].touch()
    assert nothing_left(NAME).returncode == int(is_ours)


@pytest.mark.parametrize(("suffix", "is_ours"), [("-abcd_123/r", True), ("-b-abcd_123/r", False)])
def test_processes_of_a_cluster_and_not_of_one_with_a_longer_name(suffix: str, is_ours: bool) -> None:
    command = ["bash", "-c", "read -r", f"/tmp/baton-{NAME}{suffix}"]
    with subprocess.Popen(command, stdin=subprocess.PIPE) as process:
        assert nothing_left(NAME).returncode == int(is_ours)
        process.communicate(b"\n", timeout=10)


def test_a_port_on_which_something_listens_is_left() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = str(listener.getsockname()[1])
        assert f"listener on port {port}" in nothing_left(NAME, port).stderr
    assert nothing_left(NAME, port).returncode == 0


def test_ports_of_a_cluster() -> None:
    me = ProcessRef(2, 1.0, "none")
    state = ClusterState(
        name="a",
        phase=ClusterPhase.RUNNING,
        command=me,
        run_dir="/tmp/baton-a",
        token="t",
        model="m",
        ray_address="h:5",
        addresses=Addresses("h:1", operator="h:2"),
    )
    assert state.ports == [1, 2]
    assert replace(state, addresses=Addresses("h:1", "", "h:2", "h:3", "h:4"), head=me).ports == [1, 2, 3, 4, 5]


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A source tree with no more than what an environment is made from."""
    (tmp_path / "deploy").mkdir()
    shutil.copy("deploy/environment.sh", tmp_path / "deploy")
    shutil.copy("pyproject.toml", tmp_path)
    return tmp_path


def write_program(path: Path, lines: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/bash\n{lines}\n")
    path.chmod(0o755)


def source_environment(checkout: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    command = ["bash", "-ec", '. deploy/environment.sh; echo "it goes on"']
    env = {**os.environ, "BATON_VENV": str(checkout / "venv"), **variables}
    return subprocess.run(command, cwd=checkout, env=env, capture_output=True, text=True, timeout=30, check=False)


def test_an_environment_needs_a_python_that_will_do(checkout: Path) -> None:
    write_program(checkout / "old-python", "exit 1")
    done = source_environment(checkout, PYTHON=str(checkout / "old-python"))
    assert done.returncode != 0
    assert "older than Python 3.11" in done.stderr
    assert done.stdout == ""


def test_nothing_follows_an_installation_that_fails(checkout: Path) -> None:
    write_program(checkout / "venv" / "bin" / "python", f'echo "$*" >>{checkout}/asked; exit 1')
    done = source_environment(checkout)
    assert done.returncode != 0
    assert "could not be installed" in done.stderr
    assert done.stdout == ""
    assert [
        line for line in (checkout / "asked").read_text().splitlines() if " install " in line and "-e" in line
    ] == []
    assert list((checkout / "venv").glob(".baton-*")) == []


def join(*arguments: str, home: Path) -> subprocess.CompletedProcess[str]:
    env = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")} | {"HOME": str(home)}
    command = ["bash", "deploy/join.sh", *arguments]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=30, check=False)


@pytest.mark.parametrize(
    "arguments",
    [(), ("10.0.0.1",), ("10.0.0.1:6379",), ("10.0.0.1:6379", "--role"), ("10.0.0.1:6379", "--role", "router"),
     ("10.0.0.1:6379", "--role", "decode", "--workers", "0")],
)  # fmt: skip
def test_a_node_that_joins_names_a_head_and_a_role(arguments: tuple[str, ...], tmp_path: Path) -> None:
    done = join(*arguments, home=tmp_path)
    assert done.returncode == 2
    assert done.stderr.startswith("deploy/join.sh HEAD:PORT --role prefill|decode")


def test_a_node_without_the_token_joins_no_cluster(tmp_path: Path) -> None:
    done = join("10.0.0.1:6379", "--role", "decode", home=tmp_path)
    assert done.returncode == 78
    assert f"no token: copy {tmp_path}/.ray/auth_token from the head" in done.stderr
