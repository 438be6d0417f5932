"""Products and attention in the order of sums of AMX, by its tiles and without them; and the choice of the set."""

import ctypes
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kernels.backend import Tables
from kernels.cpu import backend as of_cpu
from kernels.cpu import library
from kernels.cpu.backend import CpuBackend
from kernels.cpu.library import ISA_TO_FEATURES, NoKernels, load_library
from kernels.selection import select_backend
from tests.kernels.backends import ISAS, TILES, make_backend
from tests.kernels.paged_batch import Heads, PagedBatch, make_paged_batch

BLOCK, PIECE, SEGMENT, LANES, RESCALE_THRESHOLD = 32, 128, 1024, 16, 6
LOG2_E = torch.tensor(float.fromhex("0x1.715476p+0"))
CPU = torch.device("cpu")

needs_compiler = pytest.mark.skipif(not ISAS, reason="kernels of a CPU are tested on machines without a GPU")
each_tiled = pytest.mark.parametrize("name", TILES)


def make(name: str) -> CpuBackend:
    backend = make_backend(name)
    assert isinstance(backend, CpuBackend)
    return backend


def in_blocks(rows: Tensor, weight: Tensor, sums: Tensor | None = None) -> Tensor:
    """Multiplies rows [rows, depth] with a weight [columns, depth] in float32, as `tdpbf16ps` adds to sums.

    A product of two bfloat16 numbers is exact in float32, so that a fused addition rounds as one that follows it.
    """
    padding = (0, -rows.shape[1] % BLOCK)
    rows, weight = (torch.nn.functional.pad(one.float(), padding) for one in (rows, weight))
    sums = torch.zeros(len(rows), len(weight)) if sums is None else sums
    for block in range(0, rows.shape[1], BLOCK):
        evens, odds = torch.zeros_like(sums), torch.zeros_like(sums)
        for k in range(block, block + BLOCK, 2):
            evens += rows[:, k, None] * weight[:, k]
            odds += rows[:, k + 1, None] * weight[:, k + 1]
        sums = sums + (evens + odds)
    return sums


def fused(a: Tensor, b: Tensor | float, c: Tensor | float) -> Tensor:
    """Adds in float64 and rounds to float32: once, but for sums that lie within 2^-29 of a tie."""
    return (a.double() * b + c).float()


def exponential(x: Tensor) -> Tensor:
    """Takes the power of e as floats.h does: 2^n times a polynomial of degree 7."""
    n = (x * float.fromhex("0x1.715476p+0")).clamp(min=-126).round()
    r = fused(n, float.fromhex("0x1.05c61p-29"), fused(n, -float.fromhex("0x1.62e43p-1"), x).double())
    rise = torch.full_like(x, 1 / 5040)
    for coefficient in (1 / 720, 1 / 120, 1 / 24, 1 / 6, 0.5, 1.0):
        rise = fused(rise, r.double(), torch.tensor(coefficient).double())
    power = torch.ldexp(fused(rise, r.double(), 1.0), n.int())
    return torch.where(x < -87.3, 0.0, power)


def power_of_two(x: Tensor) -> Tensor:
    """Takes the power of 2 as floats.h does, for numbers that become bfloat16: by a polynomial of degree 4."""
    n = x.round()
    y = torch.full_like(x, float.fromhex("0x1.3a02cap-7"))
    for coefficient in ("0x1.c9fc46p-5", "0x1.ec0378p-3", "0x1.62e12cp-1", "0x1p0"):
        y = fused(y, (x - n).double(), float.fromhex(coefficient))
    return torch.where(x < -126, 0.0, torch.ldexp(y, n.clamp(min=-127).int()))


def attend_in_blocks(query: Tensor, keys: Tensor, values: Tensor, positions: Tensor, scale: float) -> Tensor:
    """Attends with rows [rows, head_size] at positions, in blocks of 32 of the head, and of keys in pieces of 128.

    keys, values: [tokens, head_size]. The softmax is online in segments of 1024 tokens, which are merged in order.
    """
    largest, powers, sums = (torch.full((len(query),), -torch.inf), torch.zeros(len(query)), torch.zeros(query.shape))
    for segment in range(0, len(keys), SEGMENT):
        top, total, added = torch.full_like(largest, -torch.inf), torch.zeros_like(powers), torch.zeros_like(sums)
        for begin in range(segment, min(segment + SEGMENT, len(keys)), PIECE):
            sees = (positions >= begin)[:, None]
            piece = slice(begin, begin + PIECE)
            scores = in_blocks(query, keys[piece])
            scores[begin + torch.arange(scores.shape[1]) > positions[:, None]] = -torch.inf
            found = scores.amax(1) * scale
            now = torch.where(found > top + RESCALE_THRESHOLD, found, top)
            weights = power_of_two((scores * scale - now[:, None]) * LOG2_E)
            lanes = torch.nn.functional.pad(weights, (0, PIECE - weights.shape[1])).unflatten(1, (-1, LANES))
            tree = torch.zeros_like(lanes[:, 0])
            for lane in lanes.unbind(1):
                tree = tree + lane
            while tree.shape[1] > 1:
                tree = tree[:, : tree.shape[1] // 2] + tree[:, tree.shape[1] // 2 :]
            kept = exponential(top - now)
            new = in_blocks(weights.bfloat16(), values[piece].T, added * kept[:, None])
            added, total = (
                torch.where(sees, new, added),
                torch.where(sees[:, 0], fused(total, kept.double(), tree[:, 0]), total),
            )
            top = torch.where(sees[:, 0], now, top)
        sees, now = total > 0, torch.maximum(largest, top)
        before, after = torch.where(powers > 0, exponential(largest - now), 0.0), exponential(top - now)
        merged = fused(added, after[:, None].double(), (sums * before[:, None]).double())
        sums = torch.where(sees[:, None], merged, sums)
        powers = torch.where(sees, powers * before + total * after, powers)
        largest = torch.where(sees, now, largest)
    return (sums / powers[:, None]).bfloat16()


def attend(name: str, batch: PagedBatch, query: Tensor, first: int, end: int) -> Tensor:
    """Attends with the rows at positions from first to end - 1, as a decoding row if there is one."""
    starts, lens = torch.tensor([0, end - first], dtype=torch.int32), torch.tensor([end], dtype=torch.int32)
    tables = Tables(batch.block_tables, lens, starts, int(end - first == 1))
    return make(name).attend(query[first:end], batch.pages, tables, batch.variant())


def draw(num_rows: int, columns: int, depth: int) -> tuple[Tensor, Tensor]:
    return torch.randn(num_rows, depth).bfloat16(), torch.randn(columns, depth).bfloat16()


@each_tiled
@settings(max_examples=40, deadline=None)
@given(num_rows=st.integers(1, 70), columns=st.integers(1, 70), depth=st.integers(1, 200))
def test_sums_have_the_bits_of_the_order(name: str, num_rows: int, columns: int, depth: int) -> None:
    rows, weight = draw(num_rows, columns, depth)
    bias, residual = torch.randn(columns).bfloat16(), torch.randn(num_rows, columns).bfloat16()
    backend, sums = make(name), in_blocks(rows, weight)
    packed = backend.pack(weight)
    assert torch.equal(backend.logits(rows, packed), sums)
    assert torch.equal(backend.linear(rows, packed, bias, residual), sums.bfloat16() + bias + residual)
    assert torch.equal(backend.embed(torch.arange(columns), packed), weight)


@each_tiled
def test_sums_of_a_depth_of_many_chunks_have_them(name: str) -> None:
    backend, (rows, weight) = make(name), draw(35, 70, 3700)
    assert torch.equal(backend.logits(rows, backend.pack(weight)), in_blocks(rows, weight))


@each_tiled
def test_a_row_has_its_bits_in_any_company(name: str) -> None:
    backend, (rows, weight) = make(name), draw(70, 96, 600)
    packed = backend.pack(weight)
    expected = in_blocks(rows, weight)
    for num_rows in range(1, 71):
        assert torch.equal(backend.logits(rows[:num_rows], packed), expected[:num_rows])
        assert torch.equal(backend.logits(rows[70 - num_rows :], packed), expected[70 - num_rows :])


@each_tiled
def test_a_long_prompt_goes_in_blocks_of_rows(name: str) -> None:
    backend, (rows, weight) = make(name), draw(1300, 40, 64)
    assert torch.equal(backend.logits(rows, backend.pack(weight)), in_blocks(rows, weight))


@each_tiled
def test_a_program_has_the_bits_of_its_calls(name: str) -> None:
    backend, (rows, weight) = make(name), draw(20, 33, 100)
    packed, out = backend.pack(weight), torch.zeros(20, 33)
    recorder = backend.record()
    recorder.logits(rows, packed, out=out)
    program = recorder.finish()
    for num_rows in (20, 2, 17):
        program.run(num_rows, 0, 0)
        assert torch.equal(out[:num_rows], in_blocks(rows[:num_rows], weight))


@each_tiled
@pytest.mark.parametrize("num_rows", [1, 2, 3, 17, 40])
def test_subnormal_numbers_are_zeros_to_any_number_of_rows(name: str, num_rows: int) -> None:
    """Of operands, and of results; a fused product that is subnormal itself still counts."""
    backend = make(name)
    rows, weight = torch.ones(num_rows, BLOCK), torch.zeros(3, BLOCK)
    rows[:, 2] = 2.0**-70
    weight[0, 0] = 2.0**-130
    weight[1, 0] = weight[2, 0] = 2.0**-126
    weight[1, 2] = -(2.0**-57)
    weight[2, 2] = 2.0**-60
    logits = backend.logits(rows.bfloat16(), backend.pack(weight.bfloat16()))
    assert torch.equal(logits, torch.tensor([0, 0, 2.0**-126 + 2.0**-130]).expand(num_rows, 3))


@each_tiled
def test_the_caller_keeps_its_subnormal_numbers(name: str) -> None:
    backend, (rows, weight) = make(name), draw(1, 32, 32)
    backend.logits(rows, backend.pack(weight))
    assert torch.tensor([2.0**-130]).mul(1.0).item() == 2.0**-130


@each_tiled
@pytest.mark.parametrize("head_size", [64, 80, 128])
def test_attention_has_the_bits_of_the_order(name: str, head_size: int) -> None:
    """Products cancel one another, so that what a sum has lost on its way shows in bfloat16."""
    group, length = 3, 1100
    batch = make_paged_batch(Heads(group, 1, head_size), [length], 16, torch.bfloat16)
    query, [keys], [values] = batch.random_query(length), batch.keys[0], batch.values[0]
    for tensor in (keys, values):
        tensor *= torch.logspace(-1, 1, tensor.shape[1])
        tensor[:, 1::2] = -tensor[:, 0::2] * torch.linspace(0.99, 1.01, tensor.shape[1] // 2)
    places = torch.arange(length)
    pages = batch.block_tables[0, places // 16]
    batch.pages.data[pages, :, 0, places % 16] = torch.stack([keys, values], 1)
    rows, positions = query.flatten(0, 1), places.repeat_interleave(group)
    expected = attend_in_blocks(rows, keys, values, positions, head_size**-0.5).unflatten(0, (-1, group))
    assert torch.equal(attend(name, batch, query, 0, length), expected)
    for position in (0, 31, 32, 127, 128, 1023, 1024, 1099):
        assert torch.equal(attend(name, batch, query, position, position + 1)[0], expected[position])


@each_tiled
@pytest.mark.parametrize("times", [1e8, 1e12, 1e30])
def test_huge_scores_leave_numbers_of_the_same_bits(name: str, times: float) -> None:
    batch = make_paged_batch(Heads(2, 1, 32), [300], 16, torch.bfloat16)
    query = (batch.random_query(300).float() * times).bfloat16()
    attended = attend(name, batch, query, 0, 300)
    assert attended.isfinite().all()
    assert torch.equal(attended, attend(TILES[-1], batch, query, 0, 300))


@each_tiled
@pytest.mark.parametrize("kept", ["none", "int8", "fp8"])
def test_a_row_of_a_long_prompt_has_its_bits_alone_and_in_any_chunk(name: str, kept: str) -> None:
    batch = make_paged_batch(Heads(2, 1, 32), [4096], 16, torch.bfloat16, kept=kept)
    query = batch.random_query(4096)
    whole = attend(name, batch, query, 0, 4096)
    for first, end in ((0, 1), (2047, 2048), (4095, 4096), (0, 512), (1000, 1002), (3000, 3017), (2048, 4096)):
        assert torch.equal(attend(name, batch, query, first, end), whole[first:end])


@pytest.fixture
def on_amx(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A machine whose processor has AMX."""
    monkeypatch.setattr(library, "_features", lambda: set(ISA_TO_FEATURES["amx"]))
    select_backend.cache_clear()
    yield
    select_backend.cache_clear()


@pytest.fixture
def refusing(on_amx: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Its system refuses the tile registers, as it does registers that no processor has."""
    monkeypatch.setattr(library, "TILE_DATA", -1)
    library.may_use_tiles.cache_clear()
    yield
    library.may_use_tiles.cache_clear()


@pytest.mark.usefixtures("refusing")
def test_amx_is_refused_by_name_where_the_system_refuses_tiles(caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(2):
        with pytest.raises(NoKernels, match="this machine has no amx: it has avx512"):
            load_library("amx")
    [refusal] = caplog.messages
    assert refusal.startswith("the system refuses this process the tile registers of AMX (")


@pytest.mark.usefixtures("on_amx")
@pytest.mark.parametrize("is_lent", [True, False])
def test_amx_is_taken_where_the_system_lends_tiles(monkeypatch: pytest.MonkeyPatch, is_lent: bool) -> None:
    monkeypatch.setattr(library, "may_use_tiles", lambda: is_lent)
    loaded: list[str] = []

    def load(isa: str) -> ctypes.CDLL:
        loaded.append(isa)
        return load_library("portable")  # which any machine runs

    monkeypatch.setattr(of_cpu, "load_library", load)
    for kernels in ("auto", "auto-int8", "avx512"):
        select_backend(CPU, kernels)
    best = "amx" if is_lent else "avx512"
    assert loaded == [best, best, "avx512"]


@pytest.mark.usefixtures("on_amx")
@pytest.mark.parametrize("kernels", ["auto", "auto-int8"])
def test_a_compiler_that_knows_no_amx_leaves_avx512(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, kernels: str
) -> None:
    monkeypatch.setattr(library, "may_use_tiles", lambda: True)
    loaded: list[str] = []

    def load(isa: str) -> ctypes.CDLL:
        loaded.append(isa)
        if isa == "amx":
            raise NoKernels("g++ failed: unrecognized command-line option '-mamx-tile'")
        return load_library("portable")

    monkeypatch.setattr(of_cpu, "load_library", load)
    select_backend(CPU, kernels)
    assert loaded == ["amx", "avx512"]
    assert caplog.messages == ["serving without AMX: g++ failed: unrecognized command-line option '-mamx-tile'"]


@needs_compiler
def test_the_instructions_of_tiles_are_assembled(tmp_path: Path) -> None:
    """On any machine: nothing runs. Other units with products have the same ones, from one header."""
    [unit] = [unit for unit in library.unit_paths() if unit.name == "linear.cpp"]
    output = tmp_path / "linear.o"
    command = ["g++", *library.compiler_flags("amx"), "-c", str(unit), "-o", str(output)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert output.stat().st_size > 0
