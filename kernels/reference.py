"""Paged attention, the write of KV and its sums, in plain torch: the oracle of the other kernels over pages.

A CPU without a compiler serves with these functions; `kernels.attention` has the same signatures. KV is gathered
sequence by sequence, cut to the visible tokens before anything is computed: the rest of a page and other pages are
never operands, so not even NaN leaks out of them. docs/decisions/0005-attention-on-a-cpu.md has the figures.
"""

from dataclasses import replace

import torch
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention

from kernels.backend import LARGEST_CODE, AttentionVariant, KVPages
from kernels.cpu.checksums import CHUNK_WORDS, PIECE_CHUNKS, PIECE_WORDS, ROW_WORDS

_HALF = 0xFFFFFFFF


def quantize(heads: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Rounds heads [..., head_dim] to codes of a dtype and bfloat16 scales [...]; a number is code times scale.

    The largest magnitude of a head becomes the largest code. A head with infinity or NaN gets the scale NaN.
    """
    most, wide = LARGEST_CODE[dtype], heads.float()
    largest = wide.abs().amax(-1)
    scales = (largest * (1 / most)).where(largest.isfinite(), torch.nan).bfloat16()
    divisors = scales.float().where(scales > 0, 1.0)
    codes = (wide / divisors[..., None]).nan_to_num().clamp(-most, most)
    return (codes.round() if dtype is torch.int8 else codes).to(dtype), scales


def quantize_int4(numbers: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """Rounds numbers to int8 codes from -8 to 7, with a bfloat16 scale along a dimension; returns both.

    The number of the largest magnitude becomes -8, so a scale may be negative. Infinity or NaN make the scale NaN.
    """
    wide = numbers.float()
    most, least = wide.amax(dim, keepdim=True), wide.amin(dim, keepdim=True)
    largest = most.where(most > -least, least)
    scales = (largest * -0.125).where(largest.isfinite(), torch.nan).bfloat16()
    divisors = scales.float().where(scales != 0, 1.0)
    return (wide / divisors).nan_to_num().clamp(-8, 7).round().to(torch.int8), scales.squeeze(dim)


def pack_int4(codes: Tensor) -> Tensor:
    """Packs codes + 8 [..., head_dim] into uint8 [..., head_dim / 2], the head's first half in the low bits."""
    low, high = (codes + 8).view(torch.uint8).chunk(2, dim=-1)
    return low | high << 4


def unpack_int4(packed: Tensor) -> Tensor:
    """Undoes `pack_int4`."""
    return torch.cat([packed & 15, packed >> 4], dim=-1).view(torch.int8) - 8


def close_blocks(pages: KVPages, slot_mapping: Tensor) -> None:
    """Quantizes the open blocks of one layer whose last slot is in `slot_mapping` into their pages of int4, in place.

    Keys are quantized channel by channel over a block's tokens, values token by token. Source: KIVI, arXiv 2402.02750.
    """
    assert pages.int4 is not None
    assert pages.scales is not None
    block_size = pages.data.shape[3]
    closing = slot_mapping[(slot_mapping >= 0) & (slot_mapping % block_size == block_size - 1)] // block_size
    keys, values = pages.int4.open[pages.int4.page_to_open[closing]].unbind(1)
    (key_codes, pages.int4.key_scales[closing]) = quantize_int4(keys, -2)
    (value_codes, pages.scales[closing]) = quantize_int4(values, -1)
    pages.data[closing] = pack_int4(torch.stack([key_codes, value_codes], dim=1))


def open_slots(pages: KVPages, slot_mapping: Tensor) -> Tensor:
    """Maps slots of int4 pages to slots of their open blocks; -1 stays -1."""
    assert pages.int4 is not None
    block_size = pages.data.shape[3]
    places = pages.int4.page_to_open[slot_mapping.clamp(min=0) // block_size]
    return (places * block_size + slot_mapping % block_size).where(slot_mapping >= 0, slot_mapping)


def write_kv(key: Tensor, value: Tensor, kv_layer: Tensor, slot_mapping: Tensor) -> None:
    """Writes the K and V of new tokens into their slots of one layer, in place.

    `key` and `value` [num_tokens, num_kv_heads, head_dim] have the dtype of `kv_layer` [num_pages, 2, num_kv_heads,
    block_size, head_dim], which may have any strides. `slot_mapping` [num_tokens] int64 holds page * block_size +
    offset, no slot twice, or -1 for a token that is skipped.
    """
    block_size = kv_layer.shape[3]
    kept = slot_mapping >= 0
    if not kept.all():
        key, value, slot_mapping = key[kept], value[kept], slot_mapping[kept]
    pages, offsets = slot_mapping // block_size, slot_mapping % block_size
    layer_keys, layer_values = kv_layer.unbind(1)
    layer_keys[pages, :, offsets] = key
    layer_values[pages, :, offsets] = value


def paged_decode_attention(
    query: Tensor,
    pages: KVPages,
    block_tables: Tensor,
    context_lens: Tensor,
    variant: AttentionVariant,
    turned: Tensor | None = None,
) -> Tensor:
    """Attends with one new token per sequence over that sequence's pages.

    `query` [num_seqs, num_heads, head_dim]; `pages` of one layer, already holding the new tokens; query head h reads KV
    head h // (num_heads // num_kv_heads). `block_tables` [num_seqs, max_blocks] int32 holds each sequence's pages;
    entries beyond its context do not matter. `context_lens` [num_seqs] int32 counts its tokens, the new one included; a
    sequence of none gets zeros. A query at position p sees the keys at p - variant.window + 1 to p; their scores are
    scaled, capped and joined by the head's sink, in this order. It also sees the first variant.num_sinks keys, if these
    are before its window, with its row of `turned`, shaped like `query`.

    Returns [num_seqs, num_heads, head_dim] in the dtype of `query`.
    """
    num_seqs, num_heads, head_dim = query.shape
    num_kv_heads = pages.data.shape[2]
    grouped = query.reshape(num_seqs, 1, num_kv_heads, num_heads // num_kv_heads, head_dim)
    output = query.new_zeros(grouped.shape)
    for seq, context_len in enumerate(context_lens.tolist()):
        if context_len:
            begin = _first_visible(context_len - 1, variant)
            keys, values = _gather_kv(pages, block_tables[seq], begin, context_len, query.dtype)
            asked = grouped[seq]
            if (num_sinks := min(variant.num_sinks, begin)) and turned is not None:
                asked = torch.cat([asked, turned[seq].reshape(asked.shape)], dim=-1)
                keys, values = _beside_sinks(keys, values, pages, block_tables[seq], num_sinks)
            output[seq] = _attend_alone(asked, keys, values, variant)
    return output.view(num_seqs, num_heads, head_dim)


def paged_prefill_attention(
    query: Tensor,
    pages: KVPages,
    block_tables: Tensor,
    context_lens: Tensor,
    cu_query_lens: Tensor,
    variant: AttentionVariant,
    turned: Tensor | None = None,
) -> Tensor:
    """Attends causally with each sequence's last tokens over its pages, in one ragged batch.

    `query` [num_tokens, num_heads, head_dim] is cut into sequences by `cu_query_lens` [num_seqs + 1] int32: token j of
    sequence s stands at position context_lens[s] - query_len[s] + j, so a chunk attends to the chunks before it. The
    rest is as in `paged_decode_attention`; `context_lens` counts the chunk's own tokens.

    Returns [num_tokens, num_heads, head_dim] in the dtype of `query`. On a CPU it goes row by row, which is slow, so
    that each row has the bits of a decoding row.
    """
    attend = _attend_row_by_row if query.device.type == "cpu" else _attend_causally
    output = torch.empty_like(query, memory_format=torch.contiguous_format)
    bounds = cu_query_lens.tolist()
    for seq, context_len in enumerate(context_lens.tolist()):
        num_rows = bounds[seq + 1] - bounds[seq]
        if num_rows and turned is not None and min(variant.num_sinks, _first_visible(context_len - 1, variant)):
            rows = slice(bounds[seq], bounds[seq + 1])
            past = query[rows], turned[rows], pages, block_tables[seq], context_len, variant
            output[rows] = _attend_past_sinks(*past)
            continue
        first_row, first_position = bounds[seq], context_len - bounds[seq + 1] + bounds[seq]
        for start, end in _parts(first_position, context_len, pages):
            rows = slice(first_row + start - first_position, first_row + end - first_position)
            keys, values = _gather_kv(pages, block_tables[seq], _first_visible(start, variant), end, query.dtype)
            output[rows] = attend(query[rows], keys, values, variant)
    return output


def weigh(query: Tensor, pages: KVPages, block_table: Tensor, context_len: int, variant: AttentionVariant) -> Tensor:
    """Sums the softmax weights on each key of a sequence, over its last rows and over the query heads of a group.

    `query` [num_rows, num_heads, head_dim]; `block_table` int32; `context_len` counts the sequence's tokens, these rows
    included. The variant has no window. Returns float32 [num_kv_heads, context_len].
    """
    num_rows, num_heads, head_dim = query.shape
    keys, _ = _gather_kv(pages, block_table, 0, context_len, query.dtype)
    group_size = num_heads // len(keys)
    grouped = query.view(num_rows, len(keys), group_size, head_dim).permute(1, 2, 0, 3).flatten(1, 2)
    seen = _causal_mask(num_rows, context_len, None, query.device).repeat(group_size, 1)
    weighed = query.new_empty(len(keys), context_len, dtype=torch.float32)
    for head, (rows, columns) in enumerate(zip(grouped, keys, strict=True)):  # of all at once it may take gigabytes
        sinks = None if variant.scores.sinks is None else variant.scores.sinks.view(-1, group_size)[head]
        own = replace(variant, scores=replace(variant.scores, sinks=sinks))
        weighed[head] = _weights(rows.contiguous(), columns.contiguous(), seen, own).sum(0)
    return weighed


def _parts(start: int, end: int, pages: KVPages) -> list[tuple[int, int]]:
    """Cuts a chunk's positions into parts whose rows read the same numbers: with int4, a part stays in one block."""
    if pages.int4 is None:
        return [(start, end)] if start < end else []
    ends = [*range(start - start % pages.data.shape[3] + pages.data.shape[3], end, pages.data.shape[3]), end]
    return list(zip([start, *ends[:-1]], ends, strict=True)) if start < end else []


def _first_visible(position: int, variant: AttentionVariant) -> int:
    return 0 if variant.window is None else max(0, position - variant.window + 1)


def _gather_kv(pages: KVPages, block_table: Tensor, begin: int, end: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Gathers K and V [num_kv_heads, end - begin, head_dim] of the positions begin to end - 1 of one sequence.

    With int4 the last position's block is read from its open block.
    """
    num_kv_heads, block_size = pages.data.shape[2:4]
    first_block, last_block = begin // block_size, (end - 1) // block_size
    own = block_table[first_block : last_block + 1]
    blocks = pages.data.index_select(0, own)
    if pages.int4 is not None:
        blocks = _dequantized(pages, own).to(dtype)
        blocks[-1] = pages.int4.open[pages.int4.page_to_open[own[-1]]]
    elif pages.scales is not None:
        blocks = (blocks.float() * pages.scales.index_select(0, own)[..., None]).to(dtype)
    visible = slice(begin - first_block * block_size, end - first_block * block_size)
    keys, values = (
        plane.transpose(0, 1).reshape(num_kv_heads, -1, plane.shape[-1])[:, visible] for plane in blocks.unbind(1)
    )
    return keys, values


def _beside_sinks(
    keys: Tensor, values: Tensor, pages: KVPages, block_table: Tensor, num_sinks: int
) -> tuple[Tensor, Tensor]:
    """Prepends the first keys and values of a sequence, with keys in heads of twice the size.

    A query's first half meets the keys; its second half, which is rotated back, meets the sinks.
    """
    head_dim = keys.shape[-1]
    sink_keys, sink_values = _gather_kv(pages, block_table, 0, num_sinks, keys.dtype)
    wide = torch.cat([pad(sink_keys, (head_dim, 0)), pad(keys, (0, head_dim))], dim=1)
    return wide, torch.cat([sink_values, values], dim=1)


def _attend_past_sinks(
    query: Tensor, turned: Tensor, pages: KVPages, block_table: Tensor, context_len: int, variant: AttentionVariant
) -> Tensor:
    """Attends with the last tokens of a sequence, some of which see sinks outside their window."""
    positions = torch.arange(context_len - len(query), context_len, device=query.device)
    if query.device.type == "cpu":
        tables = block_table.expand(len(query), -1)
        return paged_decode_attention(query, pages, tables, positions + 1, variant, turned)
    num_sinks = min(variant.num_sinks, _first_visible(context_len - 1, variant))
    begin = _first_visible(context_len - len(query), variant)
    keys, values = _gather_kv(pages, block_table, begin, context_len, query.dtype)
    seen = _causal_mask(len(query), keys.shape[1], variant.window, query.device)
    behind = positions[:, None] - (variant.window or 0) >= torch.arange(num_sinks, device=query.device)
    keys, values = _beside_sinks(keys, values, pages, block_table, num_sinks)
    return _attend_causally(torch.cat([query, turned], -1), keys, values, variant, torch.cat([behind, seen], dim=1))


def _dequantized(pages: KVPages, own: Tensor) -> Tensor:
    """Multiplies the codes of these pages of int4 by their scales, in float32."""
    assert pages.int4 is not None
    assert pages.scales is not None
    keys, values = unpack_int4(pages.data.index_select(0, own)).float().unbind(1)
    key_scales, value_scales = pages.int4.key_scales.index_select(0, own), pages.scales.index_select(0, own)
    return torch.stack([keys * key_scales[..., None, :], values * value_scales[..., None]], dim=1)


def _attend(query: Tensor, keys: Tensor, values: Tensor, seen: Tensor | None, variant: AttentionVariant) -> Tensor:
    """Attends with queries [..., head_dim], in the order of their heads, to the keys that are `seen`."""
    if variant.scores.soft_cap is None and variant.scores.sinks is None:
        return scaled_dot_product_attention(query, keys, values, attn_mask=seen, scale=variant.scale)
    return (_weights(query, keys, seen, variant) @ values.float()).to(query.dtype)


def _weights(query: Tensor, keys: Tensor, seen: Tensor | None, variant: AttentionVariant) -> Tensor:
    """Returns the softmax weights, float32, for `_attend`."""
    soft_cap, sinks = variant.scores.soft_cap, variant.scores.sinks
    scores = query.float() @ keys.float().mT * variant.scale
    if soft_cap is not None:
        scores = soft_cap * torch.tanh(scores / soft_cap)
    if seen is not None:
        scores = scores.masked_fill(~seen, -torch.inf)
    if sinks is not None:
        num_rows = scores[..., 0].numel() // len(sinks)
        of_rows = sinks.repeat_interleave(num_rows).view(*scores.shape[:-1], 1)
        scores = torch.cat([scores, of_rows], dim=-1)
    return scores.softmax(-1)[..., : keys.shape[-2]]


def _attend_alone(grouped: Tensor, keys: Tensor, values: Tensor, variant: AttentionVariant) -> Tensor:
    """Attends with one row [1, num_kv_heads, group_size, head_dim] to all of `keys`."""
    return _attend(grouped, keys[None].contiguous(), values[None].contiguous(), None, variant)


def _attend_row_by_row(query: Tensor, keys: Tensor, values: Tensor, variant: AttentionVariant) -> Tensor:
    num_kv_heads, num_keys, head_dim = keys.shape
    output = torch.empty_like(query, memory_format=torch.contiguous_format)
    for row, end in enumerate(range(num_keys - len(query) + 1, num_keys + 1)):
        visible = slice(_first_visible(end - 1, variant), end)
        grouped = query[row].reshape(1, num_kv_heads, -1, head_dim)
        output[row] = _attend_alone(grouped, keys[:, visible], values[:, visible], variant).flatten(0, 2)
    return output


def _attend_causally(
    query: Tensor, keys: Tensor, values: Tensor, variant: AttentionVariant, seen: Tensor | None = None
) -> Tensor:
    """Attends with queries [query_len, num_heads, head_dim] at the last positions to the `keys` that are `seen`."""
    query_len, num_heads, head_dim = query.shape
    num_kv_heads, num_keys, _ = keys.shape
    group_size = num_heads // num_kv_heads
    grouped = query.reshape(query_len, num_kv_heads, group_size, head_dim).permute(1, 2, 0, 3)
    # KV heads take the batch's place, so that a group reads its keys through a zero stride, never a copy.
    shape = (num_kv_heads, group_size, num_keys, -1)
    if seen is None:
        seen = _causal_mask(query_len, num_keys, variant.window, query.device)
    attended = _attend(grouped, keys[:, None].expand(shape), values[:, None].expand(shape), seen, variant)
    return attended.permute(2, 0, 1, 3).reshape(query_len, num_heads, -1)


def _causal_mask(query_len: int, num_keys: int, sliding_window: int | None, device: torch.device) -> Tensor:
    """Makes [query_len, num_keys], true where a query sees a key; the last query stands at the last key."""
    seen = torch.ones(query_len, num_keys, dtype=torch.bool, device=device)
    visible = seen.tril(num_keys - query_len)
    return visible if sliding_window is None else visible.triu(num_keys - query_len - sliding_window + 1)


def sum_pages(pages: Tensor, chosen: Tensor, keys: Tensor, out: Tensor) -> None:
    """Sums chosen pages, piece by piece, as kernels.cpu.checksums says. out: int64 [num_chosen, num_pieces, 2].

    pages: int64 [num_pages, num_words]; chosen: int32; keys: int32 [2, CHUNK_WORDS, 2], flat.
    """
    of_chunk, of_piece = keys.view(2, CHUNK_WORDS, 2).long()
    num_words, num_padded = pages.shape[1], out.shape[1] * PIECE_WORDS
    shape = (out.shape[1], PIECE_CHUNKS, CHUNK_WORDS)
    words = pad(pages[chosen.long()], (0, num_padded - num_words)).unflatten(1, shape)
    present = (torch.arange(num_padded, device=pages.device) < num_words).view(shape)
    chunks = _sum_words(words, of_chunk, present)
    both = torch.cat([chunks[..., 0], chunks[..., 1]], dim=-1)
    out.copy_(_sum_words(both, of_piece, present[..., 0].repeat(1, 2)))


def _sum_words(words: Tensor, keys: Tensor, present: Tensor) -> Tensor:
    """Sums the last dimension of int64 words twice, in a new last dimension."""
    places = torch.arange(words.shape[-1], device=words.device)
    low, high = (words + keys[: len(places), 0]) & _HALF, ((words >> 32) + keys[: len(places), 1]) & _HALF
    products = low * high * present
    weighed = (CHUNK_WORDS // ROW_WORDS - places // ROW_WORDS) * products
    return torch.stack([products.sum(-1), (weighed + words * present).sum(-1)], dim=-1)
