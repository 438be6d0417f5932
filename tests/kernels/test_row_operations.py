"""What Triton does to rows between products, against torch, which rounds in the same places."""

import pytest
import torch

from engine.model import sampler
from kernels import row_operations
from kernels.backend import Activation, Angles, Heads, KVPages
from kernels.torch_backend import TorchBackend
from kernels.triton_backend import TritonBackend
from tests.kernels.paged_batch import Heads as Shape
from tests.kernels.paged_batch import empty_codes, empty_layer

ULPS = {torch.float32: 1e-6, torch.bfloat16: 2**-8, torch.float16: 2**-11}
"""A rounding may fall to the other side where the last bit before it differs."""
BLOCK_SIZE, NUM_PAGES = 16, 4

each_dtype = pytest.mark.parametrize("dtype", ULPS, ids=str)


def close(actual: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> None:
    torch.testing.assert_close(actual, expected, rtol=2 * ULPS[dtype], atol=2 * ULPS[dtype], equal_nan=True)


def random(*shape: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.randn(shape, device=device).to(dtype)


@each_dtype
@pytest.mark.parametrize("columns", [16, 31, 576, 4096])
def test_a_norm_of_rows(columns: int, dtype: torch.dtype, device: torch.device) -> None:
    states, weight = random(5, columns, dtype=dtype, device=device), random(columns, dtype=dtype, device=device)
    expected = TorchBackend().rms_norm(states, weight, 1e-5)
    close(TritonBackend().rms_norm(states, weight, 1e-5), expected, dtype)
    wide, part = weight.float(), random(5, columns + 8, dtype=dtype, device=device)[:, 8:]
    expected = TorchBackend().rms_norm(states, wide, 1e-5, states)
    close(TritonBackend().rms_norm(states, wide, 1e-5, states, out=part), expected, dtype)
    assert TritonBackend().rms_norm(states[:0], weight, 1e-5).shape == (0, columns)


@each_dtype
@pytest.mark.parametrize("columns", [16, 31, 1536])
def test_a_gate_of_rows(columns: int, dtype: torch.dtype, device: torch.device) -> None:
    gate_up = 4 * random(5, 2 * columns, dtype=dtype, device=device)
    gate_up[0, :4] = torch.tensor([-300.0, -89.0, 89.0, 300.0], device=device)
    for activation in Activation:
        close(TritonBackend().gate(gate_up, activation), TorchBackend().gate(gate_up, activation), dtype)


@pytest.mark.parametrize("columns", [1, 31, 300, 20_000])
def test_the_likeliest_of_rows(columns: int, device: torch.device) -> None:
    """Equals, the first of which counts, lie in tiles and lanes of their own; faulty numbers make a row faulty."""
    logits = torch.randn(9, columns + 8, device=device)[:, 8:]
    for row, number in enumerate((torch.nan, torch.inf, -torch.inf)):
        logits[row, columns // 2] = number
    logits[3, [columns // 3, columns // 2, columns - 1]] = 9.0
    logits[4, :] = 0.5
    logits[5, [0, columns - 1]] = torch.tensor([-3e38, 3e38], device=device)
    logits[6, columns - 1] = 9.0
    found, expected = row_operations.likeliest(logits), sampler.likeliest(logits.cpu())
    assert found.dtype is torch.int64
    assert found.tolist() == expected.tolist()
    assert found[:3].tolist() == [-1] * 3
    assert found[3] == columns // 3
    assert row_operations.likeliest(logits[:0]).shape == (0,)


def make_pages(shape: Shape, kept: str, dtype: torch.dtype, device: torch.device) -> KVPages:
    if kept == "none":
        return KVPages(empty_layer(NUM_PAGES, shape, BLOCK_SIZE, dtype, device))
    return empty_codes(NUM_PAGES, shape, BLOCK_SIZE, kept, device, dtype)


def copied(pages: KVPages) -> list[torch.Tensor]:
    """What a write may change, in numbers that can be compared."""
    parts = [pages.data, pages.scales, *((pages.int4.open, pages.int4.key_scales) if pages.int4 else ())]
    return [one.float().clone() for one in parts if one is not None]


@each_dtype
@pytest.mark.parametrize(
    ("kept", "shape", "has_norms"),
    [
        ("none", Shape(4, 2, 32), False),
        ("none", Shape(14, 2, 64), True),
        ("none", Shape(3, 3, 80), True),
        ("int8", Shape(4, 2, 128), False),
        ("fp8", Shape(2, 1, 80), True),
        ("int4", Shape(4, 2, 64), False),
    ],
)
def test_rows_are_rotated_and_written(
    kept: str, shape: Shape, has_norms: bool, dtype: torch.dtype, device: torch.device
) -> None:
    """One row has no slot; with int4 the rows before it fill a block, which is closed."""
    num_rows, num_all = 19, shape.num_heads + 2 * shape.num_kv_heads
    qkv = random(num_rows, num_all * shape.head_dim, dtype=dtype, device=device)
    norms = random(2, shape.head_dim, dtype=dtype, device=device)
    query_norm, key_norm = (norms[0], norms[1]) if has_norms else (None, None)
    heads = Heads(
        num_queries=shape.num_heads,
        num_kv=shape.num_kv_heads,
        size=shape.head_dim,
        query_norm=query_norm,
        key_norm=key_norm,
        norm_eps=1e-6,
    )
    turns = torch.rand(num_rows, shape.head_dim // 2, device=device) * 6
    angles = Angles(turns.cos(), turns.sin())
    slots = torch.arange(BLOCK_SIZE, BLOCK_SIZE + num_rows, device=device)
    slots[17] = -1
    found = []
    torch.manual_seed(1)  # the places of open blocks
    for backend in (TorchBackend(), TritonBackend()):
        torch.manual_seed(1)
        pages = make_pages(shape, kept, dtype, device)
        query = backend.rotate_and_write(qkv.clone(), heads, angles, pages, slots)
        found.append([query, *copied(pages)])
    (expected_query, *expected), (query, *written) = found
    close(query, expected_query, dtype)
    for actual, other in zip(written, expected, strict=True):
        if kept == "none" or (actual.shape[-1] == shape.head_dim and kept == "int4"):
            torch.testing.assert_close(actual, other, rtol=2 * ULPS[dtype], atol=2 * ULPS[dtype], equal_nan=True)
        else:  # a code may be the next one
            is_far = (actual - other).abs() > 0.13 * other.abs() + 1.01
            assert not bool(is_far.any())
            assert torch.equal(actual.isnan(), other.isnan())


def test_a_head_with_infinity_has_the_scale_nan(device: torch.device) -> None:
    shape = Shape(1, 1, 32)
    qkv = torch.zeros(2, 3 * 32, device=device)
    qkv[0, 40], qkv[1, 70] = torch.inf, torch.nan
    diagonal = torch.full((2, 16), 0.5**0.5, device=device)
    pages = empty_codes(1, shape, BLOCK_SIZE, "int8", device)
    assert pages.scales is not None
    slots = torch.arange(2, device=device)
    TritonBackend().rotate_and_write(
        qkv,
        Heads(num_queries=1, num_kv=1, size=32, query_norm=None, key_norm=None, norm_eps=0.0),
        Angles(diagonal, diagonal),
        pages,
        slots,
    )
    assert pages.scales[0, :, 0, :2].isnan().tolist() == [[True, False], [False, True]]
