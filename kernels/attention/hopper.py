"""Attention of prompts over pages on Hopper, in Gluon: one warp loads, two warp groups attend with 64 rows each.

Blocks are copied by descriptor, so that no thread that attends computes addresses. Gluon has no interpreter:
tests/kernels/test_hopper.py reads the machine code, and tests/gpu compares numbers on a device. Shape and order of the
loop: J. Shah et al., "FlashAttention-3", arXiv 2407.08608.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
from functools import cache

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from kernels.attention.paged import FUSING, LOG2_E
from kernels.tiles import GroupTile

TYPES = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16}
ROWS = 64
"""Rows of queries of a warp group."""
PANEL = 64
"""Columns of a tile that lie together in shared memory, 128 bytes."""
REGISTERS = 168
"""Registers of a thread at the start, of three warp groups: a warp that loads has the room of one."""
OF_ROWS, OF_LOADS = gl.constexpr(224), gl.constexpr(56)
"""Registers of a thread that attends, and of one that loads."""
COPY = tma.async_load if "async_load" in tma.__all__ else tma.async_copy_global_to_shared
BARRIER = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier
VIEW = getattr(gl.shared_memory_descriptor, "reinterpret", None) or gl.shared_memory_descriptor._reinterpret
"""Triton 3.6 and 3.9 name these differently."""


@gluon.jit
def find_tile(cu_query_lens_ptr, program, first_seq, end_seq):
    """Finds the sequence of a program, and its tile of 128 rows there; a sequence may have a tile without rows."""
    low, high = first_seq, end_seq
    first_row = gl.load(cu_query_lens_ptr + first_seq)
    while high - low > 1:
        middle = (low + high) // 2
        start = (gl.load(cu_query_lens_ptr + middle) - first_row) // 128 + middle - first_seq
        is_before = start <= program
        low = gl.where(is_before, middle, low)
        high = gl.where(is_before, high, middle)
    start = (gl.load(cu_query_lens_ptr + low) - first_row) // 128 + low - first_seq
    return low, program - start


@gluon.jit
def load_tiles(
    descriptors,
    tiles,
    barriers,
    shape,
    places,
    table_ptr,
    kv_ptr,
    KEYS: gl.constexpr,
    SLOTS: gl.constexpr,
    BLOCK_SIZE: gl.constexpr,
    HEAD_DIM: gl.constexpr,
):
    # The loading warp: both halves of the queries, then tiles of keys and values as slots become free.
    queries, blocks = descriptors
    query_tiles, key_tiles, value_tiles = tiles
    query_ready, key_ready, value_ready, key_free, value_free = barriers
    row, _position, end, num_tiles, query_column, _log2_scale = shape
    page_lines, plane_lines, head_rows = places
    dtype: gl.constexpr = blocks.dtype
    PANELS: gl.constexpr = HEAD_DIM // 64
    NUM_BLOCKS: gl.constexpr = KEYS // BLOCK_SIZE
    # A block's columns, 64 at a time, are neighbours in a tile: rows of one panel come before the next panel.
    parts: gl.constexpr = [SLOTS * PANELS * NUM_BLOCKS, BLOCK_SIZE, 64]
    key_parts = VIEW(key_tiles, dtype, parts, blocks.layout)
    value_parts = VIEW(value_tiles, dtype, parts, blocks.layout)
    for half in gl.static_range(2):
        mbarrier.expect(query_ready.index(half), 64 * HEAD_DIM * 2)
        COPY(queries, [row + 64 * half, query_column], query_ready.index(half), query_tiles.index(half))
    for tile in range(num_tiles):
        slot, phase = tile % SLOTS, tile // SLOTS & 1
        first = slot * PANELS * NUM_BLOCKS
        # Keys past the end are masked: any page will do.
        mbarrier.wait(key_free.index(slot), phase ^ 1)
        mbarrier.expect(key_ready.index(slot), KEYS * HEAD_DIM * 2)
        for block in gl.static_range(NUM_BLOCKS):
            page = gl.load(table_ptr + tile * NUM_BLOCKS + block, mask=tile * KEYS + block * BLOCK_SIZE < end, other=0)
            for panel in gl.static_range(PANELS):
                part = key_parts.index(first + panel * NUM_BLOCKS + block)
                COPY(blocks, [page * page_lines + head_rows, panel * 64], key_ready.index(slot), part)
        mbarrier.wait(value_free.index(slot), phase ^ 1)
        num_whole = gl.minimum((end - tile * KEYS) // BLOCK_SIZE, NUM_BLOCKS)
        for block in gl.static_range(NUM_BLOCKS):
            is_whole = block < num_whole
            page = gl.load(table_ptr + tile * NUM_BLOCKS + block, mask=is_whole, other=0)
            mbarrier.expect(value_ready.index(slot), BLOCK_SIZE * HEAD_DIM * 2, pred=is_whole)
            for panel in gl.static_range(PANELS):
                part = value_parts.index(first + panel * NUM_BLOCKS + block)
                place = [page * page_lines + head_rows + plane_lines, panel * 64]
                COPY(blocks, place, value_ready.index(slot), part, pred=is_whole)
        for late in range(num_whole, NUM_BLOCKS):
            # Values past the end are zeros: 0 * NaN is NaN, so a weight of 0 does not keep a stale one out.
            begin = tile * KEYS + late * BLOCK_SIZE
            page = gl.load(table_ptr + tile * NUM_BLOCKS + late, mask=begin < end, other=0)
            line = (page * page_lines + head_rows + plane_lines).to(gl.int64) * HEAD_DIM
            of_part: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [1, 1], [1, 0])
            rows = gl.arange(0, BLOCK_SIZE, gl.SliceLayout(1, of_part))
            dims = gl.arange(0, 64, gl.SliceLayout(0, of_part))
            for panel in gl.static_range(PANELS):
                ptrs = kv_ptr + line + rows[:, None] * HEAD_DIM + (panel * 64 + dims[None, :])
                values = gl.load(ptrs, mask=(begin + rows < end)[:, None], other=0.0)
                value_parts.index(first + panel * NUM_BLOCKS + late).store(values)
            fence_async_shared()
            BARRIER()
            mbarrier.arrive(value_ready.index(slot), count=1)


@gluon.jit
def weigh(scores, running_max, running_sum, log2_scale):
    """Computes a tile's weights, and the maxima, sums and corrections of rows that have seen it."""
    tile_max = gl.maximum(running_max, gl.max(scores, 1) * log2_scale)
    weights = gl.exp2(gl.fma(scores, gl.full_like(scores, log2_scale), gl.zeros_like(scores) - tile_max[:, None]))
    correction = gl.exp2(running_max - tile_max)
    return weights, tile_max, running_sum * correction + gl.sum(weights, 1), correction


@gluon.jit
def hold(sums):
    """Returns sums, none of which is negative, behind a barrier of their warp, which no later wait is moved before."""
    return gl.inline_asm_elementwise(
        """
        {
        .reg .b32 lanes;
        mov.b32 lanes, $1;
        shr.s32 lanes, lanes, 31;
        not.b32 lanes, lanes;
        bar.warp.sync lanes;
        mov.b32 $0, $1;
        }
        """,
        "=f,f",
        [sums],
        dtype=gl.float32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def add_tile(
    query,
    key_tiles,
    value_tiles,
    barriers,
    tile,
    positions,
    state,
    log2_scale,
    KEYS: gl.constexpr,
    SLOTS: gl.constexpr,
    IS_MASKED: gl.constexpr,
):
    """Weighs a tile, and adds the values of the tile before, whose weights `state` has."""
    _query_ready, key_ready, value_ready, key_free, value_free = barriers
    attended, weights, running_max, running_sum = state
    of_scores: gl.constexpr = positions.type.layout.parent
    slot, phase = tile % SLOTS, tile // SLOTS & 1
    before, phase_before = (tile - 1) % SLOTS, (tile - 1) // SLOTS & 1
    nothing = gl.zeros([64, KEYS], gl.float32, of_scores)
    mbarrier.wait(key_ready.index(slot), phase)
    scores = warpgroup_mma(query, key_tiles.index(slot).permute((1, 0)), nothing, use_acc=False, is_async=True)
    mbarrier.wait(value_ready.index(before), phase_before)
    attended = warpgroup_mma(weights, value_tiles.index(before), attended, is_async=True)
    scores = warpgroup_mma_wait(num_outstanding=1, deps=[scores])
    BARRIER()
    mbarrier.arrive(key_free.index(slot), count=1)
    if IS_MASKED:
        columns = tile * KEYS + gl.arange(0, KEYS, gl.SliceLayout(0, of_scores))
        scores = gl.where(positions[:, None] >= columns[None, :], scores, float("-inf"))
    wide, running_max, running_sum, correction = weigh(scores, running_max, running_sum, log2_scale)
    running_sum = hold(running_sum)
    attended, weights = warpgroup_mma_wait(num_outstanding=0, deps=[attended, weights])
    BARRIER()
    mbarrier.arrive(value_free.index(before), count=1)
    attended *= gl.convert_layout(correction, gl.SliceLayout(1, attended.type.layout))[:, None]
    weights = gl.convert_layout(wide.to(weights.dtype), weights.type.layout)
    return attended, weights, running_max, running_sum


@gluon.jit
def attend_rows(
    output_ptr,
    tiles,
    barriers,
    shape,
    end_row,
    HALF: gl.constexpr,
    KEYS: gl.constexpr,
    SLOTS: gl.constexpr,
    HEAD_DIM: gl.constexpr,
    WIDTH: gl.constexpr,
):
    # A computing warp group: the product of a tile's keys is under way while the tile before is weighed and added.
    row, position, _end, num_tiles, query_column, log2_scale = shape
    query_tiles, key_tiles, value_tiles = tiles
    query_ready, key_ready, value_ready, key_free, _value_free = barriers
    of_scores: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS, 16])
    of_sums: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEAD_DIM, 16])
    of_weights: gl.constexpr = gl.DotOperandLayout(0, of_sums, 2)
    columns = gl.arange(0, KEYS, gl.SliceLayout(0, of_scores))
    positions = position + 64 * HALF + gl.arange(0, 64, gl.SliceLayout(1, of_scores))
    nothing = gl.zeros([64, KEYS], gl.float32, of_scores)
    attended = gl.zeros([64, HEAD_DIM], gl.float32, of_sums)
    running_max = gl.full([64], float("-inf"), gl.float32, gl.SliceLayout(1, of_scores))
    running_sum = gl.zeros([64], gl.float32, gl.SliceLayout(1, of_scores))
    query = query_tiles.index(HALF)
    mbarrier.wait(query_ready.index(HALF), 0)

    mbarrier.wait(key_ready.index(0), 0)
    scores = warpgroup_mma(query, key_tiles.index(0).permute((1, 0)), nothing, use_acc=False, is_async=True)
    scores = warpgroup_mma_wait(num_outstanding=0, deps=[scores])
    BARRIER()
    mbarrier.arrive(key_free.index(0), count=1)
    scores = gl.where(positions[:, None] >= columns[None, :], scores, float("-inf"))
    wide, running_max, running_sum, _ = weigh(scores, running_max, running_sum, log2_scale)
    weights = gl.convert_layout(wide.to(query.dtype), of_weights)

    # Tiles with a mask have a loop of their own, and others no branch.
    num_clear = gl.minimum(gl.maximum((position + 1) // KEYS, 1), num_tiles)
    for tile in range(1, num_clear):
        state = attended, weights, running_max, running_sum
        attended, weights, running_max, running_sum = add_tile(
            query, key_tiles, value_tiles, barriers, tile, positions, state, log2_scale, KEYS, SLOTS, False
        )
    for tile in range(num_clear, num_tiles):
        state = attended, weights, running_max, running_sum
        attended, weights, running_max, running_sum = add_tile(
            query, key_tiles, value_tiles, barriers, tile, positions, state, log2_scale, KEYS, SLOTS, True
        )

    last = (num_tiles - 1) % SLOTS
    mbarrier.wait(value_ready.index(last), (num_tiles - 1) // SLOTS & 1)
    attended = warpgroup_mma(weights, value_tiles.index(last), attended, is_async=True)
    attended, weights = warpgroup_mma_wait(num_outstanding=0, deps=[attended, weights])
    attended /= gl.convert_layout(running_sum, gl.SliceLayout(1, of_sums))[:, None]
    out_rows = row + 64 * HALF + gl.arange(0, 64, gl.SliceLayout(1, of_sums))
    dims = gl.arange(0, HEAD_DIM, gl.SliceLayout(0, of_sums))
    out_ptrs = output_ptr + out_rows.to(gl.int64)[:, None] * WIDTH + query_column + dims[None, :]
    gl.store(out_ptrs, attended.to(query.dtype), mask=(out_rows < end_row)[:, None])


# Numbers of a step are not specialized: a launch would else compile one more kernel where one is 1 or a multiple of 16.
@gluon.jit(do_not_specialize=["first_seq", "end_seq", "page_lines", "plane_lines", "block_lines", "table_seq_stride"])
def attend_in_groups(
    queries,  # descriptor of [num_rows, num_heads * head_dim], 64 rows of a head at a time
    blocks,  # descriptor of [lines, head_dim], all tokens of all blocks of a layer, 64 columns of a block at a time
    kv_ptr,  # the same memory
    block_tables_ptr,  # [num_seqs, max_blocks] int32
    context_lens_ptr,  # [num_seqs] int32
    cu_query_lens_ptr,  # [num_seqs + 1] int32
    output_ptr,  # [num_rows, num_heads, head_dim]
    log2_scale,
    first_seq,
    end_seq,
    page_lines,  # lines of a page, of its keys, and of a head's block
    plane_lines,
    block_lines,
    table_seq_stride,
    NUM_HEADS: gl.constexpr,
    GROUP_SIZE: gl.constexpr,
    HEAD_DIM: gl.constexpr,
    BLOCK_SIZE: gl.constexpr,
    KEYS: gl.constexpr,
    SLOTS: gl.constexpr,
):
    # One program attends with 128 rows of a sequence in one head; the last tiles, which see the most keys, come first.
    head = gl.program_id(0)
    seq, tile = find_tile(cu_query_lens_ptr, gl.num_programs(1) - 1 - gl.program_id(1), first_seq, end_seq)
    first_row, end_row = gl.load(cu_query_lens_ptr + seq), gl.load(cu_query_lens_ptr + seq + 1)
    row = first_row + tile * 128
    if row >= end_row:
        return
    context_len = gl.load(context_lens_ptr + seq)
    position = context_len - end_row + row
    num_tiles = gl.cdiv(gl.minimum(position + 128, context_len), KEYS)

    dtype: gl.constexpr = queries.dtype
    of_keys: gl.constexpr = gl.NVMMASharedLayout.get_default_for([KEYS, HEAD_DIM], dtype)
    query_tiles = gl.allocate_shared_memory(dtype, [2, 64, HEAD_DIM], queries.layout)
    key_tiles = gl.allocate_shared_memory(dtype, [SLOTS, KEYS, HEAD_DIM], of_keys)
    value_tiles = gl.allocate_shared_memory(dtype, [SLOTS, KEYS, HEAD_DIM], of_keys)
    query_ready = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    key_ready = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    value_ready = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    key_free = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    value_free = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    for half in gl.static_range(2):
        mbarrier.init(query_ready.index(half), count=1)
    for slot in gl.static_range(SLOTS):
        mbarrier.init(key_ready.index(slot), count=1)
        mbarrier.init(value_ready.index(slot), count=KEYS // BLOCK_SIZE)
        mbarrier.init(key_free.index(slot), count=2)
        mbarrier.init(value_free.index(slot), count=2)
    tiles = query_tiles, key_tiles, value_tiles
    barriers = query_ready, key_ready, value_ready, key_free, value_free
    WIDTH: gl.constexpr = NUM_HEADS * HEAD_DIM
    shape = row, position, context_len, num_tiles, head * HEAD_DIM, log2_scale
    places = page_lines, plane_lines, head // GROUP_SIZE * block_lines
    table_ptr = block_tables_ptr + seq.to(gl.int64) * table_seq_stride
    gl.warp_specialize(
        [
            (attend_rows, (output_ptr, tiles, barriers, shape, end_row, 0, KEYS, SLOTS, HEAD_DIM, WIDTH)),
            (attend_rows, (output_ptr, tiles, barriers, shape, end_row, 1, KEYS, SLOTS, HEAD_DIM, WIDTH)),
            (
                load_tiles,
                (
                    (queries, blocks),
                    tiles,
                    barriers,
                    shape,
                    places,
                    table_ptr,
                    kv_ptr,
                    KEYS,
                    SLOTS,
                    BLOCK_SIZE,
                    HEAD_DIM,
                ),
            ),
        ],
        [4, 1],
        [OF_ROWS, OF_LOADS],
    )


@cache
def layout_of(rows: int, columns: int, dtype: torch.dtype) -> gl.NVMMASharedLayout:
    """Returns the layout of a tile in shared memory that matrix instructions read."""
    return gl.NVMMASharedLayout.get_default_for([rows, columns], TYPES[dtype])


def attend(
    tile: GroupTile,
    query: Tensor,
    data: Tensor,
    block_tables: Tensor,
    context_lens: Tensor,
    cu_query_lens: Tensor,
    output: Tensor,
    scale: float,
    first_seq: int,
) -> None:
    """Attends with prompts' rows over one layer of pages, as `paged.launch` does; nothing waits for the GPU.

    data: `KVPages.data` of one layer. Rows of each sequence before `first_seq` are skipped.
    """
    num_rows, num_heads, head_dim = query.shape
    num_pages, _, num_kv_heads, block_size, _ = data.shape
    page_lines, plane_lines, block_lines = (one // head_dim for one in data.stride()[:3])
    num_lines = (num_pages - 1) * page_lines + plane_lines + num_kv_heads * block_lines
    width, dtype = num_heads * head_dim, query.dtype
    num_tiles = num_rows // (2 * ROWS) + len(context_lens) - first_seq
    attend_in_groups[(num_heads, num_tiles)](
        TensorDescriptor(
            query, [num_rows, width], [query.stride(0), 1], [ROWS, head_dim], layout_of(ROWS, head_dim, dtype)
        ),
        TensorDescriptor(
            data, [num_lines, head_dim], [head_dim, 1], [block_size, PANEL], layout_of(block_size, PANEL, dtype)
        ),
        data,
        block_tables,
        context_lens,
        cu_query_lens,
        output,
        scale * LOG2_E.value,
        first_seq,
        len(context_lens),
        page_lines,
        plane_lines,
        block_lines,
        block_tables.stride(0),
        NUM_HEADS=num_heads,
        GROUP_SIZE=num_heads // num_kv_heads,
        HEAD_DIM=head_dim,
        BLOCK_SIZE=block_size,
        KEYS=tile.keys,
        SLOTS=tile.slots,
        num_warps=4,
        maxnreg=REGISTERS,
        **FUSING,
    )


def fits(query: Tensor, data: Tensor) -> bool:
    """Whether descriptors can load queries and pages of one layer. Requires numbers of two bytes."""
    head_dim, block_size = query.shape[2], data.shape[3]
    tokens, lines = query.stride(0), data.stride()[:3]
    return (
        head_dim in (64, 128)
        and block_size in (8, 16, 32)
        and query.stride()[1:] == (head_dim, 1)
        and not any(one % head_dim for one in lines)
        and not any(one % 8 for one in (tokens, query.storage_offset(), data.storage_offset()))
        and (len(data) * lines[0]) // head_dim < 1 << 31
    )
