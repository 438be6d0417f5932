"""Products with packed weights in Triton, against torch with the widened matrix."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from triton.runtime import interpreter

from kernels import tiles
from kernels.backend import Activation
from kernels.quantized import products
from kernels.quantized.device_layout import CodedWeight, Part, is_packable
from kernels.quantized.matrix import Quantized, round_to_int4, round_to_int8
from kernels.torch_backend import TorchBackend
from kernels.triton_backend import ExactBackend, TritonBackend
from tests.kernels.quantized_matrices import DRAWS, FILE_BITS

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
DTYPE_TO_TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 8e-3, torch.float16: 1e-3}
SHAPES = ((1, 256), (33, 288), (70, 512), (96, 31), (100, 577))
BACKEND = TritonBackend()

each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)
each_format = pytest.mark.parametrize("name", DRAWS)


def draw(name: str, columns: int, depth: int, device: torch.device) -> Quantized:
    return DRAWS[name](columns, depth).to(device)


def coded(parts: list[Quantized], dtype: torch.dtype) -> CodedWeight:
    weight = BACKEND.pack_codes(parts, dtype)
    assert isinstance(weight, CodedWeight)
    return weight


def random_rows(num_rows: int, depth: int, like: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.randn(num_rows, depth, device=like.device).to(dtype)


def assert_close(actual: Tensor, expected: Tensor, magnitudes: Tensor, dtype: torch.dtype) -> None:
    """Compares sums, with a tolerance of what was added up: it may cancel out."""
    assert ((actual.double() - expected).abs() <= DTYPE_TO_TOLERANCE[dtype] * magnitudes).all()


def check(parts: list[Quantized], dtype: torch.dtype, num_rows: int) -> None:
    """Compares products, with bias and residual, and logits with those of the widened matrices in float64."""
    widened = torch.cat([part.dequantize().to(dtype) for part in parts])
    weight = coded(parts, dtype)
    assert (weight.columns, weight.depth, weight.dtype) == (*widened.shape, dtype)
    states = random_rows(num_rows, weight.depth, widened, dtype)
    bias, residual = (random_rows(rows, weight.columns, widened, dtype) for rows in (1, num_rows))
    product, magnitudes = states.double() @ widened.double().T, states.double().abs() @ widened.double().abs().T
    assert_close(BACKEND.linear(states, weight, None), product, magnitudes, dtype)
    logits = BACKEND.logits(states, weight)
    assert logits.dtype is torch.float32
    assert_close(logits, product, magnitudes, torch.float32)
    added, magnitudes = bias.double() + residual.double(), magnitudes + bias.double().abs() + residual.double().abs()
    expected = BACKEND.linear(states, weight, bias[0], residual)
    assert_close(expected, product + added, magnitudes, dtype)
    assert BACKEND.linear(states, weight, bias[0], residual, out=residual) is residual
    assert torch.equal(residual, expected)


@each_format
def test_products_equal_the_widened_matrixs(name: str, device: torch.device) -> None:
    check([draw(name, 33, 288, device)], torch.bfloat16, 3)


@pytest.mark.pairs(1)
@each_dtype
@pytest.mark.parametrize(("shape", "num_rows"), list(zip(SHAPES, (1, 2, 3, 4, 41), strict=True)))
def test_products_of_any_shape(dtype: torch.dtype, shape: tuple[int, int], num_rows: int, device: torch.device) -> None:
    check([draw("Q5_1", *shape, device)], dtype, num_rows)


@pytest.mark.pairs(1)
@each_dtype
@each_format
def test_weights_are_widened_bit_by_bit(dtype: torch.dtype, name: str, device: torch.device) -> None:
    for shape in SHAPES:
        matrix = draw(name, *shape, device)
        ids = torch.randint(matrix.columns, (5,), device=device)
        widened = matrix.dequantize().to(dtype)
        assert torch.equal(BACKEND.embed(ids, coded([matrix], dtype)), widened[ids])


@pytest.mark.pairs(1)
@each_format
def test_a_panel_of_columns_is_widened_bit_by_bit(name: str, device: torch.device) -> None:
    matrix = draw(name, 70, 512, device)
    [part] = coded([matrix], torch.bfloat16).parts
    panel = torch.full((30, 512), torch.nan, dtype=torch.bfloat16, device=device)
    products.widen_columns(part, 40, panel)
    assert torch.equal(panel, matrix.dequantize().bfloat16()[40:])


@each_dtype
def test_parts_of_other_formats_and_odd_sizes_lie_in_one_matrix(dtype: torch.dtype, device: torch.device) -> None:
    names = {"Q4_K": 33, "Q6_K": 7, "Q8_0": 64, "Q5_1": 1}
    parts = [draw(name, columns, 256, device) for name, columns in names.items()]
    for num_rows in (3, 19):
        check(parts, dtype, num_rows)


def test_parts_of_one_format_are_one_product(device: torch.device) -> None:
    parts = [draw("Q4_K", columns, 512, device) for columns in (33, 70)]
    assert [part.columns for part in coded(parts, torch.bfloat16).parts] == [103]
    check(parts, torch.bfloat16, 5)


@pytest.mark.parametrize("round_to", [round_to_int8, round_to_int4])
def test_matrices_that_were_rounded_here_are_multiplied(round_to: Any, device: torch.device) -> None:
    check([round_to(torch.randn(33, 300, device=device))], torch.bfloat16, 3)


def test_zero_points_of_channels_apply_to_all_planes(device: torch.device) -> None:
    drawn = draw("W4A16 with zero points", 33, 300, device)
    scales, points = drawn.scales[:, :1], drawn.offset_factors
    assert points is not None
    changes: dict[str, Any] = {"scales": scales, "offsets": -scales, "offset_factors": points[:, :1]}
    check([replace(drawn, group=300, block=300, **changes)], torch.bfloat16, 3)


@pytest.fixture
def small_splits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes splits of small matrices as long as one of their chunks or two."""
    monkeypatch.setattr(products, "MIN_SPLIT_DEPTH", 192)


@pytest.mark.usefixtures("small_splits")
@pytest.mark.parametrize(
    ("name", "dtype"), [("Q4_K", torch.bfloat16), ("Q6_K", torch.float16), ("FP8 of channels", torch.float32)]
)
def test_splits_of_the_depth_are_added_up(dtype: torch.dtype, name: str, device: torch.device) -> None:
    matrix = draw(name, 20, 640, device)
    [part] = coded([matrix], dtype).parts
    assert part.num_chunks > 2 * products.chunks_per_split(part), "more than two splits, the last one shorter"
    for num_rows in (3, 140):
        check([matrix], dtype, num_rows)


@pytest.fixture
def shapeless_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sums the products of one matrix instruction in float64: numpy's order depends on the shape of a tile."""

    class Numpy:
        def __getattr__(self, name: str) -> Any:
            return getattr(np, name)

        @staticmethod
        def matmul(first: np.ndarray, second: np.ndarray, dtype: Any = None) -> Any:
            return np.einsum("ik,kj->ij", first.astype(np.float64), second.astype(np.float64)).astype(np.float32)

    monkeypatch.setattr(interpreter, "np", Numpy())


@pytest.mark.usefixtures("small_splits")
@pytest.mark.parametrize("name", ["Q4_K", "Q6_K"])
def test_a_row_has_the_same_bits_among_any_number_of_rows(
    name: str, device: torch.device, request: pytest.FixtureRequest
) -> None:
    if device.type == "cpu":
        request.getfixturevalue("shapeless_products")
    weight = coded([draw(name, 20, 640, device)], torch.bfloat16)
    states = random_rows(140, 640, weight.data, torch.bfloat16)
    together = BACKEND.logits(states, weight)
    for num_rows in (1, 16, 17, 65):
        assert torch.equal(BACKEND.logits(states[:num_rows], weight), together[:num_rows])
    assert torch.equal(BACKEND.logits(states[131:], weight), together[131:])


@pytest.fixture
def panels(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Widens by panels of two columns above four rows; returns the first column and the number of each."""
    found: list[tuple[int, int]] = []
    widen_columns = products.widen_columns

    def observe(part: Part, first: int, panel: Tensor) -> None:
        found.append((first, len(panel)))
        widen_columns(part, first, panel)

    monkeypatch.setattr(products, "widen_columns", observe)
    monkeypatch.setattr(products, "find_widened_rows", lambda *_: 4)
    monkeypatch.setattr(products, "PANEL_BYTES", 2 * 288 * 2)
    monkeypatch.setattr(products, "PANEL_COLUMNS", 2)
    return found


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_many_rows_are_multiplied_by_panels_of_columns(
    dtype: torch.dtype, panels: list[tuple[int, int]], device: torch.device
) -> None:
    parts = [draw("Q4_0", 5, 288, device), draw("Q8_0", 3, 288, device)]
    check(parts, dtype, 4)
    assert panels == []
    check(parts, dtype, 5)
    assert panels == [(0, 2), (2, 2), (4, 1), (0, 2), (2, 1)] * 3, "three products; logits are widened in registers"


def test_a_bias_without_a_residual_is_added_once_by_panels(panels: list[tuple[int, int]], device: torch.device) -> None:
    matrix = draw("Q4_0", 5, 288, device)
    states, bias = (random_rows(rows, size, matrix.codes, torch.bfloat16) for rows, size in ((6, 288), (1, 5)))
    by_panels = BACKEND.linear(states, coded([matrix], torch.bfloat16), bias[0])
    expected = states.double() @ matrix.dequantize().bfloat16().double().T + bias.double()
    assert panels
    torch.testing.assert_close(by_panels.double(), expected, rtol=2e-2, atol=5e-2)


def test_products_of_one_order_are_never_multiplied_by_panels(
    panels: list[tuple[int, int]], device: torch.device
) -> None:
    weight = coded([draw("Q4_0", 5, 288, device)], torch.bfloat16)
    states = random_rows(6, 288, weight.data, torch.bfloat16)
    together = ExactBackend().linear(states, weight, None)
    assert panels == []
    assert torch.equal(together, products.linear(states, weight, None, None, together.clone(), products.multiply_part))


def test_rows_above_which_weights_are_widened_to_memory() -> None:
    cpu = torch.device("cpu")
    assert {tiles.find_widened_rows(cpu, dtype, 4) for dtype in (torch.bfloat16, torch.float16)} == {512}
    assert tiles.find_widened_rows(cpu, torch.float32, 4) is None


def test_weights_are_widened_in_registers_where_no_device_has_timed_panels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiles, "architecture_of", lambda _: "sm_80")
    assert tiles.find_widened_rows(torch.device("cpu"), torch.bfloat16, 4) is None


def test_splits_follow_from_the_shape_alone(device: torch.device) -> None:
    def num_splits(columns: int, depth: int) -> int:
        [part] = coded([draw("Q4_0", 1, depth, device)], torch.bfloat16).parts
        part = replace(part, columns=columns)
        return -(-part.num_chunks // products.chunks_per_split(part))

    assert [num_splits(*one) for one in ((64, 1000), (4096, 4096), (4096, 14336), (28672, 4096))] == [1, 4, 4, 1]


def test_no_rows_are_no_launch(device: torch.device) -> None:
    weight = coded([draw("Q4_K", 33, 256, device)], torch.bfloat16)
    states = random_rows(0, 256, weight.data, torch.bfloat16)
    assert BACKEND.linear(states, weight, None).shape == (0, 33)
    assert BACKEND.embed(torch.zeros(0, dtype=torch.int64, device=device), weight).shape == (0, 256)


@each_format
def test_packed_weights_take_at_most_1_2_of_their_file(name: str) -> None:
    drawn, columns, depth = DRAWS[name](1536, 1024), 1536, 1024
    weight = coded([drawn], torch.bfloat16)
    assert weight.data.nbytes <= 1.2 * FILE_BITS[name] / 8 * columns * depth
    outline = coded([drawn.to(torch.device("meta"))], torch.bfloat16)
    assert outline.data.is_meta
    assert outline.data.nbytes == weight.data.nbytes


@pytest.mark.parametrize(
    "changes",
    [
        {"group": 24, "block": 24, "scales": torch.ones(40, 10).half()},
        {"scales": torch.ones(40, 8), "offsets": torch.ones(40, 8)},
        {"offsets": torch.ones(40, 8, dtype=torch.bfloat16)},
        {"bits": 8, "zero": 128},
        {"scales": torch.full((40, 8), 2.0**100)},
        {
            "group": 16,
            "block": 16,
            "offsets": None,
            "scales": torch.ones(40, 15).half(),
            "scale_factors": torch.ones(40, 15, dtype=torch.int8),
        },
    ],
    ids=[
        "groups that no plane is of",
        "long scales with offsets",
        "offsets of another dtype",
        "codes of 8 bits without a sign",
        "scales that are no weights' of a model",
        "blocks of half a plane",
    ],
)
def test_what_the_kernels_would_not_widen_exactly_is_widened_before(changes: dict[str, Any]) -> None:
    matrix = replace(DRAWS["Q4_0"](40, 240), **changes)
    assert not is_packable(matrix)
    parts = [DRAWS["Q4_0"](40, 240), matrix]
    weight = BACKEND.pack_codes(parts, torch.bfloat16)
    assert not isinstance(weight, CodedWeight)
    assert torch.equal(weight.data, torch.cat([one.dequantize().bfloat16() for one in parts]))
    states = torch.randn(3, 240).bfloat16()
    gated = [one.gated_linear(states, weight, None, Activation.SILU) for one in (ExactBackend(), TorchBackend())]
    torch.testing.assert_close(*gated, rtol=2e-2, atol=2e-2)


def test_a_matrix_of_one_column_is_packed(device: torch.device) -> None:
    matrix = Quantized(
        codes=torch.arange(768, dtype=torch.uint8).view(torch.int8)[None],
        bits=8,
        group=160,
        block=160,
        scales=torch.ones(1, 5).half(),
        offsets=torch.ones(1, 5).half(),
        offset_factors=torch.arange(1, 6, dtype=torch.int8)[None],
    ).to(device)
    weight = BACKEND.pack_codes([matrix], torch.float32)
    assert isinstance(weight, CodedWeight)
    states = torch.eye(768, device=device)[:3]
    assert torch.equal(BACKEND.linear(states, weight, None), matrix.dequantize()[:, :3].T)
