"""Products of one order in Triton, against torch: interpreted here, or compiled on a machine with a GPU."""

from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

from kernels import tiles
from kernels.backend import Activation, Weight
from kernels.products import ordered
from kernels.products.ordered import Counters, num_splits_of, split_depth_of
from kernels.triton_backend import ExactBackend
from tests.kernels.interpreter import widened
from tests.kernels.test_packed_products import DTYPE_TO_TOLERANCE, assert_close, each_dtype

BACKEND = ExactBackend()
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SHAPES = ((1, 33, 63), (3, 64, 128), (17, 70, 577), (65, 130, 96), (70, 1, 320))
"""Rows, columns and depth; depths that no descriptor has, too."""
NUM_ROWS = (1, 2, 16, 17, 64, 65, 100, 129)
MODELS = ((6144, 4096), (4096, 4096), (28_672, 4096), (4096, 14_336), (960, 576), (576, 576), (3072, 576), (576, 1536))
"""The matrices of a layer of 8B and of 135M."""


def draw(dtype: torch.dtype, *shape: int) -> Tensor:
    return torch.randn(shape, device=DEVICE).to(dtype)


def check(num_rows: int, num_columns: int, depth: int, dtype: torch.dtype) -> None:
    """Compares products, with bias and residual, and logits with products in float64."""
    states, matrix, residual = (
        draw(dtype, num_rows, depth),
        draw(dtype, num_columns, depth),
        draw(dtype, num_rows, num_columns),
    )
    bias, weight = draw(dtype, num_columns), BACKEND.pack(matrix)
    product, magnitudes = states.double() @ matrix.double().T, states.double().abs() @ matrix.double().abs().T
    assert_close(BACKEND.linear(states, weight, None), product, magnitudes, dtype)
    logits = BACKEND.logits(states, weight, 30.0)
    assert logits.dtype is torch.float32
    assert_close(logits, 30 * torch.tanh(product / 30), magnitudes, torch.float32)
    added = 2 * (magnitudes + bias.double().abs() + residual.double().abs())  # rounded three times
    expected = BACKEND.linear(states, weight, bias, residual)
    assert_close(expected, product + bias.double() + residual.double(), added, dtype)
    assert BACKEND.linear(states, weight, bias, residual, out=residual) is residual
    assert torch.equal(residual, expected)


@pytest.fixture
def small_splits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes splits of small matrices as long as one unit."""
    monkeypatch.setattr(ordered, "MIN_SPLIT_DEPTH", 128)


@each_dtype
@pytest.mark.parametrize(("num_rows", "num_columns", "depth"), SHAPES)
def test_products_of_any_shape(dtype: torch.dtype, num_rows: int, num_columns: int, depth: int) -> None:
    check(num_rows, num_columns, depth, dtype)


@pytest.mark.usefixtures("small_splits")
@each_dtype
@pytest.mark.parametrize("num_rows", [2, 40, 70, 140])
def test_splits_of_the_depth_are_added_up(dtype: torch.dtype, num_rows: int) -> None:
    """The last split is shorter; at 140 rows one program has all of them."""
    assert num_splits_of(draw(dtype, 20, 300)) == 2
    check(num_rows, 20, 300, dtype)


@pytest.mark.usefixtures("small_splits")
@each_dtype
@pytest.mark.parametrize("activation", Activation)
@pytest.mark.parametrize("num_rows", [1, 20, 70, 140])
def test_a_gated_product_is_the_gate_of_a_product(dtype: torch.dtype, activation: Activation, num_rows: int) -> None:
    """Gates and ups are in turns in the matrix; both the depth and the columns are cut.

    The kernel of rows fuses no product with a sum, which the other activations have: they may round otherwise.
    """
    states, matrix, bias = draw(dtype, num_rows, 300), draw(dtype, 2 * 77, 300), draw(dtype, 2 * 77)
    for given_bias in (None, bias):
        gated = BACKEND.gated_linear(states, BACKEND.pack_gated(matrix), given_bias, activation)
        expected = BACKEND.gate(BACKEND.linear(states, BACKEND.pack(matrix), given_bias), activation)
        torch.testing.assert_close(gated, expected)
        if activation is Activation.SILU:
            assert torch.equal(gated, expected)


@settings(deadline=None, max_examples=15)
@given(st.integers(1, 140), st.integers(1, 150), st.integers(1, 400), st.sampled_from([*DTYPE_TO_TOLERANCE]))
def test_products_of_drawn_shapes(num_rows: int, num_columns: int, depth: int, dtype: torch.dtype) -> None:
    check(num_rows, num_columns, depth, dtype)


@pytest.fixture
def instructions_of_16(monkeypatch: pytest.MonkeyPatch) -> None:
    """Adds 16 places at once, as a device's instructions do: numpy's order depends on the shape of a tile."""

    def dot(_: object, first: TensorHandle, second: TensorHandle, total: TensorHandle, *__: object) -> TensorHandle:
        left, right = (widened(one).data.astype(np.float64) for one in (first, second))
        sums = total.data
        for place in range(0, left.shape[1], 16):
            sums = (sums + np.einsum("ik,kj->ij", left[:, place : place + 16], right[place : place + 16])).astype("f4")
        return TensorHandle(sums, total.dtype.scalar)

    monkeypatch.setattr(InterpreterBuilder, "create_dot", dot)


@pytest.mark.usefixtures("small_splits")
@each_dtype
@pytest.mark.parametrize("depth", [384, 331])
def test_a_row_has_the_same_bits_among_any_number_of_rows(
    dtype: torch.dtype, depth: int, request: pytest.FixtureRequest
) -> None:
    """Splits have programs of their own for few rows, and one program for many; 331 numbers are no descriptor's row."""
    if DEVICE.type == "cpu":
        request.getfixturevalue("instructions_of_16")
    weight, states = BACKEND.pack(draw(dtype, 20, depth)), draw(dtype, 520, depth)
    together = BACKEND.logits(states, weight)
    for num_rows in NUM_ROWS:
        assert torch.equal(BACKEND.logits(states[:num_rows], weight), together[:num_rows])
    assert torch.equal(BACKEND.logits(states[517:], weight), together[517:])


@pytest.mark.usefixtures("small_splits")
@pytest.mark.parametrize("num_rows", [1, 40, 128])
def test_splits_have_the_same_bits_whatever_adds_them(num_rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last of a tile's programs, or a launch of its own."""
    monkeypatch.setattr(ordered, "MAX_COUNTED_ROWS", num_rows)
    weight, states = BACKEND.pack(draw(torch.bfloat16, 70, 600)), draw(torch.bfloat16, num_rows, 600)
    bias, residual = draw(torch.bfloat16, 70), draw(torch.bfloat16, num_rows, 70)
    expected = BACKEND.linear(states, weight, bias, residual)
    monkeypatch.setattr(ordered, "MAX_COUNTED_ROWS", 0)
    monkeypatch.setattr(Counters, "here", None)
    assert torch.equal(BACKEND.linear(states, weight, bias, residual), expected)
    check(num_rows, 70, 600, torch.bfloat16)


@pytest.mark.usefixtures("small_splits")
def test_a_product_leaves_its_counters_as_they_were() -> None:
    counters, states, matrix = Counters(), draw(torch.float16, 13, 512), draw(torch.float16, 200, 512)
    out = torch.empty(13, 200, dtype=torch.float16, device=DEVICE)
    for _ in range(3):
        again = ordered.linear(states, matrix, None, None, out.clone(), counters)
        assert not counters.here(DEVICE).any()
    assert torch.equal(again, ordered.linear(states, matrix, None, None, out, counters))


def test_splits_follow_from_the_shape_alone_and_fit_the_counters() -> None:
    found = [-(-depth // split_depth_of(columns, depth)) for columns, depth in MODELS]
    assert found == [2, 4, 1, 4, 1, 1, 1, 1]
    for columns in range(1, 18_000, 7):
        splits = -(-65_536 // split_depth_of(columns, 65_536))
        if splits > 1:
            wide = -(-columns // ordered.SPLIT_COLUMNS)
            assert wide * splits <= ordered.WANTED_PROGRAMS
            assert wide * ordered.MAX_SPLIT_ROWS // 64 <= ordered.MAX_TILES


@pytest.mark.parametrize("architecture", tiles.read_table())
def test_tiles_have_more_rows_from_kind_to_kind_and_divide_a_split(architecture: str) -> None:
    for splits in (1, 2):
        found = [tiles.find_ordered_tile(architecture, kind, splits) for kind in (*tiles.KIND_TO_ROWS, tiles.MOST)]
        assert all(before.rows <= after.rows for before, after in pairwise(found[:3]))
        assert all(ordered.UNIT % one.step == 0 for one in found)
        assert [one.is_turned for one in found] == [True, False, False, False, False]


def test_no_rows_are_no_launch() -> None:
    weight = Weight(draw(torch.bfloat16, 33, 64), 33, 64, torch.bfloat16)
    assert BACKEND.linear(draw(torch.bfloat16, 0, 64), weight, None).shape == (0, 33)
    assert BACKEND.logits(draw(torch.bfloat16, 0, 64), weight).shape == (0, 33)


def test_more_streams_than_there_are_counters_for_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ordered, "MAX_STREAMS", 0)
    with pytest.raises(RuntimeError, match="products have run on 0 streams of cpu already"):
        Counters().here(torch.device("cpu"))
