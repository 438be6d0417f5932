import dataclasses
import os
from pathlib import Path

import pytest

from deploy.local import run_dir
from deploy.local.state import ClusterPhase, ClusterState, StateFile, load_secret, state_dir
from deploy.processes.process import ProcessRef, record_own
from wire.errors import ConfigError
from wire.settings import to_json

GONE = ProcessRef(pid=2**22 + 1, started=1.0, boot="none")
STATE = ClusterState("one", ClusterPhase.STARTING, command=GONE, run_dir="/tmp/baton-x", token="t")


def test_a_state_comes_back_as_it_was_written() -> None:
    full = dataclasses.replace(STATE, phase=ClusterPhase.RUNNING, head=GONE, redis=GONE, address="a:1")
    file = StateFile("one")
    assert file.read() is None
    file.write(full)
    assert file.read() == full
    file.remove()
    assert file.read() is None


def test_only_its_owner_can_read_it() -> None:
    file = StateFile("one")
    file.write(STATE)
    assert file.path.stat().st_mode & 0o777 == 0o600
    assert file.path.parent.stat().st_mode & 0o777 == 0o700
    assert [path.name for path in file.path.parent.iterdir()] == ["one.json"]


def test_a_name_is_claimed_once() -> None:
    file = StateFile("one")
    assert file.claim(STATE)
    assert not file.claim(dataclasses.replace(STATE, token="other"))
    assert file.read() == STATE
    assert StateFile("two").claim(STATE)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{}",
        "[]",
        '{"version": 1}',
        '{"version": 2}',
        to_json(dataclasses.replace(STATE, version=1)),
        to_json(STATE)[:-2],
        "\xff",
    ],
)
def test_a_damaged_state_is_an_error_that_names_the_file(text: str) -> None:
    file = StateFile("one")
    file.path.write_text(text)
    with pytest.raises(ConfigError, match=r"one\.json"):
        file.read()


def test_a_cluster_lives_while_any_process_of_it_does(tmp_path: Path) -> None:
    me = ProcessRef.of(os.getpid())
    assert not STATE.is_alive
    assert dataclasses.replace(STATE, command=me).is_alive
    assert not dataclasses.replace(STATE, command=me, phase=ClusterPhase.RUNNING).is_alive
    record_own(tmp_path, "router")
    assert dataclasses.replace(STATE, phase=ClusterPhase.RUNNING, run_dir=str(tmp_path)).is_alive
    assert dataclasses.replace(STATE, phase=ClusterPhase.RUNNING, redis=me).is_alive


def test_a_secret_is_made_once_and_kept() -> None:
    content = load_secret()
    assert len(content) == 32
    assert (state_dir() / "secret").stat().st_mode & 0o777 == 0o600
    assert load_secret() == content


@pytest.mark.parametrize(("content", "mode"), [(b"short", 0o600), (bytes(32), 0o644)])
def test_a_secret_that_is_none_is_refused(content: bytes, mode: int) -> None:
    load_secret()
    path = state_dir() / "secret"
    path.write_bytes(content)
    path.chmod(mode)
    with pytest.raises(ConfigError, match="remove it"):
        load_secret()


def test_a_run_folder_is_private_short_and_removed_whole() -> None:
    folder = run_dir.create("sixteen-letters-")
    assert folder.stat().st_mode & 0o777 == 0o700
    assert len(str(folder / "r/session_2026-01-01_00-00-00_000000_1234567/sockets/plasma_store")) <= 107
    (folder / "log").write_text("line\n" * 20 + "last\n")
    assert run_dir.log_tail(folder / "log", 2) == "line\nlast"
    assert run_dir.log_tail(folder / "none") == ""
    run_dir.remove(folder)
    assert not folder.exists()
    run_dir.remove(folder)


def test_nothing_but_a_run_folder_is_removed(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no run folder"):
        run_dir.remove(tmp_path)
    assert tmp_path.exists()
