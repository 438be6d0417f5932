"""Pages of int4 in Triton: the kernel that quantizes full blocks, and the tiles that attention reads."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
import triton
import triton.language as tl
from torch import Tensor

from kernels.backend import KVPages
from kernels.products.dependent_launch import dependent, wait_for_earlier

LAUNCH_OPTIONS = {"num_warps": 4, "enable_fp_fusion": True}


@triton.jit
def quantize(numbers, scales):
    """Rounds numbers / scales to the nearest code, ties to even, plus 8; scales have the numbers' shape."""
    divided = tl.div_rn(numbers, tl.where(scales == 0.0, 1.0, scales))
    kept = tl.minimum(tl.maximum(divided, -8.0), 7.0)
    # A float of this size has no place for a fraction.
    return (kept + 12582912.0 - 12582912.0 + 8.0).to(tl.uint8)


@triton.jit
def flaws(numbers):
    """Maps infinity and NaN to NaN, and finite numbers to 0."""
    return tl.where(tl.abs(numbers) < float("inf"), 0.0, float("nan"))


@triton.jit
def scale_of(most, most_negated, flaw):
    """Computes the scale that maps the number of the largest magnitude to the code -8."""
    return (tl.where(most > most_negated, most, -most_negated) * -0.125 + flaw).to(tl.bfloat16)


@triton.jit
def close_block(
    codes_ptr,  # [num_pages, 2, num_kv_heads, block_size, head_dim / 2] uint8
    key_scales_ptr,  # [num_pages, num_kv_heads, head_dim] bfloat16
    value_scales_ptr,  # [num_pages, num_kv_heads, block_size] bfloat16
    open_ptr,  # [num_open, 2, num_kv_heads, block_size, head_dim]
    page_to_open_ptr,  # [num_pages] int32
    slot_mapping_ptr,  # [num_tokens] int64
    codes_page_stride,
    codes_plane_stride,
    codes_head_stride,
    scales_page_stride,
    scales_head_stride,
    open_page_stride,
    open_plane_stride,
    open_head_stride,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    PADDED_BLOCK: tl.constexpr,
    PADDED_HALF: tl.constexpr,
):
    # One program quantizes the keys and values of one head of the block whose last slot a token has taken.
    wait_for_earlier()
    slot = tl.load(slot_mapping_ptr + tl.program_id(0).to(tl.int64))
    kv_head = tl.program_id(1).to(tl.int64)
    if slot < 0 or slot % BLOCK_SIZE != BLOCK_SIZE - 1:
        return
    page = slot // BLOCK_SIZE
    HALF: tl.constexpr = HEAD_DIM // 2
    tokens = tl.arange(0, PADDED_BLOCK)
    dims = tl.arange(0, PADDED_HALF)
    present = (tokens < BLOCK_SIZE)[:, None] & (dims < HALF)[None, :]

    place = tl.load(page_to_open_ptr + page).to(tl.int64)
    from_ptr = open_ptr + place * open_page_stride + kv_head * open_head_stride
    from_ptr += tokens[:, None] * HEAD_DIM + dims[None, :]
    to_ptr = codes_ptr + page * codes_page_stride + kv_head * codes_head_stride
    to_ptr += tokens[:, None] * HALF + dims[None, :]
    scales_at = page * scales_page_stride + kv_head * scales_head_stride

    # A block's largest magnitude is at least that of the zeros for what is not there.
    low = tl.load(from_ptr, mask=present, other=0.0).to(tl.float32)
    high = tl.load(from_ptr + HALF, mask=present, other=0.0).to(tl.float32)
    low_scales = scale_of(tl.max(low, 0), tl.max(-low, 0), tl.sum(flaws(low), 0))
    high_scales = scale_of(tl.max(high, 0), tl.max(-high, 0), tl.sum(flaws(high), 0))
    tl.store(key_scales_ptr + scales_at + dims, low_scales, mask=dims < HALF)
    tl.store(key_scales_ptr + scales_at + HALF + dims, high_scales, mask=dims < HALF)
    low_codes = quantize(low, low_scales.to(tl.float32)[None, :])
    tl.store(to_ptr, low_codes | quantize(high, high_scales.to(tl.float32)[None, :]) << 4, mask=present)

    low = tl.load(from_ptr + open_plane_stride, mask=present, other=0.0).to(tl.float32)
    high = tl.load(from_ptr + open_plane_stride + HALF, mask=present, other=0.0).to(tl.float32)
    most = tl.maximum(tl.max(low, 1), tl.max(high, 1))
    most_negated = tl.maximum(tl.max(-low, 1), tl.max(-high, 1))
    scales = scale_of(most, most_negated, tl.sum(flaws(low) + flaws(high), 1))
    tl.store(value_scales_ptr + scales_at + tokens, scales, mask=tokens < BLOCK_SIZE)
    low_codes = quantize(low, scales.to(tl.float32)[:, None])
    packed = low_codes | quantize(high, scales.to(tl.float32)[:, None]) << 4
    tl.store(to_ptr + codes_plane_stride, packed, mask=present)


@triton.jit
def load_tile(
    codes_ptr,  # of one head and plane
    scale_ptrs,  # of each number of the tile
    open_ptr,  # likewise
    rows,  # of the tile's tokens in codes_ptr
    open_rows,  # and in open_ptr
    is_open,  # [TILE], the tokens of the block that is not full
    loaded,  # [TILE, PADDED_DIM]
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
):
    """Loads a tile of keys or values as float32 [TILE, PADDED_DIM]."""
    HALF: tl.constexpr = HEAD_DIM // 2
    dims = tl.arange(0, PADDED_DIM)
    closed = loaded & ~is_open[:, None]
    packed = tl.load(codes_ptr + rows[:, None] + (dims % HALF)[None, :], mask=closed, other=0)
    codes = ((packed >> (dims // HALF * 4).to(tl.uint8)[None, :]) & 15).to(tl.float32) - 8.0
    numbers = codes * tl.load(scale_ptrs, mask=closed, other=0.0).to(tl.float32)
    opened = tl.load(open_ptr + open_rows[:, None] + dims[None, :], mask=loaded & is_open[:, None], other=0.0)
    return tl.where(is_open[:, None], opened.to(tl.float32), numbers)


def close_blocks(pages: KVPages, slot_mapping: Tensor) -> None:
    """Implements `kernels.reference.close_blocks`, on the current GPU."""
    assert pages.int4 is not None
    assert pages.scales is not None
    num_kv_heads, block_size, half = pages.data.shape[2:]
    if not len(slot_mapping):
        return
    close_block[(len(slot_mapping), num_kv_heads)](
        pages.data,
        pages.int4.key_scales,
        pages.scales,
        pages.int4.open,
        pages.int4.page_to_open,
        slot_mapping,
        *pages.data.stride()[:3],
        *pages.scales.stride()[:2],
        *pages.int4.open.stride()[:3],
        HEAD_DIM=2 * half,
        BLOCK_SIZE=block_size,
        PADDED_BLOCK=triton.next_power_of_2(block_size),
        PADDED_HALF=triton.next_power_of_2(half),
        **dependent(LAUNCH_OPTIONS),
    )
