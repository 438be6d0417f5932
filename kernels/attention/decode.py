"""Attention of decoding rows over pages: splits of a row's visible tokens, and their merging by log-sum-exp.

One long sequence fills a GPU with its splits. They depend on the row's own length alone, so a row has the same bits in
any batch. Source: T. Dao, D. Haziza, F. Massa, G. Sizov, "Flash-Decoding", 2023.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.attention import paged
from kernels.attention.paged import FUSING, find_split_len
from kernels.backend import AttentionVariant, KVPages
from kernels.products.dependent_launch import dependent, wait_for_earlier
from kernels.tiles import choose_tile


@triton.jit(do_not_specialize=["window", "num_splits"])
def merge_splits(
    partial_ptr,  # [num_seqs, num_heads, num_splits, head_dim] float32
    log_sum_ptr,  # [num_seqs, num_heads, num_splits] float32
    context_lens_ptr,  # [num_seqs] int32
    output_ptr,  # [num_seqs, num_heads, head_dim]
    window,
    num_splits,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
    MIN_SPLIT_LEN: tl.constexpr,
):
    # One program merges the splits of one head of one sequence, as many as its length has.
    wait_for_earlier()
    seq, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    visible = tl.minimum(tl.load(context_lens_ptr + seq), window)
    split_len = find_split_len(visible, MAX_SPLITS, MIN_SPLIT_LEN)
    splits = tl.arange(0, MAX_SPLITS)
    dims = tl.arange(0, PADDED_DIM)
    # The first split of no tokens is there, too.
    is_split = splits < tl.maximum(tl.cdiv(visible, split_len), 1)
    in_split = is_split[:, None] & (dims < HEAD_DIM)[None, :]
    row = seq * tl.num_programs(1) + head
    split_rows = row * num_splits + splits

    log_sum = tl.load(log_sum_ptr + split_rows, mask=is_split, other=float("-inf"))
    partial = tl.load(partial_ptr + split_rows[:, None] * HEAD_DIM + dims[None, :], mask=in_split, other=0.0)
    largest = tl.max(log_sum, 0)
    # Of a sequence without tokens every split weighs 2^-inf; its partials are zeros already.
    weights = tl.exp2(log_sum - tl.where(largest == float("-inf"), 0.0, largest))
    total = tl.sum(weights, 0)
    merged = tl.sum(partial * weights[:, None], 0) / tl.where(total == 0.0, 1.0, total)
    tl.store(output_ptr + row * HEAD_DIM + dims, merged, mask=dims < HEAD_DIM)


def paged_decode_attention(
    query: Tensor,
    pages: KVPages,
    block_tables: Tensor,
    context_lens: Tensor,
    variant: AttentionVariant,
    turned: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Implements `kernels.reference.paged_decode_attention`, on the current GPU, accumulating in float32.

    `query`, `pages` and `block_tables` may have any strides in front of a contiguous last dimension. A row's splits
    depend on its own length alone; nothing waits for the GPU.
    """
    num_seqs, num_heads, head_dim = query.shape
    block_size = pages.data.shape[3]
    output = query.new_empty(query.shape) if out is None else out
    if num_seqs == 0:
        return output
    tile, max_context_len = choose_tile("decode", query, pages, variant), block_tables.shape[1] * block_size
    window = max_context_len if variant.window is None else min(variant.window, max_context_len)
    num_splits = min(triton.cdiv(window, paged.MIN_SPLIT_LEN), paged.MAX_SPLITS)

    # One split needs no merging: its own attention is the output.
    partial_shape = (num_seqs, num_heads, num_splits, head_dim)
    partial = output if num_splits == 1 else query.new_empty(partial_shape, dtype=torch.float32)
    log_sum = None if num_splits == 1 else query.new_empty(partial_shape[:3], dtype=torch.float32)
    paged.launch(
        num_seqs,
        num_splits,
        tile,
        1,
        query,
        pages,
        block_tables,
        context_lens,
        None,
        partial,
        log_sum,
        variant,
        turned,
        window,
        0,
    )
    if num_splits > 1:
        merge_splits[(num_seqs, num_heads)](
            partial,
            log_sum,
            context_lens,
            output,
            window,
            num_splits,
            HEAD_DIM=head_dim,
            PADDED_DIM=triton.next_power_of_2(head_dim),
            MAX_SPLITS=paged.MAX_SPLITS,
            MIN_SPLIT_LEN=paged.MIN_SPLIT_LEN,
            num_warps=4,
            **dependent(FUSING),
        )
    return output
