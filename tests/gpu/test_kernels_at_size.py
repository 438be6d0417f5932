"""The compiled kernels at the sizes of real models, against the torch references on the same GPU."""

import pytest
import torch

from kernels import reference
from kernels.attention.decode import paged_decode_attention
from kernels.backend import AttentionVariant, KVPages
from tests.kernels.backends import triton_write
from tests.kernels.paged_batch import (
    FAR_SIZE,
    Heads,
    PagedBatch,
    dense_attention,
    empty_layer,
    far_layer,
    make_paged_batch,
)

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

LLAMA_8B, QWEN_0_5B, PHI_2, MULTI_QUERY = Heads(32, 8, 128), Heads(14, 2, 64), Heads(32, 32, 80), Heads(71, 1, 64)
MIXED_LENS = [1, 15, 16, 17, 100, 1000, 2049, 4096]
TOLERANCES = {torch.bfloat16: 1e-2, torch.float16: 2e-3, torch.float32: 1e-4}
MODELS = pytest.mark.parametrize(
    "heads", [LLAMA_8B, QWEN_0_5B, PHI_2, MULTI_QUERY], ids=["llama-8b", "qwen-0.5b", "phi-2", "mqa"]
)
DTYPES = pytest.mark.parametrize("dtype", TOLERANCES)


def check_decode(batch: PagedBatch, sliding_window: int | None = None) -> None:
    query = batch.random_query(len(batch.keys))
    args = (query, batch.pages, batch.block_tables, batch.context_lens, batch.variant(sliding_window))
    decoded, expected = paged_decode_attention(*args), reference.paged_decode_attention(*args)
    tolerance = TOLERANCES[query.dtype]
    torch.testing.assert_close(decoded, expected, atol=tolerance, rtol=tolerance)


@MODELS
@DTYPES
def test_decode_of_a_mixed_batch(heads: Heads, dtype: torch.dtype, device: torch.device) -> None:
    check_decode(make_paged_batch(heads, MIXED_LENS, 16, dtype, device))


@pytest.mark.parametrize("block_size", [8, 32, 64])
def test_decode_with_other_block_sizes(block_size: int, device: torch.device) -> None:
    check_decode(make_paged_batch(LLAMA_8B, MIXED_LENS, block_size, torch.bfloat16, device))


@DTYPES
def test_decode_of_one_long_context(dtype: torch.dtype, device: torch.device) -> None:
    """Split as far as the kernel ever splits."""
    check_decode(make_paged_batch(LLAMA_8B, [32_768], 16, dtype, device))


@DTYPES
def test_decode_of_a_large_batch(dtype: torch.dtype, device: torch.device) -> None:
    """One split each: no merging."""
    check_decode(make_paged_batch(LLAMA_8B, [1 + 7 * seq for seq in range(128)], 16, dtype, device))


@DTYPES
@pytest.mark.parametrize("sliding_window", [1, 100, 1024, 4096])
def test_decode_in_a_window(dtype: torch.dtype, sliding_window: int, device: torch.device) -> None:
    check_decode(make_paged_batch(LLAMA_8B, [50, 1025, 8000], 16, dtype, device), sliding_window)


@MODELS
@DTYPES
def test_write_lands_in_its_slots(heads: Heads, dtype: torch.dtype, device: torch.device) -> None:
    num_pages, block_size, num_tokens = 600, 16, 8192
    row = torch.randn(num_tokens, 3 * heads.num_kv_heads, heads.head_dim, device=device).to(dtype)
    key, value = row[:, heads.num_kv_heads : 2 * heads.num_kv_heads], row[:, 2 * heads.num_kv_heads :]
    slots = torch.randperm(num_pages * block_size, device=device)[:num_tokens]
    slots[::7] = -1
    written, expected = (empty_layer(num_pages, heads, block_size, dtype, device) for _ in range(2))
    triton_write(key, value, written, slots)
    reference.write_kv(key, value, expected, slots)
    torch.testing.assert_close(written, expected, rtol=0, atol=0, equal_nan=True)


@DTYPES
@pytest.mark.parametrize("sliding_window", [None, 512])
def test_prefill_of_chunks(dtype: torch.dtype, sliding_window: int | None, device: torch.device) -> None:
    """The torch reference serves prefill on a GPU, too; its own oracle is dense attention in float64."""
    query_lens = [512, 1, 300]
    batch = make_paged_batch(LLAMA_8B, [1500, 700, 300], 16, dtype, device)
    query = batch.random_query(sum(query_lens))
    starts = torch.tensor([0, *query_lens], device=device).cumsum(0, dtype=torch.int32)
    prefilled = reference.paged_prefill_attention(
        query, batch.pages, batch.block_tables, batch.context_lens, starts, batch.variant(sliding_window)
    )
    rows = [
        dense_attention(own, key, value, batch.variant(sliding_window))
        for own, key, value in zip(query.split(query_lens), batch.keys, batch.values, strict=True)
    ]
    tolerance = TOLERANCES[dtype]
    torch.testing.assert_close(prefilled, torch.cat(rows).to(dtype), atol=tolerance, rtol=tolerance)


def test_write_and_decode_beyond_32_bit_offsets(device: torch.device) -> None:
    if torch.cuda.mem_get_info()[0] < 12 << 30:
        pytest.skip("needs 12 GB of free device memory")
    kv_layer, far_page = far_layer(torch.zeros(FAR_SIZE, dtype=torch.float16, device=device))
    rows = torch.ones(16, 1, 32, dtype=torch.float16, device=device)
    triton_write(rows, rows, kv_layer, torch.arange(16, device=device) + far_page * 16)
    assert kv_layer[far_page].eq(1.0).all()
    tables = torch.tensor([[far_page]], dtype=torch.int32, device=device)
    lens = torch.tensor([16], dtype=torch.int32, device=device)
    assert paged_decode_attention(rows[:1], KVPages(kv_layer), tables, lens, AttentionVariant(1.0)).eq(1.0).all()
