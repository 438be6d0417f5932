"""Products of rows with the matrices of their experts in Triton, and the sums of a token's rows.

Rows are sorted by expert on the device, and a program's rows have one expert. The numbers of rows and experts alone
bound the number of programs, so that nothing waits for the device, and a CUDA graph holds a launch. The depth of a
matrix is summed from its first place to its last, so that the order of a row's sum does not depend on other rows.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.backend import Experts
from kernels.products.dependent_launch import dependent, wait_for_earlier
from kernels.routing import Routing

COLUMNS, DEPTH, COMBINED_AT_ONCE = 64, 64, 512
FEW_ROWS, MANY_ROWS = 16, 32
"""Rows of a program; matrices are the left operand, so that no instruction depends on it."""
OPTIONS = {"enable_fp_fusion": True} | ({"matrix_instr_nonkdim": 16} if torch.version.hip else {})


@triton.jit
def multiply_by_expert(
    states_ptr,  # [tokens, depth], or [tokens, num_chosen, depth] with the fan 1
    table_ptr,  # [num_experts, 2] int64, first the address of a matrix [num_columns, depth]
    order_ptr,  # [num_rows] int64: the rows of the product, sorted by expert
    tiles_ptr,  # [num_tiles, 3] int64: expert, and the first and last place in the order, the last one excluded
    bias_ptr,  # [num_experts, num_columns], or None
    out_ptr,  # [num_rows, num_columns]
    num_columns,
    depth,
    fan,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
):
    # One program multiplies ROWS rows of one expert by COLUMNS columns of its matrix.
    wait_for_earlier()
    tile_ptr = tiles_ptr + tl.program_id(0) * 3
    expert, begin, end = tl.load(tile_ptr), tl.load(tile_ptr + 1), tl.load(tile_ptr + 2)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    places = begin + tl.arange(0, ROWS)
    is_row, is_column = places < end, columns < num_columns
    if begin < end:
        rows = tl.load(order_ptr + places, mask=is_row, other=0)
        row_ptrs = states_ptr + (rows // fan)[:, None] * depth
        weights_ptr = tl.load(table_ptr + expert * 2).to(tl.pointer_type(states_ptr.dtype.element_ty))
        column_ptrs = weights_ptr + columns[:, None].to(tl.int64) * depth
        sums = tl.zeros([COLUMNS, ROWS], tl.float32)
        for first in range(0, depth, DEPTH):
            depths = first + tl.arange(0, DEPTH)
            is_depth = (depths < depth)[None, :]
            weights = tl.load(column_ptrs + depths[None, :], mask=is_column[:, None] & is_depth, other=0.0)
            states = tl.load(row_ptrs + depths[None, :], mask=is_row[:, None] & is_depth, other=0.0)
            sums = tl.dot(weights, tl.trans(states), sums, input_precision="ieee")
        if bias_ptr is not None:
            bias = tl.load(bias_ptr + expert * num_columns + columns, mask=is_column, other=0.0)
            sums = sums.to(bias.dtype).to(tl.float32) + bias.to(tl.float32)[:, None]
        out_ptrs = out_ptr + rows[None, :] * num_columns + columns[:, None]
        tl.store(out_ptrs, sums, mask=is_row[None, :] & is_column[:, None])


@triton.jit
def combine_rows(
    rows_ptr,  # [tokens, num_chosen, num_columns]
    shares_ptr,  # [tokens, num_chosen] float32
    residual_ptr,  # [tokens, num_columns], or None
    out_ptr,  # [tokens, num_columns]
    num_chosen,
    num_columns,
    COLUMNS: tl.constexpr,
):
    # One program adds up COLUMNS numbers of one token, in the order of its rows.
    wait_for_earlier()
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    present = columns < num_columns
    total = tl.zeros([COLUMNS], tl.float32)
    for choice in range(num_chosen):
        row = token * num_chosen + choice
        numbers = tl.load(rows_ptr + row * num_columns + columns, mask=present, other=0.0)
        total += tl.load(shares_ptr + row) * numbers.to(tl.float32)
    if residual_ptr is not None:
        total += tl.load(residual_ptr + token * num_columns + columns, mask=present, other=0.0).to(tl.float32)
    tl.store(out_ptr + token * num_columns + columns, total, mask=present)


def sort_by_expert(chosen: Tensor, num_experts: int, rows_of_tile: int) -> tuple[Tensor, Tensor]:
    """Sorts rows by their experts `chosen` [rows] and cuts them into tiles, as `multiply_by_expert` takes them.

    Their number is the largest that there can be; tiles at the end may be empty.
    """
    num_tiles = min(len(chosen), num_experts) + len(chosen) // rows_of_tile
    counts = chosen.new_zeros(num_experts, dtype=torch.int64)
    counts.scatter_add_(0, chosen.long(), torch.ones_like(chosen, dtype=torch.int64))
    ends, tiles_of = counts.cumsum(0), (counts + rows_of_tile - 1) // rows_of_tile
    tile_ends, tiles = tiles_of.cumsum(0), torch.arange(num_tiles, device=chosen.device)
    experts = torch.searchsorted(tile_ends, tiles, right=True).clamp(max=num_experts - 1)
    begins = (ends - counts)[experts] + (tiles - (tile_ends - tiles_of)[experts]) * rows_of_tile
    last = torch.minimum(begins + rows_of_tile, ends[experts])
    return chosen.argsort(stable=True), torch.stack([experts, begins, last], dim=1)


def expert_linear(states: Tensor, experts: Experts, routing: Routing, bias: Tensor | None, out: Tensor) -> Tensor:
    """Implements `kernels.backend.Backend.expert_linear` for plain weights, on the current GPU."""
    chosen, depth = routing.experts.flatten(), states.shape[-1]
    if len(chosen):
        num_experts = len(experts.weights)
        rows_of_tile = FEW_ROWS if len(chosen) <= FEW_ROWS * num_experts else MANY_ROWS
        order, tiles = sort_by_expert(chosen, num_experts, rows_of_tile)
        multiply_by_expert[(len(tiles), triton.cdiv(experts.columns, COLUMNS))](
            states,
            experts.table,
            order,
            tiles,
            bias,
            out,
            experts.columns,
            depth,
            routing.num_chosen if states.dim() == 2 else 1,
            ROWS=rows_of_tile,
            COLUMNS=COLUMNS,
            DEPTH=DEPTH,
            num_warps=4,
            **dependent(OPTIONS),
        )
    return out


def combine(rows: Tensor, routing: Routing, residual: Tensor | None = None, out: Tensor | None = None) -> Tensor:
    """Implements `kernels.backend.Backend.combine`, on the current GPU."""
    num_tokens, num_chosen, columns = rows.shape
    output = rows.new_empty(num_tokens, columns) if out is None else out
    if num_tokens:
        combine_rows[(num_tokens, triton.cdiv(columns, COMBINED_AT_ONCE))](
            rows,
            routing.shares,
            residual,
            output,
            num_chosen,
            columns,
            COLUMNS=COMBINED_AT_ONCE,
            **dependent({"num_warps": 4, "enable_fp_fusion": False}),
        )
    return output
