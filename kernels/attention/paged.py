"""Paged attention in Triton: a batch's query rows over the pages of their sequences, in one kernel.

Rows are tokens times the query heads of one KV head, so that a tile of keys and values is read once for all of them.
Chunks of prompts have tiles of many tokens; decoding rows have one token a tile, and their visible tokens are cut into
splits that run in parallel. Source: T. Dao, "FlashAttention-2", arXiv 2307.08691.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
import triton
import triton.language as tl
from torch import Tensor

from kernels.attention.int4_pages import load_tile
from kernels.attention.widening import widen, widens_by_integers
from kernels.backend import AttentionVariant, KVPages
from kernels.products.dependent_launch import dependent, wait_for_earlier
from kernels.tiles import Tile

LOG2_E = tl.constexpr(1.4426950408889634)
MAX_SPLITS = 32
MIN_SPLIT_LEN = 256
# Fusing is spelled out because its default differs between Triton's versions, and with it the numbers.
FUSING = {"enable_fp_fusion": True}


@triton.jit
def find_sequence(cu_query_lens_ptr, program, first_seq, end_seq, TOKENS: tl.constexpr):
    """Finds the sequence that a program's tile belongs to; a sequence may have two tiles that are not full."""
    low, high = first_seq, end_seq
    first_row = tl.load(cu_query_lens_ptr + first_seq)
    while high - low > 1:
        middle = (low + high) // 2
        start = (tl.load(cu_query_lens_ptr + middle) - first_row) // TOKENS + 2 * (middle - first_seq)
        is_before = start <= program
        low = tl.where(is_before, middle, low)
        high = tl.where(is_before, high, middle)
    start = (tl.load(cu_query_lens_ptr + low) - first_row) // TOKENS + 2 * (low - first_seq)
    return low, program - start


@triton.jit
def find_split_len(visible, MAX_SPLITS: tl.constexpr, MIN_SPLIT_LEN: tl.constexpr):
    """Computes a split's length from the tokens that a row sees, the same on all architectures; tiles divide it."""
    return tl.maximum(tl.cdiv(tl.cdiv(visible, MAX_SPLITS), MIN_SPLIT_LEN), 1) * MIN_SPLIT_LEN


# Numbers of a step are not specialized: a launch would else compile one more kernel where one is 1 or a multiple of 16.
@triton.jit(do_not_specialize=["window", "first_seq", "end_seq", "table_seq_stride"])
def attend(
    query_ptr,  # [num_rows, num_heads, head_dim]
    kv_ptr,  # [num_pages, 2, num_kv_heads, block_size, head_dim]
    scales_ptr,  # [num_pages, 2, num_kv_heads, block_size] of codes, or None
    block_tables_ptr,  # [num_seqs, max_blocks] int32
    context_lens_ptr,  # [num_seqs] int32
    cu_query_lens_ptr,  # [num_seqs + 1] int32, or None: sequence s has row s
    output_ptr,  # [num_rows, num_heads, num_splits, head_dim], each split's own attention
    log_sum_ptr,  # [num_rows, num_heads, num_splits] float32, log2 of a split's sum of exponentials; None of one
    sinks_ptr,  # [num_heads] float32, or None
    turned_ptr,  # [num_rows, num_heads, head_dim], queries for the first num_sinks tokens, or None
    key_scales_ptr,  # [num_pages, num_kv_heads, head_dim] of int4, or None, as the next three
    value_scales_ptr,  # [num_pages, num_kv_heads, block_size]
    open_ptr,  # [num_open, 2, num_kv_heads, block_size, head_dim]
    page_to_open_ptr,  # [num_pages] int32
    log2_scale,
    log2_soft_cap,  # or None
    window,
    num_sinks,
    first_seq,
    end_seq,
    query_row_stride,
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
    TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
    MIN_SPLIT_LEN: tl.constexpr,
    BY_INTEGERS: tl.constexpr,
):
    # One program attends with TOKENS tokens of a sequence, in the heads of one KV head, over one split of its context.
    wait_for_earlier()
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    num_heads = tl.num_programs(1) * GROUP_SIZE
    num_splits = tl.num_programs(2)
    if cu_query_lens_ptr is None:
        seq = first_seq + tl.program_id(0)
        context_len = tl.load(context_lens_ptr + seq)
        first_row, first_position = seq, context_len - 1
        tile_start, tile_end = first_position, context_len
    else:
        # Tiles start at positions that are multiples of TOKENS: with int4, a tile is in one block.
        # The last tiles, which see the most keys, come first: short ones fill up the end.
        program = tl.num_programs(0) - 1 - tl.program_id(0)
        seq, tile = find_sequence(cu_query_lens_ptr, program, first_seq, end_seq, TOKENS)
        context_len = tl.load(context_lens_ptr + seq)
        first_row = tl.load(cu_query_lens_ptr + seq)
        first_position = context_len - tl.load(cu_query_lens_ptr + seq + 1) + first_row
        aligned = (first_position // TOKENS + tile) * TOKENS
        tile_start, tile_end = tl.maximum(aligned, first_position), tl.minimum(aligned + TOKENS, context_len)
        if tile_start >= tile_end:
            return

    # Keys are visited in tiles from a multiple of KEYS on, whatever tile a row is in.
    begin = tl.maximum(tile_start - window + 1, 0)
    end = tile_end
    if cu_query_lens_ptr is None:
        split_len = find_split_len(end - begin, MAX_SPLITS, MIN_SPLIT_LEN)
        begin += split * split_len
        end = tl.minimum(begin + split_len, end)
        if (split > 0) & (begin >= end):
            return
    else:
        begin = begin // KEYS * KEYS

    rows = tl.arange(0, ROWS)
    heads = kv_head * GROUP_SIZE + rows % GROUP_SIZE
    positions = tile_start + rows // GROUP_SIZE
    is_row = (rows < TOKENS * GROUP_SIZE) & (positions < tile_end)
    dims = tl.arange(0, PADDED_DIM)
    present = is_row[:, None] & (dims < HEAD_DIM)[None, :]
    row_numbers = (first_row + positions - first_position).to(tl.int64)
    query_ptrs = query_ptr + row_numbers * query_row_stride + heads * query_head_stride
    query = tl.load(query_ptrs[:, None] + dims[None, :], mask=present, other=0.0)

    table_ptr = block_tables_ptr + seq.to(tl.int64) * table_seq_stride
    head_ptr = kv_ptr + kv_head.to(tl.int64) * kv_head_stride
    running_max = tl.full([ROWS], float("-inf"), tl.float32)
    running_sum = tl.zeros([ROWS], tl.float32)
    if sinks_ptr is not None:
        # A sink is a token without a value, of the first split.
        holds_sink = is_row & (rows < tl.where(split == 0, ROWS, 0))
        running_max = tl.load(sinks_ptr + heads, mask=holds_sink, other=float("-inf")) * LOG2_E
        running_sum = tl.where(holds_sink, 1.0, 0.0)
    attended = tl.zeros([ROWS, PADDED_DIM], tl.float32)

    before = 0
    if turned_ptr is not None:
        # The first split begins with tiles of the sinks that are behind the window of its last row.
        sinks_end = tl.where(split == 0, tl.minimum(num_sinks, tl.maximum(tile_end - window, 0)), 0)
        before = tl.cdiv(sinks_end, KEYS) * KEYS
        own, turned_ptrs = query, turned_ptr + (row_numbers * num_heads + heads) * HEAD_DIM
        turned = tl.load(turned_ptrs[:, None] + dims[None, :], mask=present, other=0.0)

    # Keys before `clear_end` are seen by all rows: their tiles need no mask.
    clear_end = begin
    if turned_ptr is None and key_scales_ptr is None:
        num_clear = tl.maximum(tl.minimum(tile_start + 1, end) - begin, 0) // KEYS * KEYS
        if cu_query_lens_ptr is None:
            clear_end += num_clear
        else:
            clear_end += tl.where(window >= tile_end, num_clear, 0)
    for is_masked in tl.static_range(2):
        if is_masked:
            from_key, to_key = clear_end - before, end
        else:
            from_key, to_key = begin, clear_end
        for tile_begin in range(from_key, to_key, KEYS):
            columns = tile_begin + tl.arange(0, KEYS)
            live = columns < end
            if is_masked:
                seen = (columns[None, :] <= positions[:, None]) & (columns[None, :] > positions[:, None] - window)
                if turned_ptr is not None:
                    is_sinks = tile_begin < begin
                    columns += tl.where(is_sinks, before - begin, 0)
                    live = columns < tl.where(is_sinks, sinks_end, end)
                    seen = tl.where(is_sinks, columns[None, :] <= positions[:, None] - window, seen)
                    query = tl.where(is_sinks, turned, own)
                seen = seen & live[None, :]
            # Tokens past the end are never loaded: 0 * NaN is NaN, so a weight of 0 does not keep a stale V out.
            pages = tl.load(table_ptr + columns // BLOCK_SIZE, mask=live, other=0).to(tl.int64)
            kv_rows = pages * kv_page_stride + columns % BLOCK_SIZE * kv_offset_stride
            loaded = live[:, None] & (dims < HEAD_DIM)[None, :]
            if key_scales_ptr is None:
                key_ptrs = head_ptr + kv_rows[:, None] + dims[None, :]
                key = tl.load(key_ptrs, mask=loaded, other=0.0)
                value = tl.load(key_ptrs + kv_plane_stride, mask=loaded, other=0.0)
            else:
                is_open = columns >= tile_start // BLOCK_SIZE * BLOCK_SIZE
                places = tl.load(page_to_open_ptr + pages, mask=live & is_open, other=0).to(tl.int64)
                open_rows = places * open_page_stride + kv_head * open_head_stride + columns % BLOCK_SIZE * HEAD_DIM
                scale_rows = pages * scales_page_stride + kv_head.to(tl.int64) * scales_head_stride
                key_scale_ptrs = key_scales_ptr + scale_rows[:, None] + dims[None, :]
                key = load_tile(
                    head_ptr, key_scale_ptrs, open_ptr, kv_rows, open_rows, is_open, loaded, HEAD_DIM, PADDED_DIM
                )
                kv_rows += kv_plane_stride
                open_rows += open_plane_stride
                scale_ptrs = (value_scales_ptr + scale_rows + columns % BLOCK_SIZE)[:, None]
                value = load_tile(
                    head_ptr, scale_ptrs, open_ptr, kv_rows, open_rows, is_open, loaded, HEAD_DIM, PADDED_DIM
                )

            # Codes are numbers of the query's dtype exactly; products take their scales.
            scores = tl.dot(query, tl.trans(widen(key, query.dtype, BY_INTEGERS)), input_precision="ieee")
            if scales_ptr is not None:
                scale_ptrs = scales_ptr + pages * scales_page_stride + kv_head.to(tl.int64) * scales_head_stride
                scale_ptrs += columns % BLOCK_SIZE
                scores *= tl.load(scale_ptrs, mask=live, other=0.0).to(tl.float32)[None, :]
            factor = log2_scale
            if log2_soft_cap is not None:
                # A tanh that neither overflows nor depends on a library.
                scores = log2_soft_cap * (1.0 - 2.0 / (tl.exp(scores * log2_scale * (2.0 / log2_soft_cap)) + 1.0))
                factor = 1.0
            if is_masked:
                scores = tl.where(seen, scores, float("-inf"))
            tile_max = tl.maximum(running_max, tl.max(scores, 1) * factor)
            # A row that has seen no token yet has no finite maximum.
            shift = tl.where(tile_max == float("-inf"), 0.0, tile_max)
            # Spelled out, so that tiles with a mask and without round alike.
            weights = tl.exp2(tl.fma(scores, factor + tl.zeros_like(scores), -shift[:, None] + tl.zeros_like(scores)))
            correction = tl.exp2(running_max - shift)
            running_sum = running_sum * correction + tl.sum(weights, 1)
            attended = attended * correction[:, None]
            if scales_ptr is not None:
                scales = tl.load(scale_ptrs + scales_plane_stride, mask=live, other=0.0).to(tl.float32)
                if query.dtype == tl.float16:
                    # A small weight times a small scale would be no normal number.
                    value = value.to(tl.float32) * scales[:, None]
                else:
                    weights = weights * scales[None, :]
            value = widen(value, query.dtype, BY_INTEGERS)
            attended = tl.dot(weights.to(query.dtype), value, attended, input_precision="ieee")
            running_max = tile_max

    # A sequence of no tokens leaves zeros of weight 2^-inf.
    divisor = tl.where(running_sum == 0.0, 1.0, running_sum)
    out_rows = (row_numbers * num_heads + heads) * num_splits + split
    tl.store(output_ptr + out_rows[:, None] * HEAD_DIM + dims[None, :], attended / divisor[:, None], mask=present)
    if log_sum_ptr is not None:
        tl.store(log_sum_ptr + out_rows, running_max + tl.log2(divisor), mask=is_row)


def launch(
    num_tiles: int,
    num_splits: int,
    tile: Tile,
    num_tokens: int,
    query: Tensor,
    pages: KVPages,
    block_tables: Tensor,
    context_lens: Tensor,
    cu_query_lens: Tensor | None,
    output: Tensor,
    log_sum: Tensor | None,
    variant: AttentionVariant,
    turned: Tensor | None,
    window: int,
    first_seq: int,
) -> None:
    """Launches `attend` with a tile, over the rows from `first_seq` on; nothing waits for the GPU.

    num_tokens: tokens of a tile. cu_query_lens: None if sequence s has row s. log_sum: None for one split.
    """
    num_heads, head_dim = query.shape[1:]
    num_kv_heads, block_size = pages.data.shape[2:4]
    group_size, int4 = num_heads // num_kv_heads, pages.int4
    attend[num_tiles, num_kv_heads, num_splits](
        query,
        pages.data,
        None if int4 else pages.scales,
        block_tables,
        context_lens,
        cu_query_lens,
        output,
        log_sum,
        variant.scores.sinks,
        turned.contiguous() if turned is not None and variant.num_sinks else None,
        *((int4.key_scales, pages.scales, int4.open, int4.page_to_open) if int4 else (None,) * 4),
        variant.scale * LOG2_E.value,
        None if variant.scores.soft_cap is None else variant.scores.soft_cap * LOG2_E.value,
        window,
        variant.num_sinks,
        first_seq,
        len(context_lens),
        *query.stride()[:2],
        *pages.data.stride()[:4],
        *_scale_strides(pages),
        *(int4.open.stride()[:3] if int4 else (0, 0, 0)),
        block_tables.stride(0),
        GROUP_SIZE=group_size,
        HEAD_DIM=head_dim,
        BLOCK_SIZE=block_size,
        TOKENS=num_tokens,
        ROWS=max(tile.rows, triton.next_power_of_2(group_size)),
        KEYS=tile.width,
        PADDED_DIM=triton.next_power_of_2(head_dim),
        MAX_SPLITS=MAX_SPLITS,
        MIN_SPLIT_LEN=MIN_SPLIT_LEN,
        BY_INTEGERS=cu_query_lens is None and widens_by_integers(query),  # prompts would spill on sm_80
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        **dependent(FUSING),
    )


def _scale_strides(pages: KVPages) -> tuple[int, int, int]:
    """Returns the strides of the scales over pages, planes and heads, in items."""
    if pages.scales is None:
        return 0, 0, 0
    page, plane, head = pages.scales.stride()[:3]
    return (page, plane, head) if pages.int4 is None else (page, 0, plane)
