"""A candidate for products of few rows with packed weights: codes are multiplied, and scaled after their product.

Two codes at a time become two numbers of bfloat16 by integers, exactly. Their product with the rows over one group of
the depth is multiplied by the group's scale in float32, and an offset by the sum of the group's states. No weight is
rounded, neither to the dtype of the file nor to that of rows; sums are float32. benchmarks/gpu_code_times.py times it.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.quantized.device_layout import CodeFormat, Part
from kernels.quantized.products import OPTIONS, constants_of, number_of_byte, number_of_half, widen, write_rows

BASE = tl.constexpr(128)
"""A code of 7 bits at most, below the bits of this number in bfloat16, is their sum."""
BASES = 0x43004300
"""Two of them."""
MIN_SPLIT_DEPTH, MAX_SPLITS = 256, 16


@dataclass(frozen=True)
class CodesTile:
    """The shape of a program, and the most programs along columns and depth together.

    is_widened: weights are widened a plane at a time, with their bits, in place of products that are scaled.
    """

    rows: int
    columns: int
    num_warps: int
    num_stages: int
    num_programs: int
    is_widened: bool = False


def write_read(form: CodeFormat, plane: int) -> str:
    """Writes how two codes of a plane become bfloat16: BASE + code with offsets, else the code less its zero.

    $1: two words of 16 bits. $2, of 6 bits: the bytes with the rests of both, twice.
    """
    lines, mask = [f"shr.b32 moved, $1, {(8 if form.bits == 8 else 4) * plane};"], 0x007F007F
    lines += [f"mov.b32 above, {BASES:#x};", f"mov.b32 taken, {BASES | form.zero * 0x10001:#x};"]
    if form.bits == 8:  # seven bits less the eighth
        lines += [f"lop3.b32 taken, moved, 0x00800080, {BASES:#x}, 0xea;"]
    else:
        mask = 0x000F000F
    if form.bits == 6:
        shift = f"{'shl' if plane < 2 else 'shr'}.b32 above, above, {abs(4 - 2 * plane)};"
        lines += ["prmt.b32 above, $2, 0, 0x4140;", shift, f"lop3.b32 above, above, 0x00300030, {BASES:#x}, 0xea;"]
    lines += [f"lop3.b32 $0, moved, {mask:#x}, above, 0xea;"]
    if not form.has_offsets:
        lines += ["mov.b32 minus, 0xbf80bf80;", "fma.rn.bf16x2 $0, taken, minus, $0;"]
    return "{ .reg .b32 moved, above, taken, minus; " + " ".join(lines) + " }"


def write_reads(form: CodeFormat) -> tuple[str, ...]:
    """Writes the assembly of each plane of a word."""
    return tuple(write_read(form, plane) for plane in range(2 if form.bits == 8 else 4))


@triton.jit
def read_numbers(words, rest, ADDED: tl.constexpr, PLANE_INDEX: tl.constexpr, BITS: tl.constexpr, READS: tl.constexpr):
    """Reads a plane's codes as bfloat16, ADDED added. READS: the assembly of a pair, by plane, or None."""
    if READS is not None and rest is not None:
        both = [words, rest]
        numbers = tl.inline_asm_elementwise(READS[PLANE_INDEX], "=r,r,r", both, tl.bfloat16, is_pure=True, pack=2)
    elif READS is not None:
        numbers = tl.inline_asm_elementwise(READS[PLANE_INDEX], "=r,r", [words], tl.bfloat16, is_pure=True, pack=2)
    elif BITS == 8:
        numbers = (words << (8 - 8 * PLANE_INDEX) >> 8).to(tl.float32).to(tl.bfloat16)
    else:
        codes = (words >> (4 * PLANE_INDEX)) & 15
        if rest is not None:
            places = tl.arange(0, words.shape[1]) % 2 * 8 + 2 * PLANE_INDEX
            codes |= ((rest >> places[None, :].to(tl.int16)) & 3) << 4
        numbers = (codes + ADDED).to(tl.float32).to(tl.bfloat16)
    return numbers


@triton.jit
def add_scaled(
    total,
    tables,
    row_ptrs,
    is_row,
    depth,
    columns,
    chunk,
    PLANE_INDEX: tl.constexpr,
    FORM: tl.constexpr,
    SCALE: tl.constexpr,
    READS: tl.constexpr,
):
    """Adds products with a plane's codes, scaled, to sums [columns, rows]. FORM: as `products.widen_word` has it."""
    codes_ptr, rest_ptr, scales_ptr, factors_ptr, num_columns = tables
    PLANES: tl.constexpr = FORM[0]
    BITS: tl.constexpr = FORM[1]
    BLOCK: tl.constexpr = FORM[2]
    ZERO: tl.constexpr = FORM[3]
    HAS_OFFSETS: tl.constexpr = FORM[6]
    IS_HALVED: tl.constexpr = FORM[7]
    COLUMNS: tl.constexpr = columns.shape[0]
    GROUP: tl.constexpr = 16 if IS_HALVED else 32
    OF_WORD: tl.constexpr = 2 if BITS == 8 else 4
    if BLOCK % (PLANES * 32) == 0:
        block = chunk // (BLOCK // (PLANES * 32))
    else:
        block = (chunk * PLANES + PLANE_INDEX) // (BLOCK // 32)
    scale_words = tl.load(scales_ptr + block.to(tl.int64) * num_columns + columns)
    if tl.float32 == SCALE:
        plane_scales = scale_words.to(tl.float32, bitcast=True)
    else:
        plane_scales = number_of_half(scale_words, 0, SCALE)
    if factors_ptr is not None:
        pair = (chunk * (PLANES // 2) + PLANE_INDEX // 2).to(tl.int64)
        factors = tl.load(factors_ptr + pair * num_columns + columns)
    for part in tl.static_range(32 // GROUP):
        places = columns[:, None] * 32 + part * GROUP + tl.arange(0, GROUP)[None, :]
        word = (chunk * (PLANES // OF_WORD) + PLANE_INDEX // OF_WORD).to(tl.int64)
        words = tl.load(codes_ptr + word * num_columns * 32 + places)
        rest = None
        if rest_ptr is not None:
            pairs = columns[:, None] * 16 + part * (GROUP // 2) + tl.arange(0, GROUP // 2)[None, :]
            rest = tl.load(rest_ptr + chunk.to(tl.int64) * num_columns * 16 + pairs)
            rest = tl.broadcast_to(rest[:, :, None], COLUMNS, GROUP // 2, 2).reshape(COLUMNS, GROUP)
        codes = read_numbers(words, rest, BASE if HAS_OFFSETS else -ZERO, PLANE_INDEX % OF_WORD, BITS, READS)
        depths = (chunk * PLANES + PLANE_INDEX) * 32 + part * GROUP + tl.arange(0, GROUP)
        present = is_row[:, None] & (depths < depth)[None, :]
        states = tl.trans(tl.load(row_ptrs + depths[None, :], mask=present, other=0.0))
        scales = plane_scales
        if factors_ptr is not None:
            scales = scales * number_of_byte(factors, PLANE_INDEX % 2 * 2 + (part if IS_HALVED else 0))
        if HAS_OFFSETS:
            # The sum begins with what BASE adds to it, taken away: a multiple of the sum of the states.
            sums = tl.dot(tl.full([COLUMNS, GROUP], -BASE, tl.bfloat16), states)
            offsets = number_of_half(scale_words, 1, SCALE) * (-1 / BASE)
            if factors_ptr is not None:
                offsets = offsets * number_of_byte(factors, PLANE_INDEX % 2 * 2 + 1)
            total += tl.dot(codes, states, sums) * scales[:, None]
            total += sums * offsets[:, None]
        else:
            total += tl.dot(codes, states) * scales[:, None]
    return total


@triton.jit
def add_widened(
    total,
    tables,
    row_ptrs,
    is_row,
    depth,
    columns,
    chunk,
    PLANE_INDEX: tl.constexpr,
    FORM: tl.constexpr,
    SCALE: tl.constexpr,
    SOURCE: tl.constexpr,
):
    """Adds products with a plane's weights, which have the bits of `Quantized.dequantize`, to sums [columns, rows]."""
    weights = widen(*tables, columns, chunk, PLANE_INDEX, FORM, SCALE, SOURCE)
    depths = (chunk * FORM[0] + PLANE_INDEX) * 32 + tl.arange(0, 32)
    states = tl.load(row_ptrs + depths[None, :], mask=is_row[:, None] & (depths < depth)[None, :], other=0.0)
    return tl.dot(weights.to(states.dtype), tl.trans(states), total, input_precision="ieee")


@triton.jit(do_not_specialize=["num_rows", "num_chunks", "split_chunks", "num_splits"])
def multiply_codes(
    states_ptr,  # [num_rows, depth] bfloat16
    codes_ptr,  # [num_chunks, words of a place, num_columns, 32] int16; IS_WIDENED: as `products.multiply` has them
    rest_ptr,  # [num_chunks, num_columns, 16] int16, or None
    scales_ptr,  # [blocks, num_columns] int32
    factors_ptr,  # [pairs of planes, num_columns] int32, or None
    bias_ptr,  # [num_columns], or None
    residual_ptr,  # [num_rows, num_columns], or None
    out_ptr,  # [num_rows, num_columns]
    partial_ptr,  # [num_splits, tiles, COLUMNS * ROWS] float32, or None for one split
    counters_ptr,  # [tiles] int32, zeros before and after, or None likewise
    num_rows,
    num_columns,
    depth,
    num_chunks,
    split_chunks,
    num_splits,
    states_stride,
    residual_stride,
    out_stride,
    PLANES: tl.constexpr,
    BITS: tl.constexpr,
    BLOCK: tl.constexpr,
    ZERO: tl.constexpr,
    NUMBERS: tl.constexpr,
    IS_FLOAT: tl.constexpr,
    HAS_OFFSETS: tl.constexpr,
    IS_HALVED: tl.constexpr,
    SCALE: tl.constexpr,
    SOURCE: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    STAGES: tl.constexpr,
    IS_WIDENED: tl.constexpr,
    READS: tl.constexpr,
):
    # One program multiplies ROWS rows by COLUMNS columns over one split of the depth; the last of a tile adds them up.
    program, split = tl.program_id(0), tl.program_id(1)
    column_tiles = tl.cdiv(num_columns, COLUMNS)
    rows = program // column_tiles * ROWS + tl.arange(0, ROWS)
    out_columns = program % column_tiles * COLUMNS + tl.arange(0, COLUMNS)
    columns = tl.minimum(out_columns, num_columns - 1)
    is_row, is_column = rows < num_rows, out_columns < num_columns
    row_ptrs = states_ptr + rows[:, None].to(tl.int64) * states_stride
    tables = codes_ptr, rest_ptr, scales_ptr, factors_ptr, num_columns
    FORM: tl.constexpr = (PLANES, BITS, BLOCK, ZERO, NUMBERS, IS_FLOAT, HAS_OFFSETS, IS_HALVED)

    total = tl.zeros([COLUMNS, ROWS], tl.float32)
    first_chunk = split * split_chunks
    # Told its stages, the loop loads scales ahead, too, which no matrix instruction reads.
    for place in tl.range(tl.minimum(split_chunks, num_chunks - first_chunk), num_stages=STAGES):
        chunk = first_chunk + place
        for plane in tl.static_range(PLANES):
            place_of_rows = row_ptrs, is_row, depth
            if IS_WIDENED:
                total = add_widened(total, tables, *place_of_rows, columns, chunk, plane, FORM, SCALE, SOURCE)
            else:
                total = add_scaled(total, tables, *place_of_rows, columns, chunk, plane, FORM, SCALE, READS)

    if partial_ptr is not None:
        inner = tl.arange(0, COLUMNS)[:, None] * ROWS + tl.arange(0, ROWS)[None, :]
        tile_ptrs = partial_ptr + program * (COLUMNS * ROWS) + inner
        split_stride = tl.num_programs(0).to(tl.int64) * (COLUMNS * ROWS)
        tl.store(tile_ptrs + split * split_stride, total)
        tl.debug_barrier()  # all threads have stored before one of them counts
        if tl.atomic_add(counters_ptr + program, 1, sem="acq_rel", scope="gpu") != num_splits - 1:
            return
        # The tile's last program: it finds the sums of all, which its processor's own cache may not have.
        tl.debug_barrier()
        total = tl.zeros_like(total)
        AT_ONCE: tl.constexpr = 4 if ROWS <= 16 else 1  # loads under way: more rows would not fit the registers
        for first in range(0, num_splits, AT_ONCE):
            for own in tl.static_range(AT_ONCE):
                is_split = tl.zeros_like(inner) + first + own < num_splits
                own_ptrs = tile_ptrs + (first + own) * split_stride
                total += tl.load(own_ptrs, mask=is_split, other=0.0, cache_modifier=".cg")
        tl.store(counters_ptr + program, 0)
    present = is_row[:, None] & is_column[None, :]
    write_rows(
        tl.trans(total), bias_ptr, residual_ptr, out_ptr, rows, out_columns, present, residual_stride, out_stride
    )


def chunks_per_split(part: Part, tile: CodesTile) -> int:
    """Computes the chunks of a split from the shapes of a matrix and a tile alone."""
    wanted = tile.num_programs // triton.cdiv(part.columns, tile.columns)
    most = part.num_chunks * part.format.chunk // MIN_SPLIT_DEPTH
    return int(triton.cdiv(part.num_chunks, max(1, min(wanted, most, MAX_SPLITS))))


def multiply_part(
    states: Tensor,
    part: Part,
    tile: CodesTile,
    counters: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    out: Tensor,
) -> None:
    """Multiplies bfloat16 rows by columns of one format. counters: int32, as many zeros as tiles, and so left."""
    (num_rows, depth), form, tables = states.shape, part.format, part.tables
    split_chunks = chunks_per_split(part, tile)
    num_splits = triton.cdiv(part.num_chunks, split_chunks)
    num_tiles = triton.cdiv(num_rows, tile.rows) * triton.cdiv(part.columns, tile.columns)
    sums = num_splits * num_tiles * tile.rows * tile.columns
    by_pairs = not tile.is_widened and states.is_cuda and torch.version.hip is None
    multiply_codes[(num_tiles, num_splits)](
        states,
        tables.codes if tile.is_widened else tables.codes.view(torch.int16),
        tables.rest,
        tables.scales,
        tables.factors,
        bias,
        residual,
        out,
        states.new_empty(sums, dtype=torch.float32) if num_splits > 1 else None,
        counters if num_splits > 1 else None,
        num_rows,
        part.columns,
        depth,
        part.num_chunks,
        split_chunks,
        num_splits,
        states.stride(0),
        0 if residual is None else residual.stride(0),
        out.stride(0),
        ROWS=tile.rows,
        COLUMNS=tile.columns,
        STAGES=tile.num_stages,
        IS_WIDENED=tile.is_widened,
        READS=write_reads(form) if by_pairs else None,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        **constants_of(part),
        **OPTIONS,
    )
