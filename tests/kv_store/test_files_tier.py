"""What a folder, its file system and its other users can do to us."""

import errno
import os
import shutil
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kv_store.frame import FRONT_BYTES
from kv_store.tiers.files_tier import MIN_BLOCKS, FilesTier
from kv_store.tiers.folder import Folder
from tests.harness.fake_clock import FakeClock
from tests.kv_store.names import LAYOUT, MAC_KEY, got_one, names_of, put_one
from wire.block_names import BlockName
from wire.errors import ConfigError
from wire.ids import BlockKey

AMPLE_S = 10.0
FRAME_BYTES = FRONT_BYTES + LAYOUT.payload_bytes
[NAME] = names_of(4)
Open = Callable[..., FilesTier]


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[Open]:
    tiers: list[FilesTier] = []

    def open_one(
        num_blocks: int = 1000, timeout_s: float = AMPLE_S, clock: Callable[[], float] = time.monotonic
    ) -> FilesTier:
        tiers.append(FilesTier(str(tmp_path / "kv"), LAYOUT, MAC_KEY, timeout_s, num_blocks * FRAME_BYTES, clock))
        return tiers[-1]

    yield open_one
    for tier in tiers:
        tier.close()


def path_of(folder: Path, name: BlockName) -> Path:
    return folder / "kv" / name.key.hex()[:2] / name.key.hex()


def files_in(folder: Path) -> list[Path]:
    return [path for path in (folder / "kv").rglob("*") if path.is_file()]


def test_what_was_written_outlives_the_tier(opened: Open, tmp_path: Path) -> None:
    names = names_of(4 * 50)
    first = FilesTier(str(tmp_path / "kv"), LAYOUT, MAC_KEY, AMPLE_S, 1 << 30)
    assert all(put_one(first, name) for name in names)
    first.close()
    second = opened()
    assert second.exists([name.key for name in names]) == [True] * 50
    assert all(got_one(second, name) for name in names)
    assert second.status().hits == 50
    assert {path.stat().st_size for path in files_in(tmp_path)} == {FRAME_BYTES}
    assert {path.stat().st_mode & 0o777 for path in files_in(tmp_path)} == {0o600}


def plant_link(path: Path) -> None:
    target = path.parent.parent.parent / "outside"
    target.write_bytes(path.read_bytes() if path.exists() else b"")
    path.unlink()
    path.symlink_to(target)


def plant_socket(path: Path) -> None:
    path.unlink()
    here = os.getcwd()
    os.chdir(path.parent)  # the path of a socket is short
    try:
        with socket.socket(socket.AF_UNIX) as planted:
            planted.bind(path.name)
    finally:
        os.chdir(here)


def plant_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def plant_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def plant_endless_file(path: Path) -> None:
    os.truncate(path, 1 << 42)


@pytest.mark.parametrize("plant", [plant_link, plant_socket, plant_folder, plant_pipe, plant_endless_file])
def test_what_is_no_file_of_ours_is_a_counted_miss_and_gone(
    opened: Open, tmp_path: Path, plant: Callable[[Path], None]
) -> None:
    tier = opened()
    assert put_one(tier, NAME)
    plant(path_of(tmp_path, NAME))
    assert not got_one(tier, NAME)
    assert (tier.status().corrupt, tier.status().errors, tier.status().state) == (1, 0, "up")
    assert not os.path.lexists(path_of(tmp_path, NAME))
    assert put_one(tier, NAME)
    assert got_one(tier, NAME)
    if plant is plant_link:
        assert (tmp_path / "outside").stat().st_size == FRAME_BYTES, "what a link points to is left alone"


def test_no_link_in_the_place_of_a_folder_is_followed(opened: Open, tmp_path: Path) -> None:
    tier = opened()
    assert put_one(tier, NAME)
    shard = path_of(tmp_path, NAME).parent
    shard.rename(tmp_path / "elsewhere")
    shard.symlink_to(tmp_path / "elsewhere")
    assert not got_one(tier, NAME)
    tier.delete([NAME.key])
    assert not put_one(tier, NAME)
    assert (tier.status().state, tier.status().errors) == ("up", 1), "it keeps nothing else from being read"
    assert [path.name for path in (tmp_path / "elsewhere").iterdir()] == [NAME.key.hex()]


def test_a_folder_that_becomes_a_link_amid_making_room_keeps_its_files(tmp_path: Path) -> None:
    folder = Folder(str(tmp_path / "kv"), time.monotonic)
    folder.write(NAME.key, b"frame")
    [listed] = folder.files()
    shard = path_of(tmp_path, NAME).parent
    shard.rename(tmp_path / "elsewhere")
    shard.symlink_to(tmp_path / "elsewhere")
    folder.remove_file(listed)
    assert [path.name for path in (tmp_path / "elsewhere").iterdir()] == [NAME.key.hex()]
    folder.close()


def test_files_of_other_programs_are_not_counted(tmp_path: Path) -> None:
    folder = Folder(str(tmp_path / "kv"), time.monotonic)
    folder.write(NAME.key, b"frame")
    path_of(tmp_path, NAME).with_name("a_file_of_another_program").touch()
    (tmp_path / "kv" / "00").touch()
    assert [file.num_bytes for file in folder.files()] == [5]
    folder.close()


def test_a_full_file_system_is_no_hindrance_to_a_start(opened: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    assert put_one(opened(), NAME)

    def refuse(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("kv_store.tiers.folder._written_aside", refuse)
    tier = opened()
    assert got_one(tier, NAME)
    assert not put_one(tier, NAME)


def test_a_folder_that_was_emptied_is_filled_again(opened: Open, tmp_path: Path) -> None:
    tier = opened()
    assert put_one(tier, NAME)
    path_of(tmp_path, NAME).unlink()
    path_of(tmp_path, NAME).parent.rmdir()
    assert not got_one(tier, NAME)
    assert put_one(tier, NAME)
    assert got_one(tier, NAME)
    assert tier.status().errors == 0


def remove(folder: Path) -> None:
    shutil.rmtree(folder)


def remove_and_make_again(folder: Path) -> None:
    shutil.rmtree(folder)
    folder.mkdir()


def move_away(folder: Path) -> None:
    folder.rename(folder.with_name("elsewhere"))


def replace_by_a_link(folder: Path) -> None:
    move_away(folder)
    folder.with_name("other").mkdir()
    folder.symlink_to(folder.with_name("other"))


@pytest.mark.parametrize("first", ["a read", "a write"])
@pytest.mark.parametrize("change", [remove, remove_and_make_again, move_away, replace_by_a_link])
def test_a_folder_that_is_gone_or_another_is_noticed_counted_and_opened_again(
    opened: Open, tmp_path: Path, change: Callable[[Path], None], first: str, caplog: pytest.LogCaptureFixture
) -> None:
    tier = opened()
    assert put_one(tier, NAME)
    change(tmp_path / "kv")
    assert not (got_one(tier, NAME) if first == "a read" else put_one(tier, NAME))
    assert (tier.status().state, tier.status().errors) == ("up", 1)
    assert [record.message for record in caplog.records] == [
        f"tier files: {tmp_path}/kv is gone, or another folder by now; it is opened again"
    ]
    assert not got_one(tier, NAME)
    assert all(put_one(tier, name) and got_one(tier, name) for name in names_of(4 * 9))
    assert path_of(tmp_path, NAME).stat().st_size == FRAME_BYTES
    assert (tier.status().state, tier.status().errors) == ("up", 1)


def test_a_folder_that_is_gone_while_room_is_made_is_opened_again(opened: Open, tmp_path: Path) -> None:
    tier = opened(num_blocks=40)
    names = names_of(4 * 120)
    for number, name in enumerate(names):
        if number % 40 == 7:
            remove(tmp_path / "kv")
        put_one(tier, name)
    assert (tier.status().state, tier.status().errors) == ("up", 3)
    assert got_one(tier, names[-1])
    assert sum(path.stat().st_size for path in files_in(tmp_path)) <= 40 * FRAME_BYTES


def test_a_folder_that_cannot_be_made_again_is_broken_until_it_can(opened: Open, tmp_path: Path) -> None:
    clock = FakeClock()
    tier = opened(clock=clock)
    assert put_one(tier, NAME)
    move_away(tmp_path / "kv")
    (tmp_path / "kv").touch()
    assert not any(put_one(tier, NAME) for _ in range(9))
    assert (tier.status().state, tier.status().errors) == ("broken", 3)
    (tmp_path / "kv").unlink()
    clock.now += 2.0
    assert put_one(tier, NAME)
    assert got_one(tier, NAME)
    assert tier.status().state == "up"


def test_a_full_folder_keeps_what_was_used_last(opened: Open, tmp_path: Path) -> None:
    tier = opened(num_blocks=40)
    used, names = names_of(4 * 5, first=5000), names_of(4 * 200)
    assert all(put_one(tier, name) for name in used)
    for start in range(0, 200, 10):
        assert all(put_one(tier, name) for name in names[start : start + 10])
        assert all(got_one(tier, name) for name in used)
        assert sum(path.stat().st_size for path in files_in(tmp_path)) <= 40 * FRAME_BYTES
    assert tier.exists([name.key for name in names[-10:]]) == [True] * 10
    assert not any(tier.exists([name.key for name in names[:150]]))
    assert not (tmp_path / "kv" / ".lock").exists()


def test_files_that_were_never_finished_are_not_found_and_make_room(opened: Open, tmp_path: Path) -> None:
    tier = opened(num_blocks=40)
    assert put_one(tier, NAME)
    unfinished = path_of(tmp_path, NAME).with_name(".0123")
    path_of(tmp_path, NAME).rename(unfinished)
    os.utime(unfinished, (1, 1))
    assert not got_one(tier, NAME)
    assert all(put_one(tier, name) for name in names_of(4 * 60))
    assert not unfinished.exists()


def test_one_node_at_a_time_makes_room_and_a_dead_one_is_waited_for_a_minute(opened: Open, tmp_path: Path) -> None:
    clock = FakeClock()
    tier = opened(num_blocks=40, clock=clock)
    names = names_of(4 * 45)
    (tmp_path / "kv" / ".lock").touch()
    stored = [put_one(tier, name) for name in names]
    assert sum(stored) == 40
    assert tier.status().state == "up"
    for _ in range(3):  # the other node is alive
        clock.now += 59.0
        os.utime(tmp_path / "kv" / ".lock", (clock.now, clock.now))
        assert not put_one(tier, names[-1])
    clock.now += 61.0
    assert put_one(tier, names[-1])
    assert not (tmp_path / "kv" / ".lock").exists()


def test_two_nodes_fill_one_folder(opened: Open, tmp_path: Path) -> None:
    tiers = [opened(num_blocks=100), opened(num_blocks=100)]
    names = names_of(4 * 600)

    def fill(number: int) -> None:
        for name in names[number::2]:
            put_one(tiers[number], name)

    threads = [threading.Thread(target=fill, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60.0)
    assert sum(path.stat().st_size for path in files_in(tmp_path)) <= 105 * FRAME_BYTES
    assert sum(got_one(tiers[0], name) for name in names) >= 80
    assert [tier.status().errors for tier in tiers] == [0, 0]


def test_a_lock_that_another_node_gives_up_meanwhile_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, other = (Folder(str(tmp_path), time.monotonic) for _ in range(2))
    assert other.lock.take()
    look = os.stat

    def unlock_and_look(*arguments: Any, **options: Any) -> os.stat_result:
        other.lock.release()
        return look(*arguments, **options)

    monkeypatch.setattr(os, "stat", unlock_and_look)
    assert folder.lock.take()


class Faults:
    """Takes the place of `Folder.read` and `Folder.write`: raises an error, or hangs until it may go on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.error = 0
        self.may_go = threading.Event()
        self.may_go.set()
        self.num_calls = 0
        for name in ("read", "write"):
            monkeypatch.setattr(Folder, name, self._faulty(getattr(Folder, name)))

    def _faulty(self, method: Callable[..., object]) -> Callable[..., object]:
        def call(*arguments: object) -> object:
            self.num_calls += 1
            assert self.may_go.wait(60.0)
            if self.error:
                raise OSError(self.error, os.strerror(self.error))
            return method(*arguments)

        return call


@pytest.fixture
def faults(monkeypatch: pytest.MonkeyPatch) -> Iterator[Faults]:
    faults = Faults(monkeypatch)
    yield faults
    faults.may_go.set()


@pytest.mark.parametrize(
    ("error", "state"), [(errno.ENOSPC, "full"), (errno.EDQUOT, "full"), (errno.EROFS, "read-only")]
)
def test_a_folder_that_takes_nothing_is_read_on(opened: Open, faults: Faults, error: int, state: str) -> None:
    clock = FakeClock()
    tier = opened(clock=clock)
    assert put_one(tier, NAME)
    faults.error = error
    assert not any(put_one(tier, name) for name in names_of(4 * 9))
    faults.error = 0
    assert got_one(tier, NAME)
    status = tier.status()
    assert (status.state, status.refused, status.written, status.errors) == (state, 3, 1, 0)
    clock.now += 2.0
    assert put_one(tier, NAME)
    assert tier.status().state == "up"


def test_errors_are_misses_until_a_probe_succeeds(opened: Open, faults: Faults) -> None:
    clock = FakeClock()
    tier = opened(clock=clock)
    assert put_one(tier, NAME)
    faults.error = errno.EIO
    assert not any(got_one(tier, NAME) for _ in range(9))
    status = tier.status()
    assert (status.state, status.errors, status.misses, status.corrupt) == ("broken", 3, 9, 0)
    faults.error = 0
    assert not got_one(tier, NAME)
    clock.now += 2.0
    assert got_one(tier, NAME)
    assert tier.status().state == "up"


def test_a_mount_that_hangs_costs_one_timeout_and_harms_no_memory(opened: Open, faults: Faults) -> None:
    tier = opened(timeout_s=0.3)
    names = names_of(4 * 3)
    assert all(put_one(tier, name) for name in names)
    faults.may_go.clear()
    into = [memoryview(bytearray(LAYOUT.payload_bytes)) for _ in names]
    started = time.monotonic()
    assert list(tier.get(names, into)) == []
    num_calls = faults.num_calls
    for _ in range(100):
        assert not got_one(tier, NAME)
        assert tier.exists([NAME.key]) == [False]
        assert not put_one(tier, NAME)
    assert time.monotonic() - started < AMPLE_S
    assert (tier.status().state, tier.status().errors) == ("broken", 1)
    assert faults.num_calls == num_calls, "while a call hangs, no other is made"
    faults.may_go.set()
    deadline = time.monotonic() + AMPLE_S
    while tier.status().state != "up":
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert not any(map(any, into)), "what came too late went nowhere"
    assert all(got_one(tier, name) for name in names)


@pytest.mark.parametrize(
    ("path", "reason"), [("file", "Not a directory"), ("missing/kv", "No such file"), ("link", "No such file")]
)
def test_a_folder_that_takes_no_files_is_told_at_the_start(tmp_path: Path, path: str, reason: str) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to("/proc/self/task")
    with pytest.raises(ConfigError, match=rf"files\.folder: .*/{path} takes no files \({reason}"):
        FilesTier(str(tmp_path / path), LAYOUT, MAC_KEY, AMPLE_S, 1 << 30)


def test_a_mount_that_is_read_only_by_now_is_no_hindrance_to_a_start(
    opened: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert put_one(opened(), NAME)

    def refuse(*_: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr("kv_store.tiers.folder._written_aside", refuse)
    tier = opened()
    assert got_one(tier, NAME)
    assert not any(put_one(tier, NAME) for _ in range(3))
    assert tier.status().state == "read-only"


def test_a_mount_that_hangs_at_the_start_is_a_miss_until_it_answers(
    opened: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert put_one(opened(), NAME)
    may_go, opens = threading.Event(), Folder.__init__

    def hang(*arguments: object) -> None:
        assert may_go.wait(60.0)
        opens(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(Folder, "__init__", hang)
    monkeypatch.setattr("kv_store.tiers.files_tier._OPEN_TIMEOUT_S", 0.1)
    tier = opened()
    assert (tier.exists([NAME.key]), got_one(tier, NAME), put_one(tier, NAME)) == ([False], False, False)
    assert tier.status().state == "broken"
    may_go.set()
    deadline = time.monotonic() + AMPLE_S
    while not got_one(tier, NAME):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_mount_that_is_out_of_reach_at_the_start_is_opened_later(
    opened: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, opens = FakeClock(), Folder.__init__

    def fail(*_: object) -> None:
        raise OSError(errno.ESTALE, "Stale file handle")

    monkeypatch.setattr(Folder, "__init__", fail)
    tier = opened(clock=clock)
    assert not any(put_one(tier, NAME) for _ in range(3))
    assert tier.status().state == "broken"
    monkeypatch.setattr(Folder, "__init__", opens)
    clock.now += 2.0
    assert put_one(tier, NAME)
    assert got_one(tier, NAME)


def test_room_for_too_few_blocks_is_told_at_the_start(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"files\.max_bytes"):
        FilesTier(str(tmp_path / "kv"), LAYOUT, MAC_KEY, AMPLE_S, MIN_BLOCKS * FRAME_BYTES - 1)
    assert not (tmp_path / "kv").exists()


def test_files_that_make_room_or_are_not_there_are_lost(opened: Open, tmp_path: Path) -> None:
    tier = opened(num_blocks=40)
    names = names_of(4 * 100)
    assert all(put_one(tier, name) for name in names)
    lost = tier.take_lost()
    there = tier.exists([name.key for name in names])
    assert {*lost} == {name.key for name, is_there in zip(names, there, strict=True) if not is_there}
    assert len(lost) > 50
    assert {*tier.take_lost()} == {*lost}, "a lookup found them missing"
    assert tier.take_lost() == []


def test_files_of_a_folder_at_fault_are_not_lost(opened: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(folder: Folder, key: BlockKey) -> bool:
        raise OSError(errno.EIO, "a fault")

    tier = opened()
    assert put_one(tier, NAME)
    monkeypatch.setattr(Folder, "has", fail)
    assert tier.exists([NAME.key]) == [False]
    assert tier.take_lost() == []
