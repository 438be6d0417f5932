"""Triton kernels that are candidates: prompts over contiguous keys, sums of blocks.

Their numbers are tested in the interpreter; benchmarks/gpu_lab.py times them. Nothing of the product imports them.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

LOG2_E = 1.4426950408889634
CHUNK_WORDS = 128
"""int64 words of a chunk of 1 KiB, which has two sums."""
NUM_KEYS = 4 * CHUNK_WORDS


@triton.jit
def attend_prompt(
    query_ptr,  # [num_rows, num_heads, head_dim]
    key_ptr,  # [num_before + num_rows, num_kv_heads, head_dim]
    value_ptr,  # as keys
    output_ptr,  # as queries
    num_rows,
    num_before,
    log2_scale,
    NUM_HEADS: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    IS_SPECIALIZED: tl.constexpr,
):
    # One program attends with ROWS tokens in one head, over contiguous keys; the last rows, which see the most, first.
    num_keys = num_before + num_rows
    width: tl.constexpr = NUM_HEADS * HEAD_DIM
    kv_width: tl.constexpr = NUM_HEADS // GROUP_SIZE * HEAD_DIM
    queries = tl.make_tensor_descriptor(query_ptr, [num_rows, width], [width, 1], [ROWS, HEAD_DIM])
    keys = tl.make_tensor_descriptor(key_ptr, [num_keys, kv_width], [kv_width, 1], [KEYS, HEAD_DIM])
    values = tl.make_tensor_descriptor(value_ptr, [num_keys, kv_width], [kv_width, 1], [KEYS, HEAD_DIM])
    outputs = tl.make_tensor_descriptor(output_ptr, [num_rows, width], [width, 1], [ROWS, HEAD_DIM])
    head = tl.program_id(0)
    start = (tl.num_programs(1) - 1 - tl.program_id(1)) * ROWS
    kv_column = head // GROUP_SIZE * HEAD_DIM
    query = queries.load([start, head * HEAD_DIM])
    running_max = tl.full([ROWS], float("-inf"), tl.float32)
    running_sum = tl.zeros([ROWS], tl.float32)
    attended = tl.zeros([ROWS, HEAD_DIM], tl.float32)
    # Not from `start`: where Triton 3.6 splits rows over warps, it moves the coordinate of a load for all its readers.
    first = num_before + (tl.num_programs(1) - 1) * ROWS - tl.program_id(1) * ROWS
    positions, columns = first + tl.arange(0, ROWS), tl.arange(0, KEYS)
    # One loop with a mask throughout: Triton 3.6 splits no loop over warps that another one stands beside.
    for begin in tl.range(0, num_before + start + ROWS, KEYS, warp_specialize=IS_SPECIALIZED):
        scores = tl.dot(query, keys.load([begin, kv_column]).T)
        scores = tl.where(positions[:, None] >= begin + columns[None, :], scores, -1.0e6)
        tile_max = tl.maximum(running_max, tl.max(scores, 1) * log2_scale)
        weights = tl.exp2(scores * log2_scale - tile_max[:, None])
        correction = tl.exp2(running_max - tile_max)
        running_sum = running_sum * correction + tl.sum(weights, 1)
        attended = attended * correction[:, None]
        attended = tl.dot(weights.to(query.dtype), values.load([begin, kv_column]), attended)
        running_max = tile_max
    outputs.store([start, head * HEAD_DIM], (attended / running_sum[:, None]).to(query.dtype))


@dataclass(frozen=True)
class PromptTile:
    """The shape of a program of attend_prompt. is_specialized: one warp group loads, two compute; wants four warps."""

    rows: int
    keys: int
    num_warps: int
    num_stages: int
    is_specialized: bool


def attend_contiguous(query: Tensor, key: Tensor, value: Tensor, tile: PromptTile, num_before: int = 0) -> Tensor:
    """Attends causally behind `num_before` keys, which are the first of `key` and `value`."""
    num_rows, num_heads, head_dim = query.shape
    out = torch.empty_like(query)
    attend_prompt[(num_heads, triton.cdiv(num_rows, tile.rows))](
        query,
        key,
        value,
        out,
        num_rows,
        num_before,
        head_dim**-0.5 * LOG2_E,
        NUM_HEADS=num_heads,
        GROUP_SIZE=num_heads // key.shape[1],
        ROWS=tile.rows,
        KEYS=tile.keys,
        HEAD_DIM=head_dim,
        IS_SPECIALIZED=tile.is_specialized,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )
    return out


@triton.jit
def gather_pages(
    kv_ptr,  # [num_pages, 2, NUM_HEADS, BLOCK_SIZE, HEAD_DIM]
    table_ptr,  # [num_blocks] int32
    key_ptr,  # [num_blocks * BLOCK_SIZE, NUM_HEADS, HEAD_DIM]
    value_ptr,  # as keys
    kv_page_stride,
    kv_plane_stride,
    NUM_HEADS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
):
    # One program copies the keys and values of all heads of one page.
    block = tl.program_id(0).to(tl.int64)
    page_ptr = kv_ptr + tl.load(table_ptr + block).to(tl.int64) * kv_page_stride
    rows, dims = tl.arange(0, NUM_HEADS * BLOCK_SIZE), tl.arange(0, HEAD_DIM)
    from_rows = rows % NUM_HEADS * BLOCK_SIZE + rows // NUM_HEADS
    places = from_rows[:, None] * HEAD_DIM + dims[None, :]
    targets = block * (NUM_HEADS * BLOCK_SIZE * HEAD_DIM) + rows[:, None] * HEAD_DIM + dims[None, :]
    tl.store(key_ptr + targets, tl.load(page_ptr + places))
    tl.store(value_ptr + targets, tl.load(page_ptr + kv_plane_stride + places))


def gather(pages: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
    """Copies the keys and values of a sequence's pages [num_pages, 2, heads, block_size, head_dim] to [tokens, ...].

    table: int32 [num_blocks]. Heads times block_size, and head_dim, are powers of two.
    """
    num_heads, block_size, head_dim = pages.shape[2:]
    key, value = (pages.new_empty(len(table) * block_size, num_heads, head_dim) for _ in range(2))
    sizes = {"NUM_HEADS": num_heads, "BLOCK_SIZE": block_size, "HEAD_DIM": head_dim}
    gather_pages[(len(table),)](pages, table, key, value, *pages.stride()[:2], **sizes, num_warps=8)
    return key, value


@triton.jit
def sum_chunk(words, even_keys, odd_keys):
    """Sums (low half + key) * (high half + other key) of each chunk's words, halves modulo 2^32, sums modulo 2^64."""
    low, high = words.to(tl.uint32), (words >> 32).to(tl.uint32)
    products = (low + even_keys[None, :]).to(tl.uint64) * (high + odd_keys[None, :]).to(tl.uint64)
    return tl.sum(products, 1).to(tl.int64, bitcast=True)


@triton.jit
def sum_and_copy(
    from_ptr,  # [blocks, BLOCK_WORDS] int64
    to_ptr,  # likewise, or None: sums only
    sums_ptr,  # [num_blocks, BLOCK_WORDS // 128, 2] int64
    keys_ptr,  # [512] uint32
    sources_ptr,  # [num_blocks] int32
    targets_ptr,  # [num_blocks] int32
    num_parts,
    BLOCK_WORDS: tl.constexpr,
    PARTS: tl.constexpr,
    CHUNKS: tl.constexpr,
):
    # One program sums parts of blocks, CHUNKS chunks at a time, and copies them: parts p, p + programs, and so on.
    words = tl.arange(0, 128)
    first, second = tl.load(keys_ptr + words), tl.load(keys_ptr + 128 + words)
    third, fourth = tl.load(keys_ptr + 256 + words), tl.load(keys_ptr + 384 + words)
    part_chunks: tl.constexpr = BLOCK_WORDS // 128 // PARTS
    for one in range(tl.program_id(0), num_parts, tl.num_programs(0)):
        block = one // PARTS
        source = tl.load(sources_ptr + block).to(tl.int64) * BLOCK_WORDS
        target = tl.load(targets_ptr + block).to(tl.int64) * BLOCK_WORDS
        for chunk in range(0, part_chunks, CHUNKS):
            chunks = one % PARTS * part_chunks + chunk + tl.arange(0, CHUNKS)
            places = chunks[:, None] * 128 + words[None, :]
            values = tl.load(from_ptr + source + places)
            if to_ptr is not None:
                tl.store(to_ptr + target + places, values)
            sum_ptrs = sums_ptr + (block * (BLOCK_WORDS // 128) + chunks) * 2
            tl.store(sum_ptrs, sum_chunk(values, first, second))
            tl.store(sum_ptrs + 1, sum_chunk(values, third, fourth))
