import dataclasses
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from deploy.local import run_dir
from deploy.local.state import ClusterPhase, ClusterState, StateFile, load_secret, state_dir
from deploy.processes.process import ProcessRef, record_own
from wire.errors import ConfigError, Unavailable
from wire.pools import Addresses
from wire.typed_reader import to_json

GONE = ProcessRef(pid=2**22 + 1, started=1.0, boot="none")
STATE = ClusterState(
    name="one", phase=ClusterPhase.STARTING, command=GONE, run_dir="/tmp/baton-one-00000000", token="t"
)


def test_a_state_comes_back_as_it_was_written() -> None:
    full = dataclasses.replace(STATE, phase=ClusterPhase.RUNNING, head=GONE, redis=GONE, addresses=Addresses("a:1"))
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


def changed(**values: Any) -> bytes:
    return json.dumps(json.loads(to_json(STATE)) | values).encode()


def process(pid: int) -> dict[str, Any]:
    return dataclasses.asdict(GONE) | {"pid": pid}


DAMAGE: dict[str, bytes] = {
    "nothing": b"",
    "null": b"null",
    "a number": b"5",
    "a list": b"[]",
    "no fields": b"{}",
    "a part": to_json(STATE).encode()[:-2],
    "not UTF-8": b"\xff\xfe\x00",
    "a long number": b'{"version": ' + b"9" * 5000 + b"}",
    "deep": b"[" * 3000 + b"]" * 3000,
    "deep in a field": to_json(STATE).encode()[:-1] + b', "head": ' + b"[" * 900 + b"]" * 900 + b"}",
    "another version": changed(version=1),
    "another cluster's": changed(name="two"),
    "an unknown field": changed(arena_path="/etc/passwd"),
    "the folder of another cluster": changed(run_dir="/tmp/baton-two-00000000"),
    "the folder of a longer name": changed(run_dir="/tmp/baton-one-two-00000000"),
    "no folder of a cluster": changed(run_dir="/home"),
    "a way out of the folder": changed(run_dir="/tmp/baton-one-00000000/../../home"),
    **{f"process {pid}": changed(head=process(pid)) for pid in (-1, 0, 1, 2**31, 2**70)},
    "a process that is none": changed(redis="x"),
}


@pytest.mark.parametrize("content", DAMAGE.values(), ids=DAMAGE)
def test_a_damaged_state_is_told_in_one_line_and_set_aside(content: bytes) -> None:
    file = StateFile("one")
    file.path.write_bytes(content)
    with pytest.raises(
        ConfigError, match=r"one\.json is not the state.*: `baton down --name one` sets it aside"
    ) as told:
        file.read()
    assert "\n" not in told.value.message
    assert file.set_aside() is not None
    assert file.path.with_name("one.json.broken").read_bytes() == content
    assert file.read() is None


@pytest.mark.parametrize("make", [os.mkdir, os.mkfifo], ids=["a folder", "a pipe"])
def test_a_state_that_is_no_file_is_set_aside_too(make: Callable[[Path], None]) -> None:
    file = StateFile("one")
    make(file.path)
    with pytest.raises(ConfigError, match=r"one\.json is not the state"):
        file.read()
    assert file.set_aside() is not None
    assert file.read() is None


def test_a_state_that_is_whole_stays_where_it_is() -> None:
    file = StateFile("one")
    assert file.set_aside() is None
    file.write(STATE)
    assert file.set_aside() is None
    assert file.read() == STATE


def test_one_command_at_a_time_has_the_name() -> None:
    with StateFile("one").lock(0):
        with pytest.raises(Unavailable, match="of one is at work"), StateFile("one").lock(0.05):
            pass
        with StateFile("two").lock(0):
            pass
    with StateFile("one").lock(0):
        pass


@pytest.mark.parametrize("home", ["/dev/null", "/dev/full", "/proc/none"])
def test_a_folder_of_states_that_cannot_be_made_is_told(home: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", home)
    with pytest.raises(ConfigError, match=f"^{home}/baton cannot be read or written .*XDG_STATE_HOME"):
        StateFile("one")


@pytest.mark.parametrize("in_its_place", [Path.touch, lambda path: path.symlink_to("/dev/null")])
def test_a_file_in_place_of_the_folder_of_states_is_told(in_its_place: Callable[[Path], None]) -> None:
    in_its_place(Path(os.environ["XDG_STATE_HOME"]) / "baton")
    with pytest.raises(ConfigError, match="baton cannot be read or written"):
        StateFile("one")


def test_a_disk_that_takes_no_state_is_told_and_leaves_the_state(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    file = StateFile("one")
    file.write(STATE)
    monkeypatch.setattr("tempfile.mkstemp", refuse)
    with pytest.raises(ConfigError, match=r"one\.json cannot be read or written \(No space left on device\)"):
        file.write(dataclasses.replace(STATE, token="other"))
    assert file.read() == STATE


def test_a_cluster_lives_while_any_process_of_it_does(tmp_path: Path) -> None:
    me = ProcessRef.of(os.getpid())
    assert not STATE.is_alive
    assert not dataclasses.replace(STATE, command=me).is_alive
    record_own(tmp_path, "router")
    assert dataclasses.replace(STATE, phase=ClusterPhase.RUNNING, run_dir=str(tmp_path)).is_alive
    assert dataclasses.replace(STATE, phase=ClusterPhase.RUNNING, redis=me).is_alive


def test_a_secret_is_made_once_and_kept() -> None:
    content = load_secret()
    assert len(content) == 32
    assert (state_dir() / "secret").stat().st_mode & 0o777 == 0o600
    assert load_secret() == content


@pytest.mark.parametrize("make", [os.mkdir, os.mkfifo, lambda path: path.symlink_to("/none")])
def test_a_secret_that_is_no_file_is_told(make: Callable[[Path], None]) -> None:
    make(state_dir() / "secret")
    with pytest.raises(ConfigError, match=r"secret cannot be read or written \("):
        load_secret()


@pytest.mark.parametrize(("content", "mode"), [(b"short", 0o600), (bytes(33), 0o600), (bytes(32), 0o644)])
def test_a_secret_that_is_none_is_refused(content: bytes, mode: int) -> None:
    load_secret()
    path = state_dir() / "secret"
    path.write_bytes(content)
    path.chmod(mode)
    with pytest.raises(ConfigError, match="remove it"):
        load_secret()


def test_a_secret_that_is_given_is_used_and_never_made(tmp_path: Path) -> None:
    given = tmp_path / "shared"
    with pytest.raises(ConfigError, match=r"shared must hold 32 bytes|shared cannot be read .*head -c 32"):
        load_secret(str(given))
    assert not given.exists()
    given.write_bytes(b"s" * 32)
    given.chmod(0o644)
    with pytest.raises(ConfigError, match="only you can read: make one with"):
        load_secret(str(given))
    given.chmod(0o400)
    assert load_secret(str(given)) == b"s" * 32 != load_secret()


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


def test_links_in_the_places_of_a_cluster_are_left(tmp_path: Path) -> None:
    folder = run_dir.create("link")
    folder.rmdir()
    (tmp_path / "precious").touch()
    links = {folder: tmp_path, Path(f"/dev/shm/{folder.name}.n1"): tmp_path / "precious"}
    for link, target in links.items():
        link.symlink_to(target)
    try:
        assert run_dir.remove(folder) == list(links)
        assert (tmp_path / "precious").exists()
    finally:
        for link in links:
            link.unlink()


def test_a_full_disk_takes_no_run_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(**_: object) -> str:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("tempfile.mkdtemp", refuse)
    with pytest.raises(ConfigError, match=r"^/tmp takes no folder of a cluster .No space left on device."):
        run_dir.create("full")
    monkeypatch.setattr(run_dir, "MIN_FREE_BYTES", 1 << 60)
    with pytest.raises(ConfigError, match=r"^only .* of /tmp are free: make room"):
        run_dir.create("full")


def test_nothing_but_a_run_folder_is_removed(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no run folder"):
        run_dir.remove(tmp_path)
    assert tmp_path.exists()
