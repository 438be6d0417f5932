"""Decode attention, in torch, Triton and C++ alike, against dense attention over contiguous KV."""

import math
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels import reference
from kernels.attention.decode import paged_decode_attention
from kernels.backend import AttentionVariant, KVPages, Scores
from tests.kernels.backends import DECODES, PagedDecodeAttention
from tests.kernels.paged_batch import (
    EXTRAS,
    FAR_SIZE,
    FLOAT32_TOLERANCE,
    Heads,
    PagedBatch,
    dense_attention,
    empty_codes,
    empty_layer,
    far_layer,
    make_paged_batch,
)

HALVES = ((torch.float16, 2e-3), (torch.bfloat16, 1.6e-2))
GROUPED, SINGLE_KEY, FULL = Heads(4, 2, 32), Heads(3, 1, 32), Heads(2, 2, 32)

each = pytest.mark.parametrize("decode", DECODES.values(), ids=DECODES)


def dense_decode(batch: PagedBatch, query: torch.Tensor, variant: AttentionVariant) -> torch.Tensor:
    rows = [
        dense_attention(query[seq : seq + 1], key, value, variant)
        for seq, (key, value) in enumerate(zip(batch.keys, batch.values, strict=True))
    ]
    return torch.cat(rows).to(query)


def check(
    decode: PagedDecodeAttention,
    batch: PagedBatch,
    variant: AttentionVariant | None = None,
    tolerance: float = FLOAT32_TOLERANCE,
) -> None:
    query, variant = batch.random_query(len(batch.keys)), variant or batch.variant()
    actual = decode(query, batch.pages, batch.block_tables, batch.context_lens, variant)
    torch.testing.assert_close(actual, dense_decode(batch, query, variant), atol=tolerance, rtol=tolerance)


@each
@pytest.mark.parametrize("heads", [GROUPED, SINGLE_KEY, FULL], ids=["gqa", "mqa", "mha"])
@pytest.mark.parametrize("block_size", [8, 16, 32])
def test_equals_dense_attention(
    decode: PagedDecodeAttention, heads: Heads, block_size: int, device: torch.device
) -> None:
    """The pool is NaN wherever no sequence of the batch has a token, so this is the poison test, too."""
    check(decode, make_paged_batch(heads, [1, 15, 16, 17, 100], block_size, device=device))


@each
@pytest.mark.parametrize("kept", ["int8", "fp8", "int4"])
@pytest.mark.parametrize("heads", [GROUPED, Heads(3, 1, 80), Heads(2, 2, 128)], ids=["gqa", "mqa", "mha"])
@pytest.mark.parametrize("block_size", [8, 16, 32])
def test_equals_dense_attention_over_what_codes_stand_for(
    decode: PagedDecodeAttention, heads: Heads, block_size: int, kept: str, device: torch.device
) -> None:
    """Scales are NaN wherever no sequence of the batch has a token."""
    batch = make_paged_batch(heads, [1, 15, 16, 17, 100, 700], block_size, device=device, kept=kept)
    check(decode, batch)
    check(decode, batch, batch.variant(33, 1.5, 2.0))


@each
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, FLOAT32_TOLERANCE), *HALVES])
def test_int4_reads_its_own_block_as_it_is_and_the_others_as_codes(
    decode: PagedDecodeAttention, dtype: torch.dtype, tolerance: float, device: torch.device
) -> None:
    """Open blocks are NaN but for each sequence's own, and the codes of that are made so, too."""
    batch = make_paged_batch(GROUPED, [1, 16, 17, 64, 100], 16, dtype, device, "int4")
    assert batch.pages.int4 is not None
    assert batch.pages.scales is not None
    own = [
        int(table[(length - 1) // 16]) for table, length in zip(batch.block_tables, (1, 16, 17, 64, 100), strict=True)
    ]
    opened = batch.pages.int4.open[batch.pages.int4.page_to_open[own]]
    batch.pages.int4.open.fill_(torch.nan)
    batch.pages.int4.open[batch.pages.int4.page_to_open[own]] = opened
    batch.pages.scales[own], batch.pages.int4.key_scales[own] = torch.nan, torch.nan
    check(decode, batch, tolerance=tolerance)


@each
@pytest.mark.parametrize("kept", ["int8", "fp8"])
def test_small_values_beside_a_sink(decode: PagedDecodeAttention, kept: str, device: torch.device) -> None:
    """A small weight times a small scale would be no normal number of float16."""
    keys, values = torch.zeros(2048, 64), torch.full((2048, 64), 0.05)
    keys[0, 0], values[0] = 72.0, 0.0
    data = torch.stack([keys, values]).view(2, 1, 128, 16, 64).permute(2, 0, 1, 3, 4).half().contiguous()
    pages = empty_codes(128, Heads(4, 1, 64), 16, kept, device)
    assert pages.scales is not None
    codes, scales = reference.quantize(data, pages.data.dtype)
    pages.data.copy_(codes)
    pages.scales.copy_(scales)
    query = torch.zeros(1, 4, 64, dtype=torch.float16, device=device)
    query[..., 0] = 1.0
    tables = torch.arange(128, dtype=torch.int32, device=device)[None]
    lens = torch.tensor([2048], dtype=torch.int32, device=device)
    attended = decode(query, pages, tables, lens, AttentionVariant(64**-0.5))
    weight = 2047 / (2047 + math.exp(9.0))
    torch.testing.assert_close(attended[..., 5].float().cpu(), torch.full((1, 4), 0.05 * weight), rtol=0.02, atol=0.0)


@pytest.mark.skipif("cpu" not in DECODES, reason="needs the C++ kernels")
def test_threads_keep_memory_for_any_number_of_heads_of_any_dtype(device: torch.device) -> None:
    for heads, dtype, tolerance in (
        (Heads(8, 8, 32), torch.float32, FLOAT32_TOLERANCE),
        (Heads(1, 1, 32), torch.float16, 1e-2),
        (Heads(8, 8, 32), torch.float32, FLOAT32_TOLERANCE),
    ):
        check(DECODES["cpu"], make_paged_batch(heads, [100] * 32, 16, dtype, device), tolerance=tolerance)


@each
@pytest.mark.parametrize("sliding_window", [1, 5, 16, 33, 1000])
def test_sees_the_window_only(decode: PagedDecodeAttention, sliding_window: int, device: torch.device) -> None:
    batch = make_paged_batch(GROUPED, [1, 16, 33, 100], 16, device=device)
    check(decode, batch, batch.variant(sliding_window))


@each
@pytest.mark.parametrize(("soft_cap", "sink"), EXTRAS)
@pytest.mark.parametrize("sliding_window", [None, 300])
@pytest.mark.parametrize("heads", [Heads(4, 2, 64), Heads(3, 1, 96), Heads(2, 2, 256)], ids=["gqa", "mqa", "mha"])
def test_soft_caps_and_sinks(
    decode: PagedDecodeAttention,
    heads: Heads,
    sliding_window: int | None,
    soft_cap: float | None,
    sink: float | None,
    device: torch.device,
) -> None:
    """Contexts of one piece, of several, and of several segments or splits: a sink counts once in each."""
    for context_lens in ([1000, 3, 257], [1, 15, 100]):
        batch = make_paged_batch(heads, context_lens, 16, device=device)
        check(decode, batch, batch.variant(sliding_window, soft_cap, sink))


@each
@pytest.mark.parametrize("head_dim", [64, 80, 96, 128])
def test_any_head_size(decode: PagedDecodeAttention, head_dim: int, device: torch.device) -> None:
    check(decode, make_paged_batch(Heads(2, 1, head_dim), [7, 40], 16, device=device))


@each
@pytest.mark.parametrize(("dtype", "tolerance"), HALVES)
@pytest.mark.parametrize("kept", ["none", "int8", "fp8", "int4"])
def test_half_precision(
    decode: PagedDecodeAttention, dtype: torch.dtype, tolerance: float, kept: str, device: torch.device
) -> None:
    batch = make_paged_batch(GROUPED, [3, 50, 300], 16, dtype, device, kept)
    check(decode, batch, tolerance=tolerance)
    check(decode, batch, batch.variant(33, 1.5, 2.0), tolerance)


@each
@pytest.mark.parametrize("sliding_window", [None, 300])
def test_long_contexts_beside_short_ones(
    decode: PagedDecodeAttention, sliding_window: int | None, device: torch.device
) -> None:
    """The kernel cuts all of them into the same number of splits: most of a short context's are empty."""
    batch = make_paged_batch(GROUPED, [1000, 3, 257], 16, device=device)
    check(decode, batch, batch.variant(sliding_window))


@each
@pytest.mark.parametrize("max_blocks", [1, 100], ids=["one split", "many splits"])
@pytest.mark.parametrize("sinks", [None, torch.zeros(4)], ids=["no sinks", "sinks"])
def test_a_sequence_of_no_tokens_gets_zeros(
    decode: PagedDecodeAttention, max_blocks: int, sinks: torch.Tensor | None, device: torch.device
) -> None:
    kv_layer = empty_layer(2, GROUPED, 16, torch.float32, device)
    tables = torch.zeros(1, max_blocks, dtype=torch.int32, device=device)
    lens = torch.zeros(1, dtype=torch.int32, device=device)
    variant = AttentionVariant(1.0, scores=Scores(sinks=None if sinks is None else sinks.to(device)))
    output = decode(torch.randn(1, 4, 32, device=device), KVPages(kv_layer), tables, lens, variant)
    assert output.count_nonzero() == 0


@each
def test_a_batch_of_no_sequences(decode: PagedDecodeAttention, device: torch.device) -> None:
    batch = make_paged_batch(GROUPED, [5], 16, device=device)
    output = decode(batch.random_query(0), batch.pages, batch.block_tables[:0], batch.context_lens[:0], batch.variant())
    assert output.shape == (0, 4, 32)


@each
def test_poison_in_a_seen_token_shows(decode: PagedDecodeAttention, device: torch.device) -> None:
    """What the other tests stand on: NaN is in the pool, and a kernel that read one token too many would return it."""
    batch = make_paged_batch(GROUPED, [17], 16, device=device)
    query = batch.random_query(1)
    output = decode(query, batch.pages, batch.block_tables, batch.context_lens + 1, batch.variant())
    assert output.isnan().all()


@settings(max_examples=12, deadline=None)
@given(
    num_kv_heads=st.integers(1, 3),
    group_size=st.integers(1, 5),
    block_size=st.sampled_from([8, 16, 32]),
    context_lens=st.lists(st.integers(1, 90), min_size=1, max_size=3),
    sliding_window=st.none() | st.integers(1, 100),
)
def test_random_shapes(
    num_kv_heads: int, group_size: int, block_size: int, context_lens: list[int], sliding_window: int | None
) -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    heads = Heads(num_kv_heads * group_size, num_kv_heads, 32)
    batch = make_paged_batch(heads, context_lens, block_size, device=device)
    for decode in DECODES.values():
        check(decode, batch, batch.variant(sliding_window))


@pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu reads that far for real")
def test_offsets_beyond_32_bits(tmp_path: Path) -> None:
    # A sparse file: 10 GB of zeros of which a few pages exist.
    memory = torch.from_file(str(tmp_path / "pool"), shared=True, size=FAR_SIZE, dtype=torch.float16)
    kv_layer, far_page = far_layer(memory)
    kv_layer[far_page] = 1.0
    tables, lens = torch.tensor([[far_page]], dtype=torch.int32), torch.tensor([16], dtype=torch.int32)
    query = torch.ones(1, 1, 32, dtype=torch.float16)
    output = paged_decode_attention(query, KVPages(kv_layer), tables, lens, AttentionVariant(1.0))
    assert output.eq(1.0).all()
