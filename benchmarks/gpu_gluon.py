"""Attention of prompts for Hopper in Gluon, a candidate: one warp group loads, two attend with 64 rows each.

Gluon has no interpreter. tests/benchmarks/test_gpu_gluon.py reads the order of waits and products in the machine code;
numbers are compared on a device by benchmarks/gpu_lab.py. Nothing of the product imports this. Shape and order of
the loop: J. Shah et al., "FlashAttention-3", arXiv 2407.08608.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma, warpgroup_mma_wait
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

LOG2_E = 1.4426950408889634
ROWS = 64
"""Rows of queries of a warp group."""
REGISTERS = 168
"""Registers of a thread at the start, of three warp groups."""
COPY = tma.async_load if "async_load" in tma.__all__ else tma.async_copy_global_to_shared
BARRIER = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier
"""Triton 3.6 and 3.9 name these differently."""


@gluon.jit
def load_tiles(
    descriptors,
    tiles,
    barriers,
    row,
    columns,
    num_tiles,
    SLOTS: gl.constexpr,
    KEYS: gl.constexpr,
    HEAD_DIM: gl.constexpr,
):
    # The loading warp group: both halves of the queries, then tiles of keys and values as slots become free.
    queries, keys, values = descriptors
    query_tiles, key_tiles, value_tiles = tiles
    query_ready, key_ready, value_ready, key_free, value_free, _turns = barriers
    query_column, kv_column = columns
    for half in gl.static_range(2):
        mbarrier.expect(query_ready.index(half), 64 * HEAD_DIM * 2)
        COPY(queries, [row + 64 * half, query_column], query_ready.index(half), query_tiles.index(half))
    for tile in range(num_tiles):
        slot, phase = tile % SLOTS, tile // SLOTS & 1
        mbarrier.wait(key_free.index(slot), phase ^ 1)
        mbarrier.expect(key_ready.index(slot), KEYS * HEAD_DIM * 2)
        COPY(keys, [tile * KEYS, kv_column], key_ready.index(slot), key_tiles.index(slot))
        mbarrier.wait(value_free.index(slot), phase ^ 1)
        mbarrier.expect(value_ready.index(slot), KEYS * HEAD_DIM * 2)
        COPY(values, [tile * KEYS, kv_column], value_ready.index(slot), value_tiles.index(slot))


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
    HALF: gl.constexpr,
    SLOTS: gl.constexpr,
    IN_TURNS: gl.constexpr,
    KEYS: gl.constexpr,
    IS_MASKED: gl.constexpr,
):
    """Weighs a tile, and adds the values of the tile before, whose weights `state` has."""
    _query_ready, key_ready, value_ready, key_free, value_free, turns = barriers
    attended, weights, running_max, running_sum = state
    of_scores: gl.constexpr = positions.type.layout.parent
    slot, phase = tile % SLOTS, tile // SLOTS & 1
    before, phase_before = (tile - 1) % SLOTS, (tile - 1) // SLOTS & 1
    nothing = gl.zeros([64, KEYS], gl.float32, of_scores)
    mbarrier.wait(key_ready.index(slot), phase)
    if IN_TURNS:
        # The first half's first turn is free: each then waits for the other's products of a tile.
        mbarrier.wait(turns.index(HALF), (tile - 1 & 1) ^ (1 - HALF))
    scores = warpgroup_mma(query, key_tiles.index(slot).permute((1, 0)), nothing, use_acc=False, is_async=True)
    mbarrier.wait(value_ready.index(before), phase_before)
    attended = warpgroup_mma(weights, value_tiles.index(before), attended, is_async=True)
    if IN_TURNS:
        BARRIER()
        mbarrier.arrive(turns.index(1 - HALF), count=1)
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
    weights = gl.convert_layout(wide.to(gl.bfloat16), weights.type.layout)
    return attended, weights, running_max, running_sum


@gluon.jit
def attend_rows(
    output_ptr,
    tiles,
    barriers,
    shape,
    HALF: gl.constexpr,
    SLOTS: gl.constexpr,
    IN_TURNS: gl.constexpr,
    KEYS: gl.constexpr,
    HEAD_DIM: gl.constexpr,
    WIDTH: gl.constexpr,
):
    # A computing warp group: the product of a tile's keys is under way while the tile before is weighed and added.
    row, num_rows, num_before, query_column, num_tiles, log2_scale = shape
    query_tiles, key_tiles, value_tiles = tiles
    query_ready, key_ready, value_ready, key_free, _value_free, _turns = barriers
    of_scores: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS, 16])
    of_sums: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEAD_DIM, 16])
    of_weights: gl.constexpr = gl.DotOperandLayout(0, of_sums, 2)
    rows = row + 64 * HALF + gl.arange(0, 64, gl.SliceLayout(1, of_scores))
    columns = gl.arange(0, KEYS, gl.SliceLayout(0, of_scores))
    positions = num_before + rows
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
    weights = gl.convert_layout(wide.to(gl.bfloat16), of_weights)

    # Tiles with a mask have a loop of their own, and others no branch.
    num_clear = gl.minimum(gl.maximum((num_before + row + 1) // KEYS, 1), num_tiles)
    for tile in range(1, num_clear):
        attended, weights, running_max, running_sum = add_tile(
            query,
            key_tiles,
            value_tiles,
            barriers,
            tile,
            positions,
            (attended, weights, running_max, running_sum),
            log2_scale,
            HALF,
            SLOTS,
            IN_TURNS,
            KEYS,
            False,
        )
    for tile in range(num_clear, num_tiles):
        attended, weights, running_max, running_sum = add_tile(
            query,
            key_tiles,
            value_tiles,
            barriers,
            tile,
            positions,
            (attended, weights, running_max, running_sum),
            log2_scale,
            HALF,
            SLOTS,
            IN_TURNS,
            KEYS,
            True,
        )

    last = (num_tiles - 1) % SLOTS
    mbarrier.wait(value_ready.index(last), (num_tiles - 1) // SLOTS & 1)
    attended = warpgroup_mma(weights, value_tiles.index(last), attended, is_async=True)
    attended, weights = warpgroup_mma_wait(num_outstanding=0, deps=[attended, weights])
    attended /= gl.convert_layout(running_sum, gl.SliceLayout(1, of_sums))[:, None]
    out_rows = row + 64 * HALF + gl.arange(0, 64, gl.SliceLayout(1, of_sums))
    dims = gl.arange(0, HEAD_DIM, gl.SliceLayout(0, of_sums))
    out_ptrs = output_ptr + out_rows.to(gl.int64)[:, None] * WIDTH + query_column + dims[None, :]
    gl.store(out_ptrs, attended.to(gl.bfloat16), mask=(out_rows < num_rows)[:, None])


@gluon.jit
def attend_in_groups(
    queries,  # descriptor of [num_rows, num_heads * head_dim]
    keys,  # descriptor of [num_before + num_rows, num_kv_heads * head_dim]
    values,  # as keys
    output_ptr,  # as queries
    num_rows,
    num_before,
    log2_scale,
    NUM_HEADS: gl.constexpr,
    GROUP_SIZE: gl.constexpr,
    HEAD_DIM: gl.constexpr,
    KEYS: gl.constexpr,
    SLOTS: gl.constexpr,
    IN_TURNS: gl.constexpr,
    of_queries: gl.constexpr,
    of_keys: gl.constexpr,
):
    # One program attends with 128 rows in one head; the last rows, which see the most, come first.
    head = gl.program_id(0)
    row = (gl.num_programs(1) - 1 - gl.program_id(1)) * 128
    query_column, kv_column = head * HEAD_DIM, head // GROUP_SIZE * HEAD_DIM
    num_tiles = gl.cdiv(num_before + gl.minimum(row + 128, num_rows), KEYS)
    query_tiles = gl.allocate_shared_memory(gl.bfloat16, [2, 64, HEAD_DIM], of_queries)
    key_tiles = gl.allocate_shared_memory(gl.bfloat16, [SLOTS, KEYS, HEAD_DIM], of_keys)
    value_tiles = gl.allocate_shared_memory(gl.bfloat16, [SLOTS, KEYS, HEAD_DIM], of_keys)
    query_ready = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    key_ready = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    value_ready = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    key_free = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    value_free = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    turns = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for half in gl.static_range(2):
        mbarrier.init(turns.index(half), count=1)
        mbarrier.init(query_ready.index(half), count=1)
    for slot in gl.static_range(SLOTS):
        mbarrier.init(key_ready.index(slot), count=1)
        mbarrier.init(value_ready.index(slot), count=1)
        mbarrier.init(key_free.index(slot), count=2)
        mbarrier.init(value_free.index(slot), count=2)
    descriptors, columns = (queries, keys, values), (query_column, kv_column)
    tiles = query_tiles, key_tiles, value_tiles
    barriers = query_ready, key_ready, value_ready, key_free, value_free, turns
    WIDTH: gl.constexpr = NUM_HEADS * HEAD_DIM
    shape = row, num_rows, num_before, query_column, num_tiles, log2_scale
    gl.warp_specialize(
        [
            (attend_rows, (output_ptr, tiles, barriers, shape, 0, SLOTS, IN_TURNS, KEYS, HEAD_DIM, WIDTH)),
            (attend_rows, (output_ptr, tiles, barriers, shape, 1, SLOTS, IN_TURNS, KEYS, HEAD_DIM, WIDTH)),
            (
                load_tiles,
                (descriptors, tiles, barriers, row, columns, num_tiles, SLOTS, KEYS, HEAD_DIM),
            ),
        ],
        [4, 4],
        [240, 24],
    )


@dataclass(frozen=True)
class GroupTile:
    """The keys of an iteration, and the slots of keys, and of values, that are loaded ahead.

    takes_turns: one warp group issues products while the other weighs.
    """

    keys: int
    slots: int
    takes_turns: bool


def constants_of(num_heads: int, num_kv_heads: int, head_dim: int, tile: GroupTile) -> dict[str, Any]:
    """Lists the constants of `attend_in_groups`."""
    of_queries, of_keys = (
        gl.NVMMASharedLayout.get_default_for([rows, head_dim], gl.bfloat16) for rows in (ROWS, tile.keys)
    )
    heads = {"NUM_HEADS": num_heads, "GROUP_SIZE": num_heads // num_kv_heads, "HEAD_DIM": head_dim}
    return heads | {
        "KEYS": tile.keys,
        "SLOTS": tile.slots,
        "IN_TURNS": tile.takes_turns,
        "of_queries": of_queries,
        "of_keys": of_keys,
    }


def attend_by_groups(query: Tensor, key: Tensor, value: Tensor, tile: GroupTile, num_before: int = 0) -> Tensor:
    """Attends causally behind `num_before` keys, which are the first of `key` and `value`.

    All are bfloat16 [tokens, heads, 128].
    """
    num_rows, num_heads, head_dim = query.shape
    constants = constants_of(num_heads, key.shape[1], head_dim, tile)
    out = torch.empty_like(query)
    described = [
        TensorDescriptor.from_tensor(one.flatten(1), [rows, head_dim], constants[layout])
        for one, rows, layout in (
            (query, ROWS, "of_queries"),
            (key, tile.keys, "of_keys"),
            (value, tile.keys, "of_keys"),
        )
    ]
    numbers = num_rows, num_before, head_dim**-0.5 * LOG2_E
    attend_in_groups[(num_heads, triton.cdiv(num_rows, 2 * ROWS))](
        *described, out, *numbers, **constants, num_warps=4, maxnreg=REGISTERS
    )
    return out
