import mmap
import os
import random
import resource
import stat
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from kernels import accelerator
from kv_store.node import arena as arena_module
from kv_store.node.arena import Arena
from kv_store.node.directory import Directory
from tests.harness.fake_clock import FakeClock
from tests.kv_store.names import LAYOUT, committed, names_of, payload_of
from wire.block_names import BlockName
from wire.errors import ConfigError, StoreError
from wire.ids import SlotId

BLOCK = LAYOUT.block_bytes


@pytest.fixture
def path() -> Iterator[str]:
    path = f"/dev/shm/baton-test-{os.getpid()}"
    yield path
    Path(path).unlink(missing_ok=True)


def test_each_process_that_maps_it_sees_the_writes_of_others(path: str) -> None:
    arena = Arena.create(path, BLOCK, 3)
    other = Arena.open(path)
    assert (other.block_bytes, other.num_slots) == (BLOCK, 3)
    arena.slot(SlotId(1))[:] = b"\x07" * BLOCK
    assert other.slot(SlotId(1)) == b"\x07" * BLOCK
    assert not any(other.slot(SlotId(0)))
    assert not any(other.slot(SlotId(2)))
    other.slot(SlotId(2))[-1] = 9
    assert arena.slot(SlotId(2))[-1] == 9
    for one in (arena, other):
        one.close()


def test_it_is_for_its_user_only_and_gone_when_unlinked(path: str) -> None:
    arena = Arena.create(path, BLOCK, 1)
    assert stat.S_IMODE(os.stat(path).st_mode) == 0o600
    arena.unlink()
    arena.unlink()
    assert not os.path.exists(path)
    arena.slot(SlotId(0))[0] = 1
    arena.close()


def test_what_is_discarded_takes_no_memory_though_others_map_it(path: str) -> None:
    arena = Arena.create(path, BLOCK, 200)
    other = Arena.open(path)
    arena.slot(SlotId(7))[:] = b"\x07" * BLOCK
    with open(path, "rb") as file:
        Arena.discard(path)
        assert os.fstat(file.fileno()).st_blocks == 0
    assert not any(other.slot(SlotId(7)))
    later = Arena.create(path, BLOCK, 200)
    other.slot(SlotId(7))[:] = b"\x08" * BLOCK
    assert not any(later.slot(SlotId(7)))
    for one in (arena, other, later):
        one.close()


@pytest.mark.parametrize("content", [None, b"", b"none"])
def test_what_is_no_arena_is_discarded_too(path: str, content: bytes | None) -> None:
    if content is not None:
        Path(path).write_bytes(content)
    Arena.discard(path)
    assert not os.path.exists(path)


@pytest.mark.parametrize("advice", [arena_module.POPULATE_WRITE, -1])
def test_all_of_it_is_allocated_and_mapped_at_the_start(
    advice: int, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By its owner and by each other process, also on a system that does not know how to populate a mapping."""
    monkeypatch.setattr(arena_module, "_STEP_BYTES", 8 * BLOCK)
    monkeypatch.setattr(arena_module, "POPULATE_WRITE", advice)
    for make in (partial(Arena.create, path, BLOCK, 20), partial(Arena.open, path)):
        arena = make()
        size = os.stat(path).st_size
        assert os.stat(path).st_blocks * 512 >= size == 20 * BLOCK + 4096
        assert _resident_bytes(path) >= size
        arena.close()


def test_its_pages_are_mapped_in_steps_between_which_other_threads_run(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By its owner, and by a worker that maps the next owner's amid its streams: each call holds Python's lock."""
    steps: list[tuple[int, int | None]] = []

    class Mapping(mmap.mmap):
        def __new__(cls, descriptor: int, size: int, flags: int = mmap.MAP_SHARED) -> "Mapping":
            assert not flags & mmap.MAP_POPULATE
            return super().__new__(cls, descriptor, size, flags)

        def madvise(self, advice: int, start: int = 0, length: int | None = None) -> None:
            steps.append((start, length))
            super().madvise(advice, start, length or len(self))

    monkeypatch.setattr(arena_module, "_STEP_BYTES", 8 * BLOCK)
    monkeypatch.setattr(mmap, "mmap", Mapping)
    for make in (partial(Arena.create, path, BLOCK, 20), partial(Arena.open, path)):
        steps.clear()
        make().close()
        assert steps == [(start * BLOCK, 8 * BLOCK) for start in (0, 8, 16)]


def _resident_bytes(path: str) -> int:
    """How much of a file is in this process's page table."""
    lines = iter(Path("/proc/self/smaps").read_text().splitlines())
    for line in lines:
        if line.endswith(path):
            return next(int(one.split()[1]) * 1024 for one in lines if one.startswith("Rss:"))
    return 0


def test_one_that_does_not_fit_is_refused_and_leaves_nothing(path: str) -> None:
    with pytest.raises(ConfigError, match="does not fit"):
        Arena.create(path, BLOCK, 1 << 40)
    assert not os.path.exists(path)


def test_one_that_the_file_system_refuses_leaves_nothing(path: str) -> None:
    """Stands in for a full /dev/shm: a limit that posix_fallocate meets on the way."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (64 * BLOCK, hard))
    try:
        with pytest.raises(ConfigError, match="does not fit"):
            Arena.create(path, BLOCK, 100)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert not os.path.exists(path)


def test_one_that_cannot_be_pinned_is_used_all_the_same(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As on a machine with a GPU that may not lock memory."""
    out_of_memory = 2
    monkeypatch.setattr(arena_module, "GPU_CONTROLS", (Path("/dev/null"),))
    cleared: list[bool] = []
    monkeypatch.setattr(torch, "zeros", lambda *_, device: cleared.append(device == "cuda"))
    monkeypatch.setattr(accelerator, "present_accelerator", accelerator.Cuda)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: SimpleNamespace(cudaHostRegister=lambda *_: out_of_memory))
    arena = Arena.anonymous(BLOCK, 2)
    arena.slot(SlotId(1))[:] = b"\x07" * BLOCK
    assert arena.slot(SlotId(1)) == b"\x07" * BLOCK
    arena.close()
    assert "could not be pinned" in caplog.text
    assert cleared == [True]


def test_no_memory_may_be_locked_and_that_is_no_error(path: str) -> None:
    limits = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (0, limits[1]))
    try:
        arena = Arena.create(path, BLOCK, 3)
        arena.close()
    finally:
        resource.setrlimit(resource.RLIMIT_MEMLOCK, limits)


def test_what_is_there_is_not_overwritten(path: str) -> None:
    Path(path).write_bytes(b"somebody's")
    with pytest.raises(ConfigError, match="cannot be made"):
        Arena.create(path, BLOCK, 1)
    assert Path(path).read_bytes() == b"somebody's"


@pytest.mark.parametrize("content", [b"", b"short", bytes(4096), bytes(10000)])
def test_a_file_that_is_no_arena_is_refused(path: str, content: bytes) -> None:
    Path(path).write_bytes(content)
    with pytest.raises(StoreError):
        Arena.open(path)


def test_an_arena_cut_short_is_refused(path: str) -> None:
    Arena.create(path, BLOCK, 3).close()
    os.truncate(path, BLOCK * 2)
    with pytest.raises(StoreError):
        Arena.open(path)
    with pytest.raises(StoreError):
        Arena.open(path + "-not-there")


@pytest.mark.parametrize("slot", [-1, 2, 1 << 40])
def test_a_slot_that_is_none_is_refused(slot: int) -> None:
    arena = Arena.anonymous(BLOCK, 2)
    with pytest.raises(StoreError):
        arena.slot(SlotId(slot))
    arena.close()


def test_closing_leaves_a_view_in_use_alone() -> None:
    arena = Arena.anonymous(BLOCK, 1)
    view = arena.slot(SlotId(0))
    arena.close()
    view[:] = b"\x01" * BLOCK
    assert view == b"\x01" * BLOCK


@pytest.mark.skipif(resource.getpagesize() != 4096, reason="pages of another size")
def test_a_hundred_thousand_random_operations_mix_nothing_up() -> None:
    """No slot is ever too small or two blocks' at once; what is found is what was written under that name."""
    chance = random.Random(5)
    num_slots, clock = 32, FakeClock()
    directory, arena = Directory(num_slots, clock), Arena.anonymous(BLOCK, num_slots)
    sequences = [names_of(4 * chance.randint(1, 12), first=1000 * n) for n in range(16)]
    num_found = num_done = 0
    while num_done < 100_000:
        names = chance.choice(sequences)
        clock.now += 0.01
        if chance.random() < 0.5:
            num_done += _write(directory, arena, names)
        else:
            num_found += _read(directory, arena, names)
        num_done += len(names)
    assert directory.records.check() == []
    assert directory.records.status().evictions > 1000
    assert num_found > 1000
    arena.close()


def _write(directory: Directory, arena: Arena, names: list[BlockName]) -> int:
    blocks = committed(directory.reserve("writer", names, None).slots, names)
    for block in blocks:
        arena.slot(block.slot)[: LAYOUT.payload_bytes] = payload_of(block.name)
    directory.commit("writer", blocks, None)
    return len(blocks)


def _read(directory: Directory, arena: Arena, names: list[BlockName]) -> int:
    lease = directory.lease("reader", [name.key for name in names], 5.0)
    for name, entry in zip(names, lease.entries, strict=True):
        assert entry is None or arena.slot(entry.slot)[: LAYOUT.payload_bytes] == payload_of(name)
    assert directory.release(lease.lease_id)
    return sum(entry is not None for entry in lease.entries)
