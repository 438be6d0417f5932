"""Paged decode attention in Triton: one new token per sequence against its pages.

Flash-decoding: each sequence's visible tokens are cut into splits that run in parallel, so that one long sequence
fills a GPU; a second kernel merges the splits by their log-sum-exp. All heads of a group share one read of their KV.
Source: T. Dao, D. Haziza, F. Massa, G. Sizov, "Flash-Decoding for long-context inference", 2023.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.backend import AttentionVariant, KVPages
from kernels.int4 import load_tile

LOG2_E = tl.constexpr(1.4426950408889634)
TILE_LEN = 64
MIN_SPLIT_LEN = 4 * TILE_LEN
MAX_SPLITS = 128
PROGRAMS_PER_PROCESSOR = 4
MIN_DOT_ROWS = 16
INTERPRETED_PROCESSORS = 4
# Fusing is spelled out because its default differs between Triton's versions, and with it the numbers.
LAUNCH_OPTIONS = {"num_warps": 4, "num_stages": 3, "enable_fp_fusion": True}


@triton.jit
def attend_split(
    query_ptr,  # [num_seqs, num_heads, head_dim]
    kv_ptr,  # [num_pages, 2, num_kv_heads, block_size, head_dim]
    scales_ptr,  # [num_pages, 2, num_kv_heads, block_size] of codes, or None
    block_tables_ptr,  # [num_seqs, max_blocks] int32
    context_lens_ptr,  # [num_seqs] int32
    partial_ptr,  # [num_seqs, num_heads, num_splits, head_dim], each split's own attention
    log_sum_ptr,  # [num_seqs, num_heads, num_splits] float32, log2 of each split's sum of exponentials
    sinks_ptr,  # [num_heads] float32, or None
    turned_ptr,  # [num_seqs, num_heads, head_dim], queries for the first num_sinks tokens, or None
    key_scales_ptr,  # [num_pages, num_kv_heads, head_dim] of int4, or None, as the next three
    value_scales_ptr,  # [num_pages, num_kv_heads, block_size]
    open_ptr,  # [num_open, 2, num_kv_heads, block_size, head_dim]
    page_to_open_ptr,  # [num_pages] int32
    log2_scale,
    log2_soft_cap,  # or None
    window,
    num_sinks,
    query_seq_stride,
    query_head_stride,
    kv_page_stride,
    kv_plane_stride,
    kv_head_stride,
    kv_offset_stride,
    scales_page_stride,
    scales_plane_stride,
    scales_head_stride,
    open_page_stride,
    open_plane_stride,
    open_head_stride,
    table_seq_stride,
    GROUP_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    PADDED_GROUP: tl.constexpr,
    PADDED_DIM: tl.constexpr,
):
    # One program attends with the query heads of one KV head over one split of one sequence's visible tokens.
    seq = tl.program_id(0).to(tl.int64)
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    num_heads = tl.num_programs(1) * GROUP_SIZE
    num_splits = tl.num_programs(2)

    context_len = tl.load(context_lens_ptr + seq)
    first = tl.maximum(context_len - window, 0)
    split_len = tl.cdiv(tl.cdiv(context_len - first, num_splits), TILE) * TILE
    begin = first + split * split_len
    end = tl.minimum(begin + split_len, context_len)

    group = tl.arange(0, PADDED_GROUP)
    heads = kv_head * GROUP_SIZE + group
    dims = tl.arange(0, PADDED_DIM)
    in_group = (group < GROUP_SIZE)[:, None] & (dims < HEAD_DIM)[None, :]
    query_rows = query_ptr + seq * query_seq_stride + heads[:, None] * query_head_stride
    query = tl.load(query_rows + dims[None, :], mask=in_group, other=0.0)

    table_ptr = block_tables_ptr + seq * table_seq_stride
    head_ptr = kv_ptr + kv_head.to(tl.int64) * kv_head_stride
    running_max = tl.full([PADDED_GROUP], float("-inf"), tl.float32)
    running_sum = tl.zeros([PADDED_GROUP], tl.float32)
    if sinks_ptr is not None:
        # A sink is a token without a value, of the first split.
        holds_sink = group < tl.where(split == 0, GROUP_SIZE, 0)
        running_max = tl.load(sinks_ptr + heads, mask=holds_sink, other=float("-inf")) * LOG2_E
        running_sum = tl.where(holds_sink, 1.0, 0.0)
    attended = tl.zeros([PADDED_GROUP, PADDED_DIM], tl.float32)

    before = 0
    if turned_ptr is not None:
        # The first split begins with tiles of the sinks that are behind the window.
        sinks_end = tl.where(split == 0, tl.minimum(num_sinks, first), 0)
        before = tl.cdiv(sinks_end, TILE) * TILE
        own, turned_rows = query, turned_ptr + (seq * num_heads + heads[:, None]) * HEAD_DIM
        turned = tl.load(turned_rows + dims[None, :], mask=in_group, other=0.0)

    for tile_begin in range(begin - before, end, TILE):
        positions = tile_begin + tl.arange(0, TILE)
        live = positions < end
        if turned_ptr is not None:
            is_sinks = tile_begin < begin
            positions += tl.where(is_sinks, before - begin, 0)
            live = positions < tl.where(is_sinks, sinks_end, end)
            query = tl.where(is_sinks, turned, own)
        # Tokens past the end are never loaded: 0 * NaN is NaN, so a weight of 0 does not keep a stale V out.
        pages = tl.load(table_ptr + positions // BLOCK_SIZE, mask=live, other=0).to(tl.int64)
        rows = pages * kv_page_stride + positions % BLOCK_SIZE * kv_offset_stride
        loaded = live[:, None] & (dims < HEAD_DIM)[None, :]
        if key_scales_ptr is None:
            key_ptrs = head_ptr + rows[:, None] + dims[None, :]
            key = tl.load(key_ptrs, mask=loaded, other=0.0)
            value = tl.load(key_ptrs + kv_plane_stride, mask=loaded, other=0.0)
        else:
            is_open = positions >= (context_len - 1) // BLOCK_SIZE * BLOCK_SIZE
            places = tl.load(page_to_open_ptr + pages, mask=live & is_open, other=0).to(tl.int64)
            open_rows = places * open_page_stride + kv_head * open_head_stride + positions % BLOCK_SIZE * HEAD_DIM
            scale_rows = pages * scales_page_stride + kv_head.to(tl.int64) * scales_head_stride
            key_scale_ptrs = key_scales_ptr + scale_rows[:, None] + dims[None, :]
            key = load_tile(head_ptr, key_scale_ptrs, open_ptr, rows, open_rows, is_open, loaded, HEAD_DIM, PADDED_DIM)
            rows += kv_plane_stride
            open_rows += open_plane_stride
            scale_ptrs = (value_scales_ptr + scale_rows + positions % BLOCK_SIZE)[:, None]
            value = load_tile(head_ptr, scale_ptrs, open_ptr, rows, open_rows, is_open, loaded, HEAD_DIM, PADDED_DIM)

        # Codes are numbers of the query's dtype exactly, and scores take their scales. So do values, not weights: a
        # small weight times a small scale would be no normal number of float16.
        scores = tl.dot(query, tl.trans(key.to(query.dtype)), input_precision="ieee") * log2_scale
        if scales_ptr is not None:
            scale_ptrs = scales_ptr + pages * scales_page_stride + kv_head.to(tl.int64) * scales_head_stride
            scale_ptrs += positions % BLOCK_SIZE
            scores *= tl.load(scale_ptrs, mask=live, other=0.0).to(tl.float32)[None, :]
        if log2_soft_cap is not None:
            # A tanh that neither overflows nor depends on a library.
            scores = log2_soft_cap * (1.0 - 2.0 / (tl.exp(scores * (2.0 / log2_soft_cap)) + 1.0))
        scores = tl.where(live[None, :], scores, float("-inf"))
        tile_max = tl.maximum(running_max, tl.max(scores, 1))
        weights = tl.exp2(scores - tile_max[:, None])
        correction = tl.exp2(running_max - tile_max)
        running_sum = running_sum * correction + tl.sum(weights, 1)
        attended = attended * correction[:, None]
        if scales_ptr is not None:
            scales = tl.load(scale_ptrs + scales_plane_stride, mask=live, other=0.0).to(tl.float32)
            value = value.to(tl.float32) * scales[:, None]
        attended = tl.dot(weights.to(query.dtype), value.to(query.dtype), attended, input_precision="ieee")
        running_max = tile_max

    # A split of no tokens (a context shorter than its splits) leaves zeros of weight 2^-inf.
    divisor = tl.where(running_sum == 0.0, 1.0, running_sum)
    out_rows = (seq * num_heads + heads) * num_splits + split
    partial = attended / divisor[:, None]
    tl.store(partial_ptr + out_rows[:, None] * HEAD_DIM + dims[None, :], partial, mask=in_group)
    tl.store(log_sum_ptr + out_rows, running_max + tl.log2(divisor), mask=group < GROUP_SIZE)


@triton.jit
def merge_splits(
    partial_ptr,  # [num_seqs, num_heads, num_splits, head_dim] float32
    log_sum_ptr,  # [num_seqs, num_heads, num_splits] float32
    output_ptr,  # [num_seqs, num_heads, head_dim]
    num_splits,
    HEAD_DIM: tl.constexpr,
    PADDED_SPLITS: tl.constexpr,
    PADDED_DIM: tl.constexpr,
):
    # One program merges the splits of one head of one sequence.
    row = tl.program_id(0).to(tl.int64)
    splits = tl.arange(0, PADDED_SPLITS)
    dims = tl.arange(0, PADDED_DIM)
    is_split = splits < num_splits
    in_split = is_split[:, None] & (dims < HEAD_DIM)[None, :]
    split_rows = row * num_splits + splits

    log_sum = tl.load(log_sum_ptr + split_rows, mask=is_split, other=float("-inf"))
    partial = tl.load(partial_ptr + split_rows[:, None] * HEAD_DIM + dims[None, :], mask=in_split, other=0.0)

    largest = tl.max(log_sum, 0)
    # Of a sequence without tokens every split weighs 2^-inf; its partials are zeros already.
    weights = tl.exp2(log_sum - tl.where(largest == float("-inf"), 0.0, largest))
    total = tl.sum(weights, 0)
    merged = tl.sum(partial * weights[:, None], 0) / tl.where(total == 0.0, 1.0, total)
    tl.store(output_ptr + row * HEAD_DIM + dims, merged, mask=dims < HEAD_DIM)


def paged_decode_attention(
    query: Tensor,
    pages: KVPages,
    block_tables: Tensor,
    context_lens: Tensor,
    variant: AttentionVariant,
    turned: Tensor | None = None,
) -> Tensor:
    """Does as `kernels.reference.paged_decode_attention`, on the current GPU, accumulating in float32.

    `query`, `pages` and `block_tables` may have any strides in front of a contiguous last dimension. The number of
    splits follows from the shapes alone, never from the contexts' lengths: nothing waits for the GPU.
    """
    num_seqs, num_heads, head_dim = query.shape
    num_kv_heads, block_size = pages.data.shape[2:4]
    output = query.new_empty(query.shape)
    if num_seqs == 0:
        return output
    max_context_len = block_tables.shape[1] * block_size
    window = max_context_len if variant.window is None else min(variant.window, max_context_len)
    num_splits = choose_num_splits(num_seqs * num_kv_heads, window, _num_processors(query.device))

    # One split needs no merging: its own attention is the output.
    partial_shape = (num_seqs, num_heads, num_splits, head_dim)
    partial = output if num_splits == 1 else query.new_empty(partial_shape, dtype=torch.float32)
    log_sum = query.new_empty(partial_shape[:3], dtype=torch.float32)
    int4, scales = pages.int4, None if pages.int4 else pages.scales
    attend_split[(num_seqs, num_kv_heads, num_splits)](
        query,
        pages.data,
        scales,
        block_tables,
        context_lens,
        partial,
        log_sum,
        variant.sinks,
        turned.contiguous() if turned is not None and variant.num_sinks else None,
        *((int4.key_scales, pages.scales, int4.open, int4.page_to_open) if int4 else (None,) * 4),
        variant.scale * LOG2_E.value,
        None if variant.soft_cap is None else variant.soft_cap * LOG2_E.value,
        window,
        variant.num_sinks,
        *query.stride()[:2],
        *pages.data.stride()[:4],
        *_scale_strides(pages),
        *(int4.open.stride()[:3] if int4 else (0, 0, 0)),
        block_tables.stride(0),
        GROUP_SIZE=num_heads // num_kv_heads,
        HEAD_DIM=head_dim,
        BLOCK_SIZE=block_size,
        TILE=TILE_LEN,
        PADDED_GROUP=max(MIN_DOT_ROWS, triton.next_power_of_2(num_heads // num_kv_heads)),
        PADDED_DIM=triton.next_power_of_2(head_dim),
        **LAUNCH_OPTIONS,
    )
    if num_splits > 1:
        merge_splits[(num_seqs * num_heads,)](
            partial,
            log_sum,
            output,
            num_splits,
            HEAD_DIM=head_dim,
            PADDED_SPLITS=triton.next_power_of_2(num_splits),
            PADDED_DIM=triton.next_power_of_2(head_dim),
            **LAUNCH_OPTIONS,
        )
    return output


def _scale_strides(pages: KVPages) -> tuple[int, int, int]:
    """Tells how many numbers the scales of pages, planes and heads are apart."""
    if pages.scales is None:
        return 0, 0, 0
    page, plane, head = pages.scales.stride()[:3]
    return (page, plane, head) if pages.int4 is None else (page, 0, plane)


def choose_num_splits(num_rows: int, max_visible_len: int, num_processors: int) -> int:
    """Splits per row (sequence and KV head) that fill `num_processors`, none of them shorter than pays."""
    wanted: int = triton.cdiv(PROGRAMS_PER_PROCESSOR * num_processors, num_rows)
    worthwhile: int = triton.cdiv(max_visible_len, MIN_SPLIT_LEN)
    return max(1, min(wanted, worthwhile, MAX_SPLITS))


@lru_cache
def _num_processors(device: torch.device) -> int:
    if device.type != "cuda":
        return INTERPRETED_PROCESSORS
    return int(torch.cuda.get_device_properties(device).multi_processor_count)
