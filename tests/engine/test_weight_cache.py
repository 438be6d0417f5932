"""Packed weights in the cache: packed once, equal to private ones, never used unless whole, and never in the way."""

import inspect
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from io import FileIO
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.checkpoint.checkpoint import Checkpoint
from engine.model import weight_cache
from engine.model.decoder import Decoder
from engine.model.weight_cache import PART, WeightCache
from engine.model.weight_file import HUGE_PAGE_BYTES, WeightFile, WeightWriter
from engine.model.weights import DecoderWeights, WeightLoader, count_bytes, load_private
from kernels.backend import Backend, Weight
from kernels.cpu import packed
from kernels.cpu.backend import CpuBackend
from kernels.cpu.library import best_isa
from kernels.selection import select_backend
from kernels.torch_backend import TorchBackend
from kernels.user_cache import user_cache
from tests.harness.checkpoints import make_checkpoint
from tests.harness.model_alone import generate
from tests.kernels.backends import lend_kernels
from wire.errors import ModelError

CPU = torch.device("cpu")
MIB = 1 << 20
LOAD = """
import os, signal, sys
from pathlib import Path
import torch
from engine.checkpoint.checkpoint import Checkpoint
from engine.model import weight_cache, weights
from kernels.selection import select_backend
packed, pack = [], weights.WeightLoader._pack
def counted(self, names, *how):
    if len(packed) == int(sys.argv[2]):
        os.kill(os.getpid(), signal.SIGKILL)
    packed.append(names)
    return pack(self, names, *how)
weights.WeightLoader._pack, weight_cache.count_bytes = counted, lambda *model: 1000
cpu = torch.device("cpu")
cache = weight_cache.WeightCache(1 << 30)
cache.load(Checkpoint(Path(sys.argv[1])), torch.float32, cpu, select_backend(cpu))
print(len(packed))
"""
"""Loads a checkpoint through the cache, and prints how many matrices it packed; killed before it packs matrix N."""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of packed weights, in a cache of the test's own."""
    lend_kernels(tmp_path / "cache")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return user_cache() / "weights"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return make_checkpoint("llama-gqa", tmp_path / "model")


def load(model: Path, backend: Backend | None = None, max_bytes: int = 64 * MIB) -> DecoderWeights:
    checkpoint = Checkpoint(model)
    return WeightCache(max_bytes).load(checkpoint, torch.float32, CPU, backend or select_backend(CPU))


def files(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.weights"))


def matrices(weights: DecoderWeights) -> list[Weight]:
    layers = [(one.qkv.weight, one.attention_output.weight, *one.feed_forward.matrices) for one in weights.layers]
    return [weights.embedding, weights.head, *(weight for layer in layers for weight in layer)]


def assert_equal(one: DecoderWeights, other: DecoderWeights) -> None:
    for left, right in zip(matrices(one), matrices(other), strict=True):
        assert (left.columns, left.depth, left.dtype) == (right.columns, right.depth, right.dtype)
        assert left.data.dtype is right.data.dtype
        assert torch.equal(left.data, right.data)


@contextmanager
def nothing_is_packed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    def fail(*_: object) -> None:
        raise AssertionError("it was packed again")

    with monkeypatch.context() as patch:
        patch.setattr("engine.model.weights.WeightLoader._pack", fail)
        yield


@pytest.mark.parametrize("kernels", ["torch", best_isa(), f"{best_isa()}-int8", f"{best_isa()}-int4"])
def test_a_second_start_packs_nothing_and_has_the_same_weights(
    model: Path, folder: Path, kernels: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = select_backend(CPU, kernels)
    first = load(model, backend)
    with nothing_is_packed(monkeypatch):
        second = load(model, backend)
    private = load_private(Checkpoint(model), torch.float32, CPU, backend)
    assert_equal(first, private)
    assert_equal(second, private)
    [made] = files(folder)
    assert (made.stat().st_mode & 0o777, folder.stat().st_mode & 0o777) == (0o600, 0o700)
    assert not (folder / PART).exists()
    maps = [line for line in Path("/proc/self/maps").read_text().splitlines() if line.endswith(made.name)]
    assert {line.split()[1] for line in maps} == {"r--s"}, "shared by all, and written by none"
    least = count_bytes(Checkpoint(model), torch.float32, backend)
    assert least < made.stat().st_size < least + 8192, "the count of what is there before anything is read"


def test_tokens_equal_private_weights_tokens(model: Path) -> None:
    load_mapped = WeightCache(64 * MIB).load
    models = [Decoder.load(model, None, CPU, 16, load_weights=one) for one in (load_private, load_mapped)]
    prompts = [[1, 5, 9, 2], [3] * 20]
    private, mapped = (generate(one, prompts, 8, 23) for one in models)
    assert private == mapped


def start(model: Path, killed_before: int = -1) -> "subprocess.Popen[str]":
    command = [sys.executable, "-c", LOAD, str(model), str(killed_before)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def test_processes_that_start_at_once_pack_once(model: Path, folder: Path) -> None:
    started = [start(model) for _ in range(3)]
    counts = sorted(int(one.communicate(timeout=120)[0]) for one in started)
    assert counts[:2] == [0, 0]
    assert counts[2] > 0
    assert len(files(folder)) == 1


def test_a_process_that_is_killed_amid_writing_leaves_nothing_that_is_used(model: Path, folder: Path) -> None:
    killed = start(model, killed_before=3)
    assert killed.wait(timeout=120) == -signal.SIGKILL
    killed.communicate()
    assert (files(folder), (folder / PART).exists()) == ([], True)
    assert_equal(load(model), load_private(Checkpoint(model), torch.float32, CPU, select_backend(CPU)))
    assert (len(files(folder)), (folder / PART).exists()) == (1, False)


def flipped(data: bytes) -> bytes:
    return data[:100] + bytes([data[100] ^ 1]) + data[101:]


@pytest.mark.parametrize(
    "damage",
    [lambda _: b"", lambda data: data[:10], lambda data: data[: len(data) // 2], lambda data: data[:-1],
     lambda data: data + b"more", lambda data: bytes(len(data)), flipped],
    ids=["empty", "ten bytes", "half", "one less", "longer", "zeros", "a bit"],
)  # fmt: skip
def test_a_damaged_file_is_named_and_made_anew(
    model: Path, folder: Path, damage: Callable[[bytes], bytes], caplog: pytest.LogCaptureFixture
) -> None:
    load(model)
    [made] = files(folder)
    good, damaged = made.read_bytes(), made.with_name("damaged")
    damaged.write_bytes(damage(good))
    damaged.chmod(0o600)
    damaged.replace(made)
    load(model)
    assert (files(folder), made.read_bytes()) == ([made], good)
    assert {record.message for record in caplog.records} == {f"{made} is damaged, and made anew"}


def test_weights_that_are_mapped_outlive_their_file(model: Path, folder: Path) -> None:
    mapped = load(model)
    files(folder)[0].unlink()
    assert_equal(mapped, load_private(Checkpoint(model), torch.float32, CPU, select_backend(CPU)))


def test_another_version_or_name_of_kernels_or_of_the_rules_is_another_file(
    model: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    load(model)
    backend = select_backend(CPU)
    monkeypatch.setattr(backend, "version", f"{backend.version}-next")
    load(model)
    monkeypatch.setattr(weight_cache, "_rules", lambda: b"other sources")
    load(model)
    checkpoint = Checkpoint(model)
    WeightCache(64 * MIB).load(checkpoint, torch.bfloat16, CPU, backend)
    monkeypatch.setattr(backend, "name", "of the same numbers in another order")
    load(model)
    assert len(files(folder)) == 5


class Written(FileIO):
    """A file that records the size of each write."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, "w")
        self.sizes: list[int] = []

    def write(self, data: Any) -> int:
        self.sizes.append(memoryview(data).nbytes)
        return super().write(data)


def test_writes_are_whole_huge_pages_but_the_last(tmp_path: Path) -> None:
    """Systems that keep files in huge pages make them of such writes."""
    matrices = [torch.randint(256, (num_bytes,), dtype=torch.uint8) for num_bytes in (1000, 5 * MIB + 100, 3, 2 * MIB)]
    path = tmp_path / "weights"
    with Written(path) as file:
        writer = WeightWriter(file)
        for index, data in enumerate(matrices):
            writer.put(str(index), partial(Weight, data, 1, 1, torch.uint8))
        writer.finish()
    assert all(size % HUGE_PAGE_BYTES == 0 for size in file.sizes[:-1])
    assert len(file.sizes) == 4
    made = WeightFile.open(path)
    assert made is not None
    for index, data in enumerate(matrices):
        assert torch.equal(made.find(str(index), partial(Weight, data, 1, 1, torch.uint8)).data, data)


def test_the_rules_cover_what_packs_and_what_lays_out_a_file() -> None:
    makers: list[Callable[..., object]] = [
        CpuBackend.pack_codes,
        TorchBackend.pack,
        WeightWriter.put,
        WeightLoader.load,
        packed.pack,
    ]
    sources = {Path(inspect.getfile(one)) for one in makers}
    rules = {Path(weight_cache.__file__).parents[2] / place for place in weight_cache.RULES}
    assert sources <= rules
    assert all(place.exists() for place in rules)


def test_the_model_that_started_longest_ago_is_evicted(tmp_path: Path, folder: Path) -> None:
    models = [make_checkpoint("llama-gqa", tmp_path / str(seed), seed=seed) for seed in range(3)]
    load(models[0])
    [first] = files(folder)
    bound = 2 * first.stat().st_size + 100
    load(models[1], max_bytes=bound)
    [second] = set(files(folder)) - {first}
    for age_s, file in ((100, first), (50, second)):
        stamp = file.stat().st_mtime - age_s
        os.utime(file, (stamp, stamp))
    load(models[0], max_bytes=bound)
    load(models[2], max_bytes=bound)
    assert len(files(folder)) == 2
    assert first.exists()
    assert not second.exists()


def assert_private(model: Path, folder: Path, caplog: pytest.LogCaptureFixture, problem: str, max_bytes: int) -> None:
    loaded = load(model, max_bytes=max_bytes)
    [record] = caplog.records
    assert record.levelname == "WARNING"
    assert "this worker has packed weights of its own" in record.message
    assert problem in record.message
    assert "set XDG_CACHE_HOME to another folder, or model.weight_cache_bytes" in record.message
    assert_equal(loaded, load_private(Checkpoint(model), torch.float32, CPU, select_backend(CPU)))
    assert not folder.is_dir() or {one.name for one in folder.iterdir()} <= {"lock"}


def test_weights_beyond_the_bound_stay_private(model: Path, folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert_private(model, folder, caplog, "exceed the cache's bound of 1000", 1000)


def test_a_folder_that_is_a_file_costs_a_warning(model: Path, folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder.write_text("")
    assert_private(model, folder, caplog, str(folder), 64 * MIB)


def test_a_folder_that_others_may_write_is_not_used(
    model: Path, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder.mkdir()
    folder.chmod(0o777)
    assert_private(model, folder, caplog, "is not this user's alone: remove it", 64 * MIB)


def test_a_disk_without_room_costs_a_warning(
    model: Path, folder: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A limit on the size of files stands for it: before anything is packed, and amid the writing."""
    load(make_checkpoint("llama-gqa", model.parent / "other", seed=5))
    [other] = files(folder)
    num_bytes = other.stat().st_size
    other.unlink()
    for declared_bytes in (num_bytes, 10):
        monkeypatch.setattr(weight_cache, "count_bytes", lambda *_, count=declared_bytes: count)
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes // 2, before[1]))
        try:
            caplog.clear()
            assert_private(model, folder, caplog, "File too large", 64 * MIB)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_link_in_the_place_of_the_file_is_not_followed(
    model: Path, folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    load(model)
    [made] = files(folder)
    made.rename(tmp_path / "elsewhere")
    made.symlink_to(tmp_path / "elsewhere")
    load(model)
    assert "this worker has packed weights of its own" in caplog.text


def test_a_model_that_changes_while_it_is_packed_is_not_kept(
    model: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = iter(["before.weights", "after.weights"])
    monkeypatch.setattr(weight_cache, "_name", lambda *_: next(names))
    with pytest.raises(ModelError, match="changed while it was read"):
        load(model)
    assert {one.name for one in folder.iterdir()} == {"lock"}


def test_a_cache_of_no_bytes_is_none(model: Path, folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    load(model, max_bytes=0)
    assert not folder.exists()
    assert caplog.records == []
