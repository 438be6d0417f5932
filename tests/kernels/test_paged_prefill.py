"""Prefill attention over pages against dense causal attention over contiguous KV."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.backend import AttentionVariant
from kernels.reference import paged_decode_attention
from tests.kernels.backends import PREFILLS, PagedPrefillAttention
from tests.kernels.paged_batch import EXTRAS, FLOAT32_TOLERANCE, Heads, PagedBatch, dense_attention, make_paged_batch

GROUPED = Heads(4, 2, 32)

each = pytest.mark.parametrize("attend", PREFILLS.values(), ids=PREFILLS)


def prefill(
    attend: PagedPrefillAttention,
    batch: PagedBatch,
    query: torch.Tensor,
    query_lens: list[int],
    variant: AttentionVariant,
) -> torch.Tensor:
    starts = torch.tensor([0, *query_lens], device=query.device).cumsum(0, dtype=torch.int32)
    return attend(query, batch.pages, batch.block_tables, batch.context_lens, starts, variant)


def check(
    attend: PagedPrefillAttention,
    batch: PagedBatch,
    query_lens: list[int],
    variant: AttentionVariant | None = None,
    tolerance: float = FLOAT32_TOLERANCE,
) -> None:
    query, variant = batch.random_query(sum(query_lens)), variant or batch.variant()
    rows = [
        dense_attention(own, key, value, variant)
        for own, key, value in zip(query.split(query_lens), batch.keys, batch.values, strict=True)
    ]
    expected = torch.cat(rows).to(query)
    actual = prefill(attend, batch, query, query_lens, variant)
    torch.testing.assert_close(actual, expected, atol=tolerance, rtol=tolerance)


@each
@pytest.mark.parametrize("sliding_window", [None, 1, 7, 16, 40, 1000])
def test_chunks_see_the_chunks_before_them(
    attend: PagedPrefillAttention, sliding_window: int | None, device: torch.device
) -> None:
    batch = make_paged_batch(GROUPED, [100, 33, 16, 50], 16, device=device)
    check(attend, batch, [36, 1, 16, 20], batch.variant(sliding_window))


@each
@pytest.mark.parametrize(("soft_cap", "sink"), EXTRAS)
@pytest.mark.parametrize("sliding_window", [None, 40])
@pytest.mark.parametrize("heads", [Heads(4, 2, 64), Heads(3, 1, 96), Heads(2, 2, 256)], ids=["gqa", "mqa", "mha"])
def test_soft_caps_and_sinks(
    attend: PagedPrefillAttention,
    heads: Heads,
    sliding_window: int | None,
    soft_cap: float | None,
    sink: float | None,
    device: torch.device,
) -> None:
    batch = make_paged_batch(heads, [300, 33, 16, 50], 16, device=device)
    check(attend, batch, [66, 1, 16, 20], batch.variant(sliding_window, soft_cap, sink))


@each
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float16, 2e-3), (torch.bfloat16, 1.6e-2)])
def test_half_precision(
    attend: PagedPrefillAttention, dtype: torch.dtype, tolerance: float, device: torch.device
) -> None:
    check(attend, make_paged_batch(GROUPED, [50, 9], 16, dtype, device), [20, 9], tolerance=tolerance)


@each
def test_a_sequence_without_queries_is_passed_over(attend: PagedPrefillAttention, device: torch.device) -> None:
    check(attend, make_paged_batch(GROUPED, [20, 30, 9], 16, device=device), [5, 0, 9])


@each
@pytest.mark.parametrize("sliding_window", [None, 12])
def test_chunk_by_chunk_equals_at_once(
    attend: PagedPrefillAttention, sliding_window: int | None, device: torch.device
) -> None:
    batch = make_paged_batch(GROUPED, [90], 16, device=device)
    query = batch.random_query(90)
    at_once = prefill(attend, batch, query, [90], batch.variant(sliding_window))
    for start, end in [(0, 40), (40, 56), (56, 90)]:
        upto = PagedBatch(
            batch.heads, batch.dtype, batch.pages, batch.block_tables, batch.context_lens * 0 + end, [], []
        )
        chunk = prefill(attend, upto, query[start:end], [end - start], batch.variant(sliding_window))
        torch.testing.assert_close(chunk, at_once[start:end], atol=FLOAT32_TOLERANCE, rtol=FLOAT32_TOLERANCE)


@each
@pytest.mark.parametrize("sliding_window", [None, 12])
def test_one_query_each_equals_decode(
    attend: PagedPrefillAttention, sliding_window: int | None, device: torch.device
) -> None:
    batch = make_paged_batch(GROUPED, [1, 30, 47], 16, device=device)
    query = batch.random_query(3)
    variant = batch.variant(sliding_window)
    decoded = paged_decode_attention(query, batch.pages, batch.block_tables, batch.context_lens, variant)
    prefilled = prefill(attend, batch, query, [1, 1, 1], variant)
    torch.testing.assert_close(prefilled, decoded, atol=FLOAT32_TOLERANCE, rtol=FLOAT32_TOLERANCE)


@settings(max_examples=15, deadline=None)
@given(
    num_kv_heads=st.integers(1, 3),
    group_size=st.integers(1, 4),
    block_size=st.sampled_from([8, 16, 32]),
    lens=st.lists(st.tuples(st.integers(0, 60), st.integers(1, 60)), min_size=1, max_size=4),
    sliding_window=st.none() | st.integers(1, 130),
)
def test_random_shapes(
    num_kv_heads: int, group_size: int, block_size: int, lens: list[tuple[int, int]], sliding_window: int | None
) -> None:
    heads = Heads(num_kv_heads * group_size, num_kv_heads, 32)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    batch = make_paged_batch(heads, [computed + chunk for computed, chunk in lens], block_size, device=device)
    for attend in PREFILLS.values():
        check(attend, batch, [chunk for _, chunk in lens], batch.variant(sliding_window))
