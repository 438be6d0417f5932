"""Products in the tiles of AMX, or in emulated ones: their order of sums; and the choice of the instruction set."""

import ctypes
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kernels.cpu import backend as of_cpu
from kernels.cpu import library
from kernels.cpu.backend import CpuBackend
from kernels.cpu.library import ISA_TO_FEATURES, NoKernels, load_library
from kernels.selection import select_backend
from tests.kernels.backends import EMULATED, ISAS, PRODUCTS, make_backend

BLOCK = 32
CPU = torch.device("cpu")
TILED = [name for name in PRODUCTS if name in (EMULATED, "amx")]

needs_compiler = pytest.mark.skipif(not ISAS, reason="kernels of a CPU are tested on machines without a GPU")
each_tiled = pytest.mark.parametrize("name", TILED or [pytest.param("", marks=pytest.mark.skip("needs AVX-512"))])


def make(name: str) -> CpuBackend:
    backend = make_backend(name)
    assert isinstance(backend, CpuBackend)
    return backend


def in_blocks(rows: Tensor, weight: Tensor) -> Tensor:
    """Multiplies rows [rows, depth] with a weight [columns, depth] in float32, in the order of `tdpbf16ps`.

    A product of two bfloat16 numbers is exact in float32, so that a fused addition rounds as one that follows it.
    """
    padding = (0, -rows.shape[1] % BLOCK)
    rows, weight = (torch.nn.functional.pad(one.float(), padding) for one in (rows, weight))
    sums = torch.zeros(len(rows), len(weight))
    for block in range(0, rows.shape[1], BLOCK):
        evens, odds = torch.zeros_like(sums), torch.zeros_like(sums)
        for k in range(block, block + BLOCK, 2):
            evens += rows[:, k, None] * weight[:, k]
            odds += rows[:, k + 1, None] * weight[:, k + 1]
        sums += evens + odds
    return sums


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
    backend, (rows, weight) = make(name), draw(35, 33, 1700)
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
def test_amx_is_taken_by_name_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "may_use_tiles", lambda: True)
    loaded: list[str] = []

    def load(isa: str) -> ctypes.CDLL:
        loaded.append(isa)
        return load_library("portable")  # which any machine runs

    monkeypatch.setattr(of_cpu, "load_library", load)
    for kernels in ("auto", "auto-int8", "amx"):
        select_backend(CPU, kernels)
    assert loaded == ["avx512", "avx512", "amx"]


@needs_compiler
def test_the_instructions_of_tiles_are_assembled(tmp_path: Path) -> None:
    """On any machine: nothing runs. Other units with products have the same ones, from one header."""
    [unit] = [unit for unit in library.unit_paths() if unit.name == "linear.cpp"]
    output = tmp_path / "linear.o"
    command = ["g++", *library.compiler_flags("amx"), "-c", str(unit), "-o", str(output)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert output.stat().st_size > 0
