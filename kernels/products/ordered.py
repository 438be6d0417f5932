"""Products of rows with plain matrices in Triton, of one order: a row's bits depend on no other row.

The depth of a matrix is cut into splits, as its shape says. A split is summed from its first place to its last, and
splits are added in order: for few rows by the last of a tile's programs, in the same launch, for more by a launch of
its own, for many by one program that has all splits. Few rows are the right operand, so that all tiles have one kind of
matrix instruction.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from kernels.backend import Activation
from kernels.products.dependent_launch import dependent, wait_for_earlier
from kernels.quantized.products import OPTIONS, add_up, write_rows
from kernels.row_operations import gate_by
from kernels.tiles import OrderedTile, architecture_of, choose_ordered_tile

SPLIT_COLUMNS, WANTED_PROGRAMS = 64, 256
"""Columns of a program when splits are counted, and the programs that these make."""
MIN_SPLIT_DEPTH, MAX_SPLITS = 1024, 8
UNIT = 128
"""A split is a multiple of it, which the depth of an iteration divides."""
ROWS_AT_ONCE = 8
"""Tiles of rows whose programs are neighbours, so that they find the columns in the cache."""
MAX_COUNTED_ROWS, MAX_SPLIT_ROWS = 16, 256
"""The most rows whose splits the last program of a tile adds, and the most whose splits have a program each.

A gated product's are always added by the last program.
"""
MAX_TILES, MAX_STREAMS = 1024, 128
"""The most tiles whose splits have a program each, and the most streams of a device that launch products."""
WITH_DESCRIPTORS = ("sm_90", "sm_100")
"""Architectures that load tiles by a tensor's descriptor (TMA)."""
ALIGNED_BYTES = 16
"""The alignment of a descriptor's rows."""


@triton.jit(do_not_specialize=["num_rows", "num_splits", "num_own", "out_split_stride"])
def multiply_in_order(
    states,  # [num_rows, depth], a descriptor or a pointer
    weights,  # [num_columns, depth], likewise
    bias_ptr,  # [num_columns], or None
    residual_ptr,  # [num_rows, num_columns], or None
    out_ptr,  # [num_rows, num_columns]; of splits that another launch adds, float32 [num_splits, num_rows, num_columns]
    partial_ptr,  # [num_splits, tiles, ROWS * COLUMNS] float32, or None where this launch adds no others' splits
    counters_ptr,  # [tiles] int32, zeros before and after, or None likewise
    num_rows,
    num_columns,
    depth,
    split_depth,
    num_splits,
    num_own,
    states_stride,
    weights_stride,
    residual_stride,
    out_stride,
    out_split_stride,
    IS_ALONE: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    STEP: tl.constexpr,
    GROUP: tl.constexpr,
    IS_TURNED: tl.constexpr,
    IS_DESCRIBED: tl.constexpr,
    ACTIVATION: tl.constexpr,  # of an interleaved matrix, whose product is gated; or None
):
    # One program has a tile of the product and one split of the depth, or all of them, one after another. IS_ALONE: it
    # has one split, and no second sum.
    wait_for_earlier()
    program, split = tl.program_id(0), tl.program_id(1)
    row_tiles, column_tiles = tl.cdiv(num_rows, ROWS), tl.cdiv(num_columns, COLUMNS)
    first = program // (GROUP * column_tiles) * GROUP
    at_once = tl.minimum(row_tiles - first, GROUP)
    inside = program % (GROUP * column_tiles)
    row, column = (first + inside % at_once) * ROWS, inside // at_once * COLUMNS
    rows, columns = row + tl.arange(0, ROWS), column + tl.arange(0, COLUMNS)
    is_row, is_column = rows < num_rows, columns < num_columns
    if not IS_DESCRIBED:
        row_ptrs = states + rows[:, None].to(tl.int64) * states_stride
        column_ptrs = weights + columns[:, None].to(tl.int64) * weights_stride

    total = tl.zeros([COLUMNS, ROWS], tl.float32) if IS_TURNED else tl.zeros([ROWS, COLUMNS], tl.float32)
    for own in range(1 if IS_ALONE else num_own):
        begin = (split + own) * split_depth
        sums = tl.zeros_like(total)
        for place in tl.range(begin, tl.minimum(begin + split_depth, depth), STEP):
            if IS_DESCRIBED:
                left, right = states.load([row, place]), weights.load([column, place])
            else:
                depths = place + tl.arange(0, STEP)
                is_depth = (depths < depth)[None, :]
                left = tl.load(row_ptrs + depths[None, :], mask=is_row[:, None] & is_depth, other=0.0)
                right = tl.load(column_ptrs + depths[None, :], mask=is_column[:, None] & is_depth, other=0.0)
            if IS_TURNED:
                sums = tl.dot(right, tl.trans(left), sums, input_precision="ieee")
            else:
                sums = tl.dot(left, tl.trans(right), sums, input_precision="ieee")
        if IS_ALONE:
            total = sums
        else:
            total += sums

    if partial_ptr is not None:
        inner = tl.arange(0, COLUMNS)[:, None] * ROWS + tl.arange(0, ROWS)[None, :]
        if not IS_TURNED:
            inner = tl.arange(0, ROWS)[:, None] * COLUMNS + tl.arange(0, COLUMNS)[None, :]
        tile_ptrs = partial_ptr + program * (ROWS * COLUMNS) + inner
        split_stride = (row_tiles * column_tiles).to(tl.int64) * (ROWS * COLUMNS)
        tl.store(tile_ptrs + split * split_stride, total)
        tl.debug_barrier()  # all threads have stored before one of them counts
        if tl.atomic_add(counters_ptr + program, 1, sem="acq_rel", scope="gpu") != num_splits - 1:
            return
        # The tile's last program: it finds the sums of all, which its processor's own cache may not have.
        tl.debug_barrier()
        total = tl.zeros_like(total)
        for other in range(0, num_splits, 2):  # two loads under way: more would not fit the registers
            first_sums = tl.load(tile_ptrs + other * split_stride, cache_modifier=".cg")
            has_second = tl.zeros_like(inner) + other + 1 < num_splits
            sums = tl.load(tile_ptrs + (other + 1) * split_stride, mask=has_second, other=0.0, cache_modifier=".cg")
            total = total + first_sums + sums
        tl.store(counters_ptr + program, 0)
    if IS_TURNED:
        total = tl.trans(total)
    present = is_row[:, None] & is_column[None, :]
    out_ptr += split.to(tl.int64) * out_split_stride
    if ACTIVATION is None:
        write_rows(total, bias_ptr, residual_ptr, out_ptr, rows, columns, present, residual_stride, out_stride)
    else:
        rounded = total.to(out_ptr.dtype.element_ty)
        if bias_ptr is not None:
            places = columns % 2 * (num_columns // 2) + columns // 2
            bias = tl.load(bias_ptr + places[None, :] + tl.zeros_like(rows)[:, None], mask=present, other=0.0)
            rounded = (rounded.to(tl.float32) + bias.to(tl.float32)).to(rounded.dtype)
        gates, ups = tl.split(tl.reshape(rounded, [ROWS, COLUMNS // 2, 2]))
        pairs = column // 2 + tl.arange(0, COLUMNS // 2)
        present = is_row[:, None] & (pairs < num_columns // 2)[None, :]
        out_ptrs = out_ptr + rows[:, None].to(tl.int64) * out_stride + pairs[None, :]
        tl.store(out_ptrs, gate_by(gates, ups, ACTIVATION), mask=present)


class Counters:
    """Counters of a launch's tiles, zeros between launches: a set for each stream, so that no two streams share one.

    A graph has the set of the stream that captured it; graphs of one memory run one at a time.
    """

    def __init__(self) -> None:
        self._sets: dict[torch.device, Tensor] = {}
        self._places: dict[torch.device, dict[int, int]] = {}

    def here(self, device: torch.device) -> Tensor:
        """Returns the set of a device's current stream, int32 [MAX_TILES].

        The first call on a device waits for it, and is in no capture. Raises RuntimeError beyond MAX_STREAMS streams.
        """
        on_gpu = device.type != "cpu"
        if device not in self._sets:
            self._sets[device] = torch.zeros(MAX_STREAMS, MAX_TILES, dtype=torch.int32, device=device)
            if on_gpu:
                torch.accelerator.synchronize(device)
        places = self._places.setdefault(device, {})
        stream = torch.accelerator.current_stream(device).stream_id if on_gpu else 0
        if (place := places.setdefault(stream, len(places))) >= MAX_STREAMS:
            raise RuntimeError(f"products have run on {MAX_STREAMS} streams of {device} already")
        return self._sets[device][place]


def split_depth_of(num_columns: int, depth: int) -> int:
    """Computes the depth of a split from a matrix's shape alone: long splits, but enough programs to fill a device."""
    wanted = WANTED_PROGRAMS // triton.cdiv(num_columns, SPLIT_COLUMNS)
    num_splits = max(1, min(wanted, depth // MIN_SPLIT_DEPTH, MAX_SPLITS))
    return int(triton.cdiv(triton.cdiv(depth, num_splits), UNIT) * UNIT)


def linear(
    states: Tensor,
    matrix: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    out: Tensor,
    counters: Counters,
    activation: Activation | None = None,
) -> Tensor:
    """Implements `kernels.backend.Backend.linear` for a plain matrix, on the current GPU; `out` may be float32.

    activation: gates the product; the matrix is `interleaved`, the bias is not.
    """
    if len(states):
        tile = choose_ordered_tile(states.device, states.dtype, num_splits_of(matrix), len(states))
        multiply(states, matrix, bias, residual, out, counters, tile, activation)
    return out


def interleaved(gate_up: Tensor) -> Tensor:
    """Copies a matrix of gates, then ups, [2 * columns, depth], to rows of a gate, its up, the next gate and so on."""
    return torch.stack(gate_up.chunk(2), 1).flatten(0, 1)


def num_splits_of(matrix: Tensor) -> int:
    """Counts the splits of a matrix [columns, depth]."""
    num_columns, depth = matrix.shape
    return int(triton.cdiv(depth, split_depth_of(num_columns, depth)))


def multiply(
    states: Tensor,
    matrix: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    out: Tensor,
    counters: Counters,
    tile: OrderedTile,
    activation: Activation | None = None,
) -> None:
    """Multiplies with a tile, and gates as `linear` does; a row has the same bits with each tile."""
    (num_rows, depth), num_columns, num_splits = states.shape, len(matrix), num_splits_of(matrix)
    num_tiles = triton.cdiv(num_rows, tile.rows) * triton.cdiv(num_columns, tile.columns)
    at_once = num_splits > 1 and num_rows <= MAX_SPLIT_ROWS and num_tiles <= MAX_TILES
    adds_apart = at_once and num_rows > MAX_COUNTED_ROWS and activation is None
    counts = at_once and not adds_apart
    shape = (num_tiles, tile.rows * tile.columns) if counts else (num_rows, num_columns)
    partial = states.new_empty(num_splits if at_once else 0, *shape, dtype=torch.float32)
    added = (None, None, partial[0]) if adds_apart else (bias, residual, out)
    operands = (states, [tile.rows, tile.step]), (matrix, [tile.columns, tile.step])
    is_described = all(_is_described(one) for one, _ in operands)
    multiply_in_order[(num_tiles, num_splits if at_once else 1)](
        *(TensorDescriptor.from_tensor(*one) if is_described else one[0] for one in operands),
        *added,
        partial if counts else None,
        counters.here(states.device) if counts else None,
        num_rows,
        num_columns,
        depth,
        split_depth_of(num_columns, depth),
        num_splits,
        1 if at_once else num_splits,
        states.stride(0),
        matrix.stride(0),
        0 if residual is None else residual.stride(0),
        added[-1].stride(0),
        partial.stride(0) if adds_apart else 0,
        IS_ALONE=at_once or num_splits == 1,
        ROWS=tile.rows,
        COLUMNS=tile.columns,
        STEP=tile.step,
        GROUP=ROWS_AT_ONCE,
        IS_TURNED=tile.is_turned,
        IS_DESCRIBED=is_described,
        ACTIVATION=None if activation is None else activation.value,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        **dependent(OPTIONS),
    )
    if adds_apart:
        add_up(partial, bias, residual, out)


def _is_described(matrix: Tensor) -> bool:
    """Tells whether tiles of a matrix are loaded by a descriptor: float32 has no matrix instruction that reads them."""
    if matrix.dtype is torch.float32 or architecture_of(matrix.device) not in WITH_DESCRIPTORS:
        return False
    row_bytes = matrix.stride(0) * matrix.element_size()
    return not (matrix.data_ptr() % ALIGNED_BYTES or row_bytes % ALIGNED_BYTES or matrix.stride(1) != 1)
