"""Products of packed weights have the bits of the widened matrix's, whatever the format and the number of rows."""

import ctypes
import re
from dataclasses import replace
from typing import Any

import pytest
import torch

from kernels.cpu import packed
from kernels.cpu.backend import CpuBackend
from kernels.cpu.library import SOURCE
from kernels.quantized.matrix import Quantized, round_to_int4, round_to_int8
from kernels.torch_backend import TorchBackend
from tests.kernels.backends import PRODUCTS, make_backend
from tests.kernels.quantized_matrices import DRAWS, FILE_BITS

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SHAPES = ((1, 256), (33, 288), (70, 512), (96, 31), (100, 577))

each_isa = pytest.mark.parametrize("isa", PRODUCTS)
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)
each_format = pytest.mark.parametrize("name", DRAWS)


def make(isa: str) -> CpuBackend:
    backend = make_backend(isa)
    assert isinstance(backend, CpuBackend)
    return backend


def is_widened_exactly(matrix: Quantized, dtype: torch.dtype) -> bool:
    return torch.float32 in (matrix.source, dtype) or matrix.source is dtype


def assert_products_are_of(backend: CpuBackend, parts: list[Quantized], dtype: torch.dtype, num_rows: int) -> None:
    """Compares products, with bias and residual, logits and an embedding with those of the widened matrices."""
    widened = torch.cat([part.dequantize().to(dtype) for part in parts])
    weight, plain = backend.pack_codes(parts, dtype), backend.pack(widened)
    assert (weight.columns, weight.depth, weight.dtype) == (*widened.shape, dtype)
    states = torch.randn(num_rows, weight.depth).to(dtype)
    bias, residual = torch.randn(weight.columns).to(dtype), torch.randn(num_rows, weight.columns).to(dtype)
    assert torch.equal(backend.linear(states, weight, None), backend.linear(states, plain, None))
    with_both = backend.linear(states, plain, bias, residual)
    assert torch.equal(backend.linear(states, weight, bias, residual), with_both)
    assert torch.equal(backend.logits(states, weight), backend.logits(states, plain))
    ids = torch.tensor([0, weight.columns - 1, weight.columns // 2])
    assert torch.equal(backend.embed(ids, weight), widened[ids])


@each_isa
@each_dtype
@each_format
def test_products_have_the_bits_of_the_widened_matrix(isa: str, dtype: torch.dtype, name: str) -> None:
    backend = make(isa)
    for shape, rows in zip(SHAPES, (1, 2, 3, 4, 41), strict=True):
        matrix = DRAWS[name](*shape)
        is_coded = backend.pack_codes([matrix], dtype).data.dtype is torch.uint8
        assert is_coded is is_widened_exactly(matrix, dtype)
        assert_products_are_of(backend, [matrix], dtype, rows)


@each_isa
@each_dtype
@pytest.mark.parametrize("name", ["Q4_1", "Q5_0", "Q6_K"])
def test_every_number_of_rows_has_them(isa: str, dtype: torch.dtype, name: str) -> None:
    backend = make(isa)
    matrix = DRAWS[name](40, 1200)
    weight, plain = backend.pack_codes([matrix], dtype), backend.pack(matrix.dequantize().to(dtype))
    states = torch.randn(40, 1200).to(dtype)
    expected = backend.linear(states, plain, None)
    for num_rows in range(1, 41):
        assert torch.equal(backend.linear(states[:num_rows], weight, None), expected[:num_rows])


@each_isa
def test_a_product_without_rows_reads_none(isa: str) -> None:
    """As of a step of chunks of which none ends a prompt: its rows are at address 0."""
    backend, rows = make(isa), torch.empty(0, 288, dtype=torch.bfloat16)
    weight = backend.pack_codes([DRAWS["Q5_1"](33, 288)], torch.bfloat16)
    assert backend.logits(rows, weight).shape == backend.linear(rows, weight, None).shape == (0, 33)


@each_isa
def test_a_long_prompt_goes_in_blocks_of_rows(isa: str) -> None:
    assert_products_are_of(make(isa), [DRAWS["Q6_K"](40, 256)], torch.bfloat16, 1200)


@each_isa
@each_dtype
def test_parts_of_other_formats_and_odd_sizes_lie_in_one_matrix(isa: str, dtype: torch.dtype) -> None:
    parts = [DRAWS["Q4_K"](33, 512), DRAWS["Q6_K"](7, 512), DRAWS["Q8_0"](64, 512), DRAWS["Q5_1"](1, 512)]
    for num_rows in (1, 3, 13):
        assert_products_are_of(make(isa), parts, dtype, num_rows)


@each_isa
def test_a_part_that_cannot_be_packed_is_widened_with_the_rest(isa: str) -> None:
    parts = [DRAWS["W4A16 of groups"](33, 256), DRAWS["Q8_0"](32, 256)]
    backend = make(isa)
    assert backend.pack_codes(parts, torch.float16).data.dtype is torch.float16
    assert_products_are_of(backend, parts, torch.float16, 5)


@each_isa
@pytest.mark.parametrize("scale", [2.0**-120, 2.0**100])
def test_scales_beyond_the_kernels_rounding_are_widened_before(isa: str, scale: float) -> None:
    matrix = DRAWS["W4A16 in float32"](40, 64)
    matrix.scales[0, 0] = scale
    backend = make(isa)
    assert backend.pack_codes([matrix], torch.float32).data.dtype is torch.float32
    assert_products_are_of(backend, [matrix], torch.bfloat16, 3)


@each_isa
@pytest.mark.parametrize("name", ["without a zero", "offsets", "float32"])
def test_six_bits_that_the_kernels_would_round_twice_are_widened_before(isa: str, name: str) -> None:
    matrix = DRAWS["Q6_K"](40, 256)
    changes: dict[str, dict[str, Any]] = {
        "without a zero": {"zero": 0},
        "offsets": {"offsets": matrix.scales},
        "float32": {"scales": matrix.scales.float() * 1.1},
    }
    backend, matrix = make(isa), replace(matrix, **changes[name])
    assert backend.pack_codes([matrix], torch.bfloat16).data.dtype is torch.bfloat16
    assert_products_are_of(backend, [matrix], torch.bfloat16, 3)


@each_isa
@each_format
def test_packed_weights_take_at_most_1_15_of_their_file(isa: str, name: str) -> None:
    weight = make(isa).pack_codes([DRAWS[name](1536, 1024)], torch.bfloat16)
    assert weight.data.dtype is torch.uint8
    assert weight.data.nbytes <= 1.15 * FILE_BITS[name] / 8 * 1536 * 1024


@each_isa
@pytest.mark.parametrize("columns", [3, 70])
def test_rows_do_not_depend_on_the_number_of_threads(isa: str, columns: int) -> None:
    backend = make(isa)
    weight = backend.pack_codes([DRAWS["Q4_K"](columns, 512)], torch.bfloat16)
    states = torch.randn(17, 512).bfloat16()
    alone = backend.linear(states, weight, None)
    try:
        backend.set_num_threads(3)
        assert torch.equal(backend.linear(states, weight, None), alone)
    finally:
        backend.set_num_threads(1)


@each_format
def test_torch_multiplies_the_widened_matrix(name: str) -> None:
    matrix, backend = DRAWS[name](40, 256), TorchBackend()
    states = torch.randn(5, 256)
    weight = backend.pack_codes([matrix], torch.float32)
    assert torch.equal(weight.data, matrix.dequantize())
    assert backend.linear(states, weight, None).shape == (5, 40)


@pytest.mark.parametrize("round_to", [round_to_int8, round_to_int4])
@pytest.mark.parametrize("depth", [31, 64, 577])
def test_rounding_is_to_the_nearest_code_and_keeps_zeros(round_to: type, depth: int) -> None:
    weight = torch.randn(33, depth) * torch.logspace(-24, 8, 33)[:, None]
    weight[3] = 0
    rounded = round_to(weight)
    step = rounded.scales.float().repeat_interleave(rounded.group, 1)[:, :depth]
    assert ((rounded.dequantize() - weight).abs() <= step * 0.75).all()
    assert (rounded.dequantize()[3] == 0).all()
    assert rounded.is_finite(torch.float32)


def test_nan_and_infinity_are_found_in_scales_codes_and_narrow_weights() -> None:
    matrix = DRAWS["FP8 of blocks"](4, 256)
    assert matrix.is_finite(torch.bfloat16)
    matrix.codes.view(torch.uint8)[2, 3] = 0x7F
    assert not matrix.is_finite(torch.bfloat16)
    matrix = DRAWS["Q4_1"](4, 256)
    matrix.scales[1] = 3e4
    assert matrix.is_finite(torch.bfloat16)
    assert not matrix.is_finite(torch.float16)
    assert matrix.offsets is not None
    matrix.offsets[1, 1] = torch.nan
    assert not matrix.is_finite(torch.bfloat16)


@pytest.mark.parametrize(("file", "launcher"), [("packed.h", packed.Format), ("packed.cpp", packed.Coded)])
def test_the_launcher_and_the_kernels_agree_on_formats(file: str, launcher: type[ctypes.Structure]) -> None:
    _, _, body = (SOURCE / file).read_text().partition(f"struct {launcher.__name__} {{\n")
    fields, _, _ = re.sub("//.*", "", body).partition("\n\n" if file == "packed.h" else "};")
    assert re.findall(r"(\w+)[,;]", fields) == [field[0] for field in vars(launcher)["_fields_"]]
