"""Products of rows with packed weights in Triton: codes are widened in registers, a plane at a time, and multiplied.

A weight has the bits of `Quantized.dequantize` in the dtype of the rows; products are summed in float32. The depth of a
matrix is cut into splits, as its shape says. A split is summed from its first place to its last, and splits are added
in order, both with a program for each split (few rows) and with one program for all. So the order of a row's sum does
not depend on other rows.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.products.dependent_launch import dependent, wait_for_earlier
from kernels.quantized.codebook import Codebook
from kernels.quantized.device_layout import PLANE, CodedWeight, Part
from kernels.tiles import Tile, choose_product_tile, find_widened_rows

SPLIT_COLUMNS, WANTED_PROGRAMS, MIN_SPLIT_DEPTH, MAX_SPLITS = 64, 256, 1024, 16
MERGED_AT_ONCE = 512
WIDENED_AT_ONCE = 16
PANEL_BYTES, PANEL_COLUMNS = 64 << 20, 128
"""The most bytes of columns that are widened to memory at once, and what their number is a multiple of."""
# On AMD's devices the matrix instruction would follow from the rows of a tile, and the order of sums with it.
OPTIONS = {"enable_fp_fusion": True} | ({"matrix_instr_nonkdim": 16} if torch.version.hip else {})
DTYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


@triton.jit
def number_of_byte(words, place: tl.constexpr):
    """Reads a byte of words as a signed number, float32."""
    return ((words << (24 - 8 * place)) >> 24).to(tl.float32)


@triton.jit
def number_of_half(words, place: tl.constexpr, DTYPE: tl.constexpr):
    """Reads 16 bits of words as a number of a dtype, float32."""
    return ((words >> (16 * place)) & 0xFFFF).to(tl.uint16).to(DTYPE, bitcast=True).to(tl.float32)


@triton.jit
def shift_left(bits, places: tl.constexpr):
    """Shifts bits to the left, or to the right by less than nothing."""
    return bits << places if places >= 0 else bits >> -places


@triton.jit
def read_codes(
    words,
    rest,
    IS_ODD: tl.constexpr,
    PLANE_INDEX: tl.constexpr,
    BITS: tl.constexpr,
    NUMBERS: tl.constexpr,
    IS_FLOAT: tl.constexpr,
):
    """Reads a plane's codes at even or odd places as float32: the numbers that they stand for.

    Integers below 8 bits are not moved: as the bits of a float32 below its exponent they are subnormal numbers, which
    one multiplication makes normal ones. They come over 2^(23 - the place of their lowest bit).
    IS_FLOAT: codes are fp8 (e4m3) or FP4 (e2m1), which is doubled.
    """
    LOW_BITS: tl.constexpr = 8 if BITS == 8 else 4
    PLACE: tl.constexpr = PLANE_INDEX * LOW_BITS % 16
    half = words >> 16 if IS_ODD else words
    if IS_FLOAT:
        # The bits of float32 numbers with the same exponents, over 2^120 or 2^127: subnormal ones too.
        MANTISSA: tl.constexpr = 3 if BITS == 8 else 1
        sizes = shift_left(half, 23 - MANTISSA - PLACE) & (((1 << (BITS - 1)) - 1) << (23 - MANTISSA))
        signs = shift_left(half, 32 - BITS - PLACE) & 0x80000000
        return (sizes | signs).to(tl.float32, bitcast=True) * (2.0**120 if BITS == 8 else 2.0**127)
    if BITS == 8:
        # The end of a mantissa, less its beginning and the value of the sign's bit.
        mantissas = (half & (0xFF << PLACE)) ^ (((150 - PLACE) << 23) | (0x80 << PLACE))
        return mantissas.to(tl.float32, bitcast=True) - ((1 << (23 - PLACE)) + 0x80)
    bits = half & (15 << PLACE)
    if NUMBERS is not None:
        # Numbers of 8 bits are bytes of two words of 64 bits.
        LOW: tl.constexpr = NUMBERS[0]
        HIGH: tl.constexpr = NUMBERS[1]
        codes = bits >> PLACE
        halves = tl.where(codes < 8, tl.full([], LOW, tl.int64), tl.full([], HIGH, tl.int64))
        return (halves >> ((codes & 7) * 8).to(tl.int64)).to(tl.int8).to(tl.float32)
    if rest is not None:
        REST_BITS: tl.constexpr = BITS - 4
        REST_PLACE: tl.constexpr = PLANE_INDEX * REST_BITS + 8 * IS_ODD
        bits |= shift_left(rest, PLACE + 4 - REST_PLACE) & (((1 << REST_BITS) - 1) << (PLACE + 4))
    return bits.to(tl.float32, bitcast=True) * 2.0**126


@triton.jit
def widen(
    codes_ptr,
    rest_ptr,
    scales_ptr,
    factors_ptr,
    num_columns,
    columns,
    chunk,
    PLANE_INDEX: tl.constexpr,
    FORM: tl.constexpr,
    SCALE: tl.constexpr,
    SOURCE: tl.constexpr,
):
    """Widens a plane of columns' weights to the dtype in which the file computes them, [columns, 32]. FORM: below."""
    PLANES: tl.constexpr = FORM[0]
    BITS: tl.constexpr = FORM[1]
    BLOCK: tl.constexpr = FORM[2]
    ZERO: tl.constexpr = FORM[3]
    NUMBERS: tl.constexpr = FORM[4]
    IS_FLOAT: tl.constexpr = FORM[5]
    HAS_OFFSETS: tl.constexpr = FORM[6]
    IS_HALVED: tl.constexpr = FORM[7]
    OF_WORD: tl.constexpr = 2 if BITS == 8 else 4
    places = columns[:, None] * 16 + tl.arange(0, 16)[None, :]
    word = (chunk * (PLANES // OF_WORD) + PLANE_INDEX // OF_WORD).to(tl.int64)
    words = tl.load(codes_ptr + word * num_columns * 16 + places).to(tl.uint32, bitcast=True)
    rest = None
    if rest_ptr is not None:
        rest_ptrs = rest_ptr + chunk.to(tl.int64) * num_columns * 16 + places
        rest = tl.load(rest_ptrs).to(tl.uint16, bitcast=True).to(tl.uint32)
    even = read_codes(words, rest, False, PLANE_INDEX, BITS, NUMBERS, IS_FLOAT)
    odd = read_codes(words, rest, True, PLANE_INDEX, BITS, NUMBERS, IS_FLOAT)
    codes = tl.join(even, odd).reshape(columns.shape[0], 32)

    if BLOCK % (PLANES * 32) == 0:
        block = chunk // (BLOCK // (PLANES * 32))
    else:
        block = (chunk * PLANES + PLANE_INDEX) // (BLOCK // 32)
    scale_words = tl.load(scales_ptr + block.to(tl.int64) * num_columns + columns)
    if tl.float32 == SCALE:
        scales = scale_words.to(tl.float32, bitcast=True)[:, None]
    else:
        scales = number_of_half(scale_words, 0, SCALE)[:, None]
    if factors_ptr is not None:
        pair = (chunk * (PLANES // 2) + PLANE_INDEX // 2).to(tl.int64)
        factors = tl.load(factors_ptr + pair * num_columns + columns)
        first = number_of_byte(factors, PLANE_INDEX % 2 * 2)[:, None]
        second = number_of_byte(factors, PLANE_INDEX % 2 * 2 + 1)[:, None]
        if IS_HALVED:
            halves = tl.join(first, second).reshape(columns.shape[0], 2, 1)
            first = tl.broadcast_to(halves, columns.shape[0], 2, 16).reshape(columns.shape[0], 32)
        scales = scales * first
    POWER: tl.constexpr = 1 << (23 - PLANE_INDEX * 4 % 16) if BITS < 8 and not IS_FLOAT and NUMBERS is None else 1
    if tl.float32 == SCALE:  # a product with it is rounded, and is no part of a sum
        codes -= ZERO / POWER
    weights = codes * (scales * POWER)
    if HAS_OFFSETS:
        offsets = number_of_half(scale_words, 1, SCALE)[:, None]
        if factors_ptr is not None:
            offsets = offsets * second
        weights = weights + offsets
    elif ZERO != 0 and tl.float32 != SCALE:
        weights = weights - scales * ZERO
    return weights.to(SOURCE)


@triton.jit
def widen_word(
    tables, columns, chunk, WORD: tl.constexpr, FORM: tl.constexpr, SCALE: tl.constexpr, SOURCE: tl.constexpr
):
    """Widens the planes of a word, one behind another, [columns, 64] of 8 bits, else [columns, 128].

    FORM: the planes, bits, block, zero, numbers, and is_float, has_offsets and is_halved of the codes.
    """
    BITS: tl.constexpr = FORM[1]
    PLANE: tl.constexpr = WORD * (2 if BITS == 8 else 4)
    first = widen(*tables, columns, chunk, PLANE, FORM, SCALE, SOURCE)
    second = widen(*tables, columns, chunk, PLANE + 1, FORM, SCALE, SOURCE)
    planes = tl.join(first, second).permute(0, 2, 1).reshape(columns.shape[0], 64)
    if BITS < 8:
        third = widen(*tables, columns, chunk, PLANE + 2, FORM, SCALE, SOURCE)
        fourth = widen(*tables, columns, chunk, PLANE + 3, FORM, SCALE, SOURCE)
        pairs = tl.join(tl.join(first, third), tl.join(second, fourth))
        planes = pairs.permute(0, 2, 3, 1).reshape(columns.shape[0], 128)
    return planes


@triton.jit
def write_rows(sums, bias_ptr, residual_ptr, out_ptr, rows, columns, present, residual_stride, out_stride):
    """Adds a bias, then a residual, rounding twice as the CPU's kernels do, and stores [rows, columns]."""
    wide_rows = rows[:, None].to(tl.int64)
    if bias_ptr is not None:
        bias = tl.load(bias_ptr + columns[None, :] + tl.zeros_like(rows)[:, None], mask=present, other=0.0)
        sums = sums.to(bias.dtype).to(tl.float32) + bias.to(tl.float32)
    if residual_ptr is not None:
        residual = tl.load(residual_ptr + wide_rows * residual_stride + columns[None, :], mask=present, other=0.0)
        sums = sums.to(residual.dtype).to(tl.float32) + residual.to(tl.float32)
    tl.store(out_ptr + wide_rows * out_stride + columns[None, :], sums, mask=present)


@triton.jit(do_not_specialize=["num_rows", "num_chunks", "split_chunks"])
def multiply(
    states_ptr,  # [num_rows, depth]
    codes_ptr,  # [num_chunks, words of two places, num_columns, 16] int32
    rest_ptr,  # [num_chunks, num_columns, 16] int16, or None
    scales_ptr,  # [blocks, num_columns] int32
    factors_ptr,  # [pairs of planes, num_columns] int32, or None
    bias_ptr,  # [num_columns], or None
    residual_ptr,  # [num_rows, num_columns], or None
    out_ptr,  # [num_rows, num_columns]; of several splits, float32 [num_splits, num_rows, num_columns]
    num_rows,
    num_columns,
    depth,
    num_chunks,
    split_chunks,
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
):
    # One program multiplies ROWS rows by COLUMNS columns, over one split of the depth, or over all of them in order.
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    out_columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    columns = tl.minimum(out_columns, num_columns - 1)
    split = tl.program_id(2)
    is_row, is_column = rows < num_rows, out_columns < num_columns
    num_own = tl.where(tl.num_programs(2) == 1, tl.cdiv(num_chunks, split_chunks), 1)
    tables = codes_ptr, rest_ptr, scales_ptr, factors_ptr, num_columns
    FORM: tl.constexpr = (PLANES, BITS, BLOCK, ZERO, NUMBERS, IS_FLOAT, HAS_OFFSETS, IS_HALVED)
    DEPTH: tl.constexpr = 64 if BITS == 8 else 128
    WORDS: tl.constexpr = PLANES * 32 // DEPTH
    plane_places = tl.arange(0, DEPTH)
    row_ptrs = states_ptr + rows[:, None].to(tl.int64) * states_stride

    # Columns are the rows of the tile: codes then stay in registers from their widening to the matrix instruction.
    total = tl.zeros([COLUMNS, ROWS], tl.float32)
    for own in range(num_own):
        first_chunk = (split + own) * split_chunks
        sums = tl.zeros([COLUMNS, ROWS], tl.float32)
        for place in range(tl.minimum(split_chunks, num_chunks - first_chunk)):
            chunk = first_chunk + place
            for word in tl.static_range(WORDS):
                weights = widen_word(tables, columns, chunk, word, FORM, SCALE, SOURCE)
                depths = (chunk * WORDS + word) * DEPTH + plane_places
                present = is_row[:, None] & (depths < depth)[None, :]
                states = tl.load(row_ptrs + depths[None, :], mask=present, other=0.0)
                sums = tl.dot(weights.to(states.dtype), tl.trans(states), sums, input_precision="ieee")
        total += sums

    out_ptr += split.to(tl.int64) * num_rows * out_stride
    present = is_row[:, None] & is_column[None, :]
    write_rows(
        tl.trans(total), bias_ptr, residual_ptr, out_ptr, rows, out_columns, present, residual_stride, out_stride
    )


@triton.jit(do_not_specialize=["num_rows", "num_splits"])
def add_splits(
    partial_ptr,  # [num_splits, num_rows, num_columns] float32
    bias_ptr,  # [num_columns], or None
    residual_ptr,  # [num_rows, num_columns], or None
    out_ptr,  # [num_rows, num_columns]
    num_splits,
    num_rows,
    num_columns,
    residual_stride,
    out_stride,
    COLUMNS: tl.constexpr,
):
    # One program adds the splits of COLUMNS numbers of one row, in their order.
    wait_for_earlier()
    rows = tl.program_id(0) + tl.arange(0, 1)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    present = (columns < num_columns)[None, :]
    total = tl.zeros([1, COLUMNS], tl.float32)
    for split in range(num_splits):
        split_rows = (rows.to(tl.int64) + split * num_rows)[:, None]
        total += tl.load(partial_ptr + split_rows * num_columns + columns[None, :], mask=present, other=0.0)
    write_rows(total, bias_ptr, residual_ptr, out_ptr, rows, columns, present, residual_stride, out_stride)


@triton.jit(do_not_specialize=["first", "num_rows"])
def widen_rows(
    ids_ptr,  # [num_rows] int64; None for columns from `first` on
    codes_ptr,  # as `multiply` has them, as the next three
    rest_ptr,
    scales_ptr,
    factors_ptr,
    out_ptr,  # [num_rows, depth]
    first,
    num_rows,
    num_columns,
    depth,
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
):
    # One program widens one chunk of ROWS columns of a table.
    wait_for_earlier()
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    chunk = tl.program_id(1)
    is_row = rows < num_rows
    if ids_ptr is None:
        columns = tl.minimum(first + rows, num_columns - 1)
    else:
        columns = tl.load(ids_ptr + rows, mask=is_row, other=0).to(tl.int32)
    tables = codes_ptr, rest_ptr, scales_ptr, factors_ptr, num_columns
    FORM: tl.constexpr = (PLANES, BITS, BLOCK, ZERO, NUMBERS, IS_FLOAT, HAS_OFFSETS, IS_HALVED)
    DEPTH: tl.constexpr = 64 if BITS == 8 else 128
    WORDS: tl.constexpr = PLANES * 32 // DEPTH
    for word in tl.static_range(WORDS):
        weights = widen_word(tables, columns, chunk, word, FORM, SCALE, SOURCE)
        depths = (chunk * WORDS + word) * DEPTH + tl.arange(0, DEPTH)
        out_ptrs = out_ptr + rows[:, None].to(tl.int64) * depth + depths[None, :]
        tl.store(out_ptrs, weights, mask=is_row[:, None] & (depths < depth)[None, :])


def constants_of(part: Part) -> dict[str, object]:
    """Lists the constants that the kernels are compiled for."""
    form = part.format
    return {
        "PLANES": form.planes,
        "BITS": form.bits,
        "BLOCK": form.block,
        "ZERO": form.zero,
        "NUMBERS": None if form.codebook in (None, Codebook.E2M1) else form.codebook.halves,
        "IS_FLOAT": form.is_fp8 or form.codebook is Codebook.E2M1,
        "HAS_OFFSETS": form.has_offsets,
        "IS_HALVED": form.is_halved,
        "SCALE": DTYPES[form.scale_dtype],
        "SOURCE": DTYPES[form.source],
    }


def chunks_per_split(part: Part) -> int:
    """Computes the chunks of a split from a matrix's shape alone: long splits, but enough programs to fill a device."""
    padded_depth = part.num_chunks * part.format.planes * PLANE
    wanted = WANTED_PROGRAMS // triton.cdiv(part.columns, SPLIT_COLUMNS)
    num_splits = max(1, min(wanted, padded_depth // MIN_SPLIT_DEPTH, MAX_SPLITS))
    return int(triton.cdiv(part.num_chunks, num_splits))


def linear(
    states: Tensor,
    weight: CodedWeight,
    bias: Tensor | None,
    residual: Tensor | None,
    out: Tensor,
    multiply: Callable[..., None],
) -> Tensor:
    """Implements `kernels.backend.Backend.linear` for packed weights, on the current GPU.

    multiply: multiplies by each part, as `multiply_part` does, with which `out` may be float32.
    """
    first = 0
    for part in weight.parts if len(states) else ():
        own = slice(first, first + part.columns)
        added = None if bias is None else bias[own], None if residual is None else residual[:, own]
        multiply(states, part, *added, out[:, own])
        first = own.stop
    return out


def embed(token_ids: Tensor, table: CodedWeight, out: Tensor) -> Tensor:
    """Widens the rows `token_ids` int64 [T] of a table of one format, on the current GPU; `out` is contiguous."""
    [part] = table.parts
    if len(token_ids):
        widen_columns(part, token_ids, out)
    return out


def widen_columns(part: Part, columns: Tensor | int, out: Tensor) -> None:
    """Widens columns int64 [n], or n from one on, to `out`, contiguous [n, depth], on the current GPU."""
    num_rows, depth = out.shape
    ids, first = (None, columns) if isinstance(columns, int) else (columns, 0)
    widen_rows[(triton.cdiv(num_rows, WIDENED_AT_ONCE), part.num_chunks)](
        ids,
        *_tables_of(part),
        out,
        first,
        num_rows,
        part.columns,
        depth,
        ROWS=WIDENED_AT_ONCE,
        num_warps=1,
        **constants_of(part),
        **dependent(OPTIONS),
    )


def multiply_part(states: Tensor, part: Part, bias: Tensor | None, residual: Tensor | None, out: Tensor) -> None:
    """Multiplies by columns of one format, widened in registers."""
    num_rows = len(states)
    tile = choose_product_tile(states.device, states.dtype, part.format.bits, num_rows)
    num_splits = triton.cdiv(part.num_chunks, chunks_per_split(part))
    if num_splits == 1 or num_rows > tile.rows:
        _launch(states, part, tile, 1, bias, residual, out)
        return
    partial = states.new_empty(num_splits, num_rows, part.columns, dtype=torch.float32)
    _launch(states, part, tile, num_splits, None, None, partial[0])
    add_up(partial, bias, residual, out)


def add_up(partial: Tensor, bias: Tensor | None, residual: Tensor | None, out: Tensor) -> None:
    """Adds splits, float32 [num_splits, num_rows, columns], in order, then a bias and a residual, on this GPU."""
    num_splits, num_rows, columns = partial.shape
    add_splits[(num_rows, triton.cdiv(columns, MERGED_AT_ONCE))](
        partial,
        bias,
        residual,
        out,
        num_splits,
        num_rows,
        columns,
        0 if residual is None else residual.stride(0),
        out.stride(0),
        COLUMNS=MERGED_AT_ONCE,
        num_warps=4,
        **dependent(OPTIONS),
    )


def multiply_by_panels(states: Tensor, part: Part, bias: Tensor | None, residual: Tensor | None, out: Tensor) -> None:
    """Multiplies by panels where a device has shown that this is quicker, else as `multiply_part` does.

    A row's bits then depend on the number of rows, as with torch's products of plain weights.
    """
    most_rows = find_widened_rows(states.device, states.dtype, part.format.bits)
    if most_rows is None or len(states) <= most_rows:
        multiply_part(states, part, bias, residual, out)
        return
    depth = states.shape[1]
    size = max(1, PANEL_BYTES // (depth * states.element_size() * PANEL_COLUMNS)) * PANEL_COLUMNS
    added, then = (bias, None) if residual is None else (residual, bias)
    for first in range(0, part.columns, size):
        own = slice(first, min(first + size, part.columns))
        panel = states.new_empty(own.stop - first, depth)
        widen_columns(part, first, panel)
        if added is None:
            torch.mm(states, panel.T, out=out[:, own])
        else:
            torch.addmm(added[..., own], states, panel.T, out=out[:, own])
        if then is not None:
            out[:, own].add_(then[own])


def _launch(
    states: Tensor,
    part: Part,
    tile: Tile,
    num_splits: int,
    bias: Tensor | None,
    residual: Tensor | None,
    out: Tensor,
) -> None:
    """Launches `multiply` with `num_splits` programs along the depth; with 1, a program sums all splits."""
    num_rows, depth = states.shape
    multiply[(triton.cdiv(num_rows, tile.rows), triton.cdiv(part.columns, tile.width), num_splits)](
        states,
        *_tables_of(part),
        bias,
        residual,
        out,
        num_rows,
        part.columns,
        depth,
        part.num_chunks,
        chunks_per_split(part),
        states.stride(0),
        0 if residual is None else residual.stride(0),
        out.stride(0),
        ROWS=tile.rows,
        COLUMNS=tile.width,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        **constants_of(part),
        **OPTIONS,
    )


def _tables_of(part: Part) -> tuple[Tensor | None, ...]:
    tables = part.tables
    return tables.codes, tables.rest, tables.scales, tables.factors
