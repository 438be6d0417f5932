"""Attention of prompts' chunks over pages. Keys are visited in tiles from position 0 on, the same for any chunk."""

import torch
import triton
from torch import Tensor

from kernels.attention import paged
from kernels.backend import AttentionVariant, KVPages
from kernels.tiles import GroupTile, Tile, choose_group_tile, choose_tile, kind_of


def paged_prefill_attention(
    query: Tensor,
    pages: KVPages,
    block_tables: Tensor,
    context_lens: Tensor,
    cu_query_lens: Tensor,
    variant: AttentionVariant,
    turned: Tensor | None = None,
    out: Tensor | None = None,
    first_seq: int = 0,
) -> Tensor:
    """Implements `kernels.reference.paged_prefill_attention`, on the current GPU, accumulating in float32.

    Skips sequences before `first_seq`, which have one row each. Strides as in `paged_decode_attention`; nothing waits
    for the GPU.
    """
    num_rows, num_heads = query.shape[:2]
    num_kv_heads, block_size = pages.data.shape[2:4]
    output = torch.empty_like(query, memory_format=torch.contiguous_format) if out is None else out
    num_seqs = len(context_lens) - first_seq
    if num_rows == first_seq:
        return output
    groups = choose_groups(query, pages, variant)
    if groups is not None:
        from kernels.attention import hopper

        tables = block_tables, context_lens, cu_query_lens
        hopper.attend(groups, query, pages.data, *tables, output, variant.scale, first_seq)
        return output
    group_size = num_heads // num_kv_heads
    tile = choose_tile("prompts", query, pages, variant)
    num_tokens = tokens_of(tile, group_size, None if pages.int4 is None else block_size)
    num_tiles = triton.cdiv(num_rows - first_seq, num_tokens) + 2 * num_seqs
    window = variant.window or block_tables.shape[1] * block_size
    paged.launch(
        num_tiles,
        1,
        tile,
        num_tokens,
        query,
        pages,
        block_tables,
        context_lens,
        cu_query_lens,
        output,
        None,
        variant,
        turned,
        window,
        first_seq,
    )
    return output


def choose_groups(query: Tensor, pages: KVPages, variant: AttentionVariant) -> GroupTile | None:
    """Returns the tile of warp groups, which attend with plain scores to all keys; None where `paged.launch` does."""
    if variant.window is not None or kind_of(query.dtype, pages, variant) != "plain":
        return None
    tile = choose_group_tile(query.device, query.shape[-1])
    if tile is None:
        return None
    from kernels.attention import hopper  # only where its compiler has run: Gluon differs between Triton's versions

    return tile if hopper.fits(query, pages.data) else None


def tokens_of(tile: Tile, group_size: int, block_size: int | None) -> int:
    """Computes the tokens of a tile of prompts, a power of two.

    group_size: query heads of a KV head, each with a row for each token. block_size: bounds a tile of int4, which is
    within one block; else None.
    """
    num_tokens = 1 << max(tile.rows // group_size, 1).bit_length() - 1
    return num_tokens if block_size is None else min(num_tokens, block_size & -block_size)
