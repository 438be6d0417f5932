"""A decoder's operations on rows between its products, in Triton: norm, gate, and rotation with the write of KV.

Each kernel rounds where `kernels.torch_backend` does.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.attention.int4_pages import flaws
from kernels.backend import LARGEST_CODE, Activation, Angles, Heads, KVPages
from kernels.products.dependent_launch import dependent, wait_for_earlier

OPTIONS = {"num_warps": 4, "enable_fp_fusion": False}
HEADS_AT_ONCE = 8
GATED_AT_ONCE = 1024
LIKELIEST_AT_ONCE = 8192


@triton.jit
def normalize(
    states_ptr,  # [num_rows, columns]
    weight_ptr,  # [columns]; of float32 beside states of another dtype, it is wide
    residual_ptr,  # [num_rows, columns], or None
    output_ptr,  # [num_rows, columns]
    states_row_stride,
    output_row_stride,
    columns,
    eps,
    PADDED_COLUMNS: tl.constexpr,
):
    # One program normalizes one row.
    wait_for_earlier()
    row = tl.program_id(0).to(tl.int64)
    places = tl.arange(0, PADDED_COLUMNS)
    present = places < columns
    states = tl.load(states_ptr + row * states_row_stride + places, mask=present, other=0.0)
    weight = tl.load(weight_ptr + places, mask=present, other=0.0)
    wide = states.to(tl.float32)
    normal = (wide * tl.rsqrt(tl.sum(wide * wide, 0) / columns + eps)).to(weight.dtype)
    scaled = weight.to(tl.float32) * normal.to(tl.float32)
    if residual_ptr is not None:
        residual = tl.load(residual_ptr + row * columns + places, mask=present, other=0.0)
        scaled = residual.to(tl.float32) + scaled.to(states.dtype).to(tl.float32)
    tl.store(output_ptr + row * output_row_stride + places, scaled, mask=present)


@triton.jit
def gate_by(gate, up, ACTIVATION: tl.constexpr):
    """Returns activation(gate) * up in float32, the activation rounded to the dtype of the gate."""
    wide = gate.to(tl.float32)
    if ACTIVATION == 2:
        wide = tl.where(wide > 7.0, 7.0, wide)
        raised = up.to(tl.float32)
        raised = tl.where(raised > 7.0, 7.0, tl.where(raised < -7.0, -7.0, raised))
        up = (raised + 1.0).to(gate.dtype)
    of = wide
    if ACTIVATION == 1:  # the approximation of GELU by tanh is a sigmoid of this
        of = 1.5957691216 * (wide + 0.044715 * wide * wide * wide)
    if ACTIVATION == 2:
        of = 1.702 * wide
    activated = (wide / (1.0 + tl.exp(tl.minimum(-of, 88.0)))).to(gate.dtype)
    return activated.to(tl.float32) * up.to(tl.float32)


@triton.jit
def gate_rows(
    gate_up_ptr,  # [num_rows, 2 * columns]
    output_ptr,  # [num_rows, columns]
    columns,
    COLUMNS: tl.constexpr,
    ACTIVATION: tl.constexpr,  # as `Activation` numbers them
):
    # One program gates COLUMNS numbers of one row.
    wait_for_earlier()
    row = tl.program_id(0).to(tl.int64)
    places = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    present = places < columns
    gate = tl.load(gate_up_ptr + row * 2 * columns + places, mask=present, other=0.0)
    up = tl.load(gate_up_ptr + row * 2 * columns + columns + places, mask=present, other=0.0)
    tl.store(output_ptr + row * columns + places, gate_by(gate, up, ACTIVATION), mask=present)


@triton.jit
def norm_of_head(low, high, weight_low, weight_high, eps, HEAD_DIM: tl.constexpr):
    """Normalizes heads, given as halves [heads, half], and rounds as `rms_norm` does."""
    dtype = low.dtype
    wide_low, wide_high = low.to(tl.float32), high.to(tl.float32)
    total = tl.sum(wide_low * wide_low, 1) + tl.sum(wide_high * wide_high, 1)
    scale = tl.rsqrt(total / HEAD_DIM + eps)[:, None]
    within: tl.constexpr = weight_low.dtype
    scaled_low, scaled_high = (
        (wide_low * scale).to(within).to(tl.float32),
        (wide_high * scale).to(within).to(tl.float32),
    )
    return (weight_low.to(tl.float32) * scaled_low).to(dtype), (weight_high.to(tl.float32) * scaled_high).to(dtype)


@triton.jit
def to_codes(numbers, divisors, LARGEST: tl.constexpr, CODES: tl.constexpr):
    """Rounds numbers [heads, half] to codes; NaN becomes 0."""
    codes = tl.div_rn(numbers, divisors[:, None])
    codes = tl.minimum(tl.maximum(tl.where(codes == codes, codes, 0.0), -LARGEST), LARGEST)
    if LARGEST == 127.0:  # int8
        # A float of this size has no place for a fraction: ties go to even.
        codes = codes + 12582912.0 - 12582912.0
    return codes.to(CODES)


@triton.jit
def rotate_and_write_heads(
    qkv_ptr,  # [num_rows, num_heads + 2 * num_kv_heads, head_dim]; queries are rotated in place
    cosines_ptr,  # [num_rows, head_dim / 2] float32, angle_stride apart
    sines_ptr,  # likewise
    query_norm_ptr,  # [head_dim], or None, as the next one
    key_norm_ptr,  # [head_dim]
    kv_ptr,  # [num_pages, 2, num_kv_heads, block_size, head_dim]; of int4, open blocks
    scales_ptr,  # [num_pages, 2, num_kv_heads, block_size] of codes, or None
    page_to_open_ptr,  # [num_pages] int32 of int4, or None
    slot_mapping_ptr,  # [num_rows] int64
    qkv_row_stride,
    angle_stride,
    kv_page_stride,
    kv_plane_stride,
    kv_head_stride,
    scales_page_stride,
    scales_plane_stride,
    scales_head_stride,
    eps,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEADS: tl.constexpr,
    PADDED_HALF: tl.constexpr,
    LARGEST: tl.constexpr,
):
    # One program takes HEADS heads of one row: normalizes and rotates queries and keys, writes keys and values.
    wait_for_earlier()
    row = tl.program_id(0).to(tl.int64)
    heads = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    HALF: tl.constexpr = HEAD_DIM // 2
    dims = tl.arange(0, PADDED_HALF)
    present = (heads < NUM_HEADS + 2 * NUM_KV_HEADS)[:, None] & (dims < HALF)[None, :]
    is_query, is_value = heads < NUM_HEADS, heads >= NUM_HEADS + NUM_KV_HEADS

    head_ptrs = qkv_ptr + row * qkv_row_stride + heads[:, None] * HEAD_DIM + dims[None, :]
    low, high = tl.load(head_ptrs, mask=present, other=0.0), tl.load(head_ptrs + HALF, mask=present, other=0.0)
    own_low, own_high = low, high
    if query_norm_ptr is not None:
        of_query, of_key = present & is_query[:, None], present & ~is_query[:, None]
        places = dims[None, :] + tl.zeros([HEADS, 1], tl.int32)
        weight_low = tl.load(query_norm_ptr + places, mask=of_query, other=0.0)
        weight_high = tl.load(query_norm_ptr + HALF + places, mask=of_query, other=0.0)
        weight_low += tl.load(key_norm_ptr + places, mask=of_key, other=0.0)
        weight_high += tl.load(key_norm_ptr + HALF + places, mask=of_key, other=0.0)
        low, high = norm_of_head(low, high, weight_low, weight_high, eps, HEAD_DIM)
    cosines = tl.load(cosines_ptr + row * angle_stride + dims, mask=dims < HALF, other=0.0)[None, :]
    sines = tl.load(sines_ptr + row * angle_stride + dims, mask=dims < HALF, other=0.0)[None, :]
    wide_low, wide_high = low.to(tl.float32), high.to(tl.float32)
    low = (wide_low * cosines - wide_high * sines).to(own_low.dtype)
    high = (wide_high * cosines + wide_low * sines).to(own_low.dtype)
    low, high = tl.where(is_value[:, None], own_low, low), tl.where(is_value[:, None], own_high, high)
    tl.store(head_ptrs, low, mask=present & is_query[:, None])
    tl.store(head_ptrs + HALF, high, mask=present & is_query[:, None])

    # The slot is int64, and so is all that is derived from it: a pool may hold more than 2^31 elements.
    slot = tl.load(slot_mapping_ptr + row)
    if slot < 0:
        return
    page, offset = slot // BLOCK_SIZE, slot % BLOCK_SIZE
    place = page
    if page_to_open_ptr is not None:
        place = tl.load(page_to_open_ptr + page).to(tl.int64)
    planes = is_value.to(tl.int64)
    kv_heads = heads.to(tl.int64) - NUM_HEADS - planes * NUM_KV_HEADS
    written = present & ~is_query[:, None]
    rows = place * kv_page_stride + planes * kv_plane_stride + kv_heads * kv_head_stride + offset * HEAD_DIM
    target_ptrs = kv_ptr + rows[:, None] + dims[None, :]
    if scales_ptr is None:
        tl.store(target_ptrs, low, mask=written)
        tl.store(target_ptrs + HALF, high, mask=written)
    else:
        wide_low, wide_high = low.to(tl.float32), high.to(tl.float32)
        largest = tl.maximum(tl.max(tl.abs(wide_low), 1), tl.max(tl.abs(wide_high), 1))
        # The greatest of numbers may pass over NaN; a sum does not.
        flaw = tl.sum(flaws(wide_low) + flaws(wide_high), 1)
        scales = (largest * (1.0 / LARGEST) + flaw).to(tl.bfloat16)
        wide_scales = scales.to(tl.float32)
        divisors = tl.where(wide_scales > 0, wide_scales, 1.0)
        CODES: tl.constexpr = kv_ptr.dtype.element_ty
        tl.store(target_ptrs, to_codes(wide_low, divisors, LARGEST, CODES), mask=written)
        tl.store(target_ptrs + HALF, to_codes(wide_high, divisors, LARGEST, CODES), mask=written)
        scale_rows = page * scales_page_stride + planes * scales_plane_stride + kv_heads * scales_head_stride + offset
        tl.store(scales_ptr + scale_rows, scales, mask=~is_query & (heads < NUM_HEADS + 2 * NUM_KV_HEADS))


@triton.jit
def find_likeliest(
    logits_ptr,  # [num_rows, num_columns] float32, row_stride apart
    tokens_ptr,  # [num_rows] int64
    row_stride,
    num_columns,
    COLUMNS: tl.constexpr,
):
    # One program finds the place of the greatest number of one row, the first among equals; -1 if a number is none.
    wait_for_earlier()
    row = tl.program_id(0).to(tl.int64)
    lanes = tl.arange(0, COLUMNS)
    greatest = tl.full([COLUMNS], float("-inf"), tl.float32)
    least = tl.full([COLUMNS], float("inf"), tl.float32)
    places = tl.zeros([COLUMNS], tl.int32)
    num_flaws = tl.zeros([COLUMNS], tl.int32)
    for first in range(0, num_columns, COLUMNS):
        at = first + lanes
        present = at < num_columns
        numbers = tl.load(logits_ptr + row * row_stride + at, mask=present, other=0.0)
        num_flaws += (numbers != numbers).to(tl.int32)
        least = tl.where(present & (numbers < least), numbers, least)
        is_more = present & (numbers > greatest)
        greatest, places = tl.where(is_more, numbers, greatest), tl.where(is_more, at, places)
    most, lowest = tl.max(greatest, 0), tl.min(least, 0)
    is_sound = (tl.abs(most) < float("inf")) & (tl.abs(lowest) < float("inf")) & (tl.sum(num_flaws, 0) == 0)
    half_span = tl.where(is_sound, most, 0.0) * 0.5 - tl.where(is_sound, lowest, 0.0) * 0.5
    is_sound = is_sound & (half_span <= 1.7014118e38)  # else the span is beyond float32
    token = tl.min(tl.where(greatest == most, places, num_columns), 0)
    tl.store(tokens_ptr + row, tl.where(is_sound, token, -1).to(tl.int64))


def likeliest(logits: Tensor) -> Tensor:
    """Implements `kernels.accelerator.Accelerator.likeliest`, on the current GPU."""
    num_rows, columns = logits.shape
    tokens = logits.new_empty(num_rows, dtype=torch.int64)
    if num_rows:
        at_once = min(LIKELIEST_AT_ONCE, triton.next_power_of_2(columns))
        options = dependent(OPTIONS) | {"num_warps": 16}
        find_likeliest[(num_rows,)](logits, tokens, logits.stride(0), columns, COLUMNS=at_once, **options)
    return tokens


def rms_norm(
    states: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None, out: Tensor | None = None
) -> Tensor:
    """Implements `kernels.backend.Backend.rms_norm`, on the current GPU."""
    num_rows, columns = states.shape
    output = torch.empty_like(states, memory_format=torch.contiguous_format) if out is None else out
    if num_rows:
        padded = triton.next_power_of_2(columns)
        options = dependent(OPTIONS) | {"num_warps": min(16, max(1, padded // 512))}
        strides = states.stride(0), output.stride(0)
        normalize[(num_rows,)](
            states, weight, residual, output, *strides, columns, eps, PADDED_COLUMNS=padded, **options
        )
    return output


def gate(gate_up: Tensor, activation: Activation, out: Tensor | None = None) -> Tensor:
    """Implements `kernels.backend.Backend.gate`, on the current GPU."""
    *rows, columns = *gate_up.shape[:-1], gate_up.shape[-1] // 2
    output, num_rows = gate_up.new_empty(*rows, columns) if out is None else out, math.prod(rows)
    if num_rows:
        grid = num_rows, triton.cdiv(columns, GATED_AT_ONCE)
        gate_rows[grid](
            gate_up, output, columns, COLUMNS=GATED_AT_ONCE, ACTIVATION=activation.value, **dependent(OPTIONS)
        )
    return output


def rotate_and_write(qkv: Tensor, heads: Heads, angles: Angles, pages: KVPages, slot_mapping: Tensor) -> Tensor:
    """Implements `kernels.backend.Backend.rotate_and_write`, on the current GPU, except for closing blocks of int4.

    Returns a view of `qkv`.
    """
    int4, num_all = pages.int4, heads.num_queries + 2 * heads.num_kv
    target, scales = (pages.data, pages.scales) if int4 is None else (int4.open, None)
    if len(qkv):
        rotate_and_write_heads[(len(qkv), triton.cdiv(num_all, HEADS_AT_ONCE))](
            qkv,
            angles.cosines,
            angles.sines,
            heads.query_norm,
            heads.key_norm,
            target,
            scales,
            None if int4 is None else int4.page_to_open,
            slot_mapping,
            qkv.stride(0),
            angles.cosines.stride(0),
            *target.stride()[:3],
            *((0, 0, 0) if scales is None else scales.stride()[:3]),
            heads.norm_eps,
            NUM_HEADS=heads.num_queries,
            NUM_KV_HEADS=heads.num_kv,
            HEAD_DIM=heads.size,
            BLOCK_SIZE=pages.data.shape[3],
            HEADS=HEADS_AT_ONCE,
            PADDED_HALF=triton.next_power_of_2(heads.size // 2),
            LARGEST=LARGEST_CODE.get(target.dtype, 0.0),
            **dependent(OPTIONS),
        )
    return qkv.view(len(qkv), num_all, heads.size)[:, : heads.num_queries]
