"""KV write, the torch reference and the Triton kernel alike, against one assignment per token."""

from pathlib import Path

import pytest
import torch

from kernels import reference
from tests.kernels.backends import WriteKv, triton_write
from tests.kernels.paged_batch import FAR_SIZE, Heads, empty_layer, far_layer

both = pytest.mark.parametrize("write", [reference.write_kv, triton_write], ids=["reference", "triton"])


def fused_rows(
    num_tokens: int, heads: Heads, dtype: torch.dtype, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V as slices of one wider row, as a fused projection would leave them."""
    row = torch.randn(num_tokens, heads.num_heads + 2 * heads.num_kv_heads, heads.head_dim, device=device).to(dtype)
    return row[:, heads.num_heads : -heads.num_kv_heads], row[:, -heads.num_kv_heads :]


def num_written(kv_layer: torch.Tensor) -> int:
    """Numbers in the whole pool around a layer."""
    pool = torch.empty(0, dtype=kv_layer.dtype, device=kv_layer.device).set_(kv_layer.untyped_storage())
    return int((~pool.isnan()).sum())


@both
@pytest.mark.parametrize("block_size", [8, 16, 32])
@pytest.mark.parametrize("heads", [Heads(4, 2, 32), Heads(3, 3, 80), Heads(8, 1, 128)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_writes_its_slots_and_no_others(
    write: WriteKv, heads: Heads, block_size: int, dtype: torch.dtype, device: torch.device
) -> None:
    """The pool starts as NaN: what is not written must still be NaN, in this layer and in its neighbours."""
    kv_layer = empty_layer(5, heads, block_size, dtype, device)
    key, value = fused_rows(11, heads, dtype, device)
    slots = torch.randperm(5 * block_size, device=device)[:11]

    write(key, value, kv_layer, slots)

    expected = torch.full_like(kv_layer, torch.nan)
    for token, slot in enumerate(slots.tolist()):
        expected[slot // block_size, 0, :, slot % block_size] = key[token]
        expected[slot // block_size, 1, :, slot % block_size] = value[token]
    torch.testing.assert_close(kv_layer, expected, rtol=0, atol=0, equal_nan=True)
    assert num_written(kv_layer) == 2 * 11 * heads.num_kv_heads * heads.head_dim


@both
@pytest.mark.parametrize("slots", [[3, -1, 20], [-1, -1, -1]])
def test_skips_slot_minus_one(write: WriteKv, slots: list[int], device: torch.device) -> None:
    heads = Heads(2, 2, 32)
    kv_layer = empty_layer(2, heads, 16, torch.float32, device)
    key, value = fused_rows(3, heads, torch.float32, device)
    write(key, value, kv_layer, torch.tensor(slots, device=device))
    written = kv_layer.isfinite().all(-1).all(2).all(1).flatten().nonzero().flatten()
    kept = [slot for slot in slots if slot >= 0]
    assert written.tolist() == kept
    assert num_written(kv_layer) == 2 * len(kept) * heads.num_kv_heads * heads.head_dim


@both
def test_writes_nothing_for_no_tokens(write: WriteKv, device: torch.device) -> None:
    heads = Heads(2, 2, 32)
    kv_layer = empty_layer(2, heads, 16, torch.float32, device)
    write(*fused_rows(0, heads, torch.float32, device), kv_layer, torch.empty(0, dtype=torch.int64, device=device))
    assert kv_layer.isnan().all()


@pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu writes that far for real")
def test_offsets_beyond_32_bits(tmp_path: Path) -> None:
    # A sparse file: 10 GB of zeros of which a few pages exist.
    memory = torch.from_file(str(tmp_path / "pool"), shared=True, size=FAR_SIZE, dtype=torch.float16)
    kv_layer, far_page = far_layer(memory)
    rows = torch.ones(1, 1, 32, dtype=torch.float16)
    triton_write(rows, rows, kv_layer, torch.tensor([far_page * 16 + 5]))
    assert kv_layer[far_page, :, :, 5].eq(1.0).all()
