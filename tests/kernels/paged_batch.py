"""A random batch in a paged pool, beside the same keys and values in contiguous memory."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels import reference
from kernels.backend import Angles, AttentionVariant, KVPages, Scores
from kv_store.device_pool import view_pages
from wire.layout import KVLayout

PAGE_ALIGNMENT = 4096
# On a GPU torch's own float32 attention is put together from TF32 products.
EXTRAS = ((1.5, None), (None, 2.0), (1.5, 2.0), (50.0, 200.0))
"""Soft caps and sinks; the last sink takes everything."""
FLOAT32_TOLERANCE = 1e-4 if torch.cuda.is_available() else 1e-5
FAR_STRIDE, FAR_PAGE = 2**20, 3000
FAR_SIZE = 2**31 + FAR_STRIDE * (FAR_PAGE + 1)


@dataclass(frozen=True)
class Heads:
    """How many heads ask, how many answer, and how wide they are."""

    num_heads: int
    num_kv_heads: int
    head_dim: int


@dataclass(frozen=True)
class PagedBatch:
    """Sequences whose pages lie in random order in the middle layer of a pool that is NaN everywhere else.

    `keys` and `values` hold each sequence's [num_kv_heads, context_len, head_dim] as `pages` have them.
    """

    heads: Heads
    dtype: torch.dtype
    pages: KVPages
    block_tables: Tensor
    context_lens: Tensor
    keys: Sequence[Tensor]
    values: Sequence[Tensor]

    def variant(
        self, window: int | None = None, soft_cap: float | None = None, sink: float | None = None, num_sinks: int = 0
    ) -> AttentionVariant:
        """Makes a variant with the usual scale; sinks are random around `sink`."""
        sinks = None if sink is None else torch.randn(self.heads.num_heads, device=self.pages.data.device) + sink
        return AttentionVariant(self.heads.head_dim**-0.5, window, num_sinks, Scores(soft_cap, sinks))

    def random_query(self, num_tokens: int) -> Tensor:
        """[num_tokens, num_heads, head_dim], cut from a wider row as a fused projection would leave it."""
        heads = self.heads
        row = torch.randn(num_tokens, heads.num_heads + 2 * heads.num_kv_heads, heads.head_dim)
        return row.to(self.pages.data.device, self.dtype)[:, : heads.num_heads]


def empty_layer(
    num_pages: int, heads: Heads, block_size: int, dtype: torch.dtype, device: torch.device | str
) -> Tensor:
    """One layer of a pool of three, NaN all over: [num_pages, 2, num_kv_heads, block_size, head_dim], pages padded."""
    shape = (3, 2, heads.num_kv_heads, block_size, heads.head_dim)
    num_elements = torch.Size(shape).numel()
    aligned = -(-num_elements * dtype.itemsize // PAGE_ALIGNMENT) * PAGE_ALIGNMENT // dtype.itemsize
    pool = torch.full((num_pages, aligned), torch.nan, dtype=dtype, device=device)
    return pool[:, :num_elements].view(num_pages, *shape)[:, 1]


def far_layer(memory: Tensor) -> tuple[Tensor, int]:
    """A layer [num_pages, 2, 1, 16, 32] over FAR_SIZE zeros, and a page beyond 2^31 elements into it.

    An offset of 32 bits would wrap to the zeros in front of the layer.
    """
    shape, strides = (FAR_PAGE + 1, 2, 1, 16, 32), (FAR_STRIDE, 512, 512, 32, 1)
    return memory.as_strided(shape, strides, storage_offset=2**31), FAR_PAGE


def empty_codes(
    num_pages: int,
    heads: Heads,
    block_size: int,
    kept: str,
    device: torch.device | str,
    dtype: torch.dtype = torch.float32,
) -> KVPages:
    """One layer of a pool of three of quantized pages, in which every scale is NaN; of int4 all are open, and NaN."""
    layout = KVLayout(3, heads.num_kv_heads, heads.head_dim, block_size, str(dtype).removeprefix("torch."), kept)
    memory = torch.full((num_pages, layout.payload_bytes), 255, dtype=torch.uint8, device=device)
    pages = view_pages(memory, layout, num_pages).layer(1)
    if pages.int4 is not None:
        pages.int4.open.fill_(torch.nan)
        pages.int4.page_to_open.copy_(torch.randperm(num_pages))
    return pages


def fill_int4(pages: KVPages, slots: Tensor, contents: Tensor) -> Tensor:
    """Writes contents [2, num_kv_heads, context_len, head_dim] and quantizes the blocks that they fill.

    Returns the numbers that the last token sees: its own block is read as it is.
    """
    assert pages.int4 is not None
    block_size, context_len = pages.data.shape[3], contents.shape[2]
    keys, values = contents.transpose(1, 2)
    reference.write_kv(keys, values, pages.int4.open, reference.open_slots(pages, slots))
    reference.close_blocks(pages, slots)
    num_closed = (context_len - 1) // block_size * block_size
    sides = []
    for dim, blocks in zip((-2, -1), contents[:, :, :num_closed].unflatten(2, (-1, block_size)), strict=True):
        codes, scales = reference.quantize_int4(blocks, dim)
        sides.append((codes.float() * scales.unsqueeze(dim)).flatten(1, 2))
    return torch.cat([torch.stack(sides), contents[:, :, num_closed:].float()], dim=2)


def make_paged_batch(
    heads: Heads,
    context_lens: Sequence[int],
    block_size: int,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    kept: str = "none",
) -> PagedBatch:
    """Fills pages with random KV, quantized as `kept` says; table entries beyond a context name a page of NaN."""
    num_blocks = [-(-context_len // block_size) for context_len in context_lens]
    if kept == "none":
        pool = KVPages(empty_layer(sum(num_blocks) + 1, heads, block_size, dtype, device))
    else:
        pool = empty_codes(sum(num_blocks) + 1, heads, block_size, kept, device, dtype)
    poison, *pages = torch.randperm(len(pool.data)).tolist()
    block_tables = torch.full((len(context_lens), max(num_blocks) + 2), poison, dtype=torch.int32, device=device)
    keys, values = [], []
    for seq, context_len in enumerate(context_lens):
        own = [pages.pop() for _ in range(num_blocks[seq])]
        block_tables[seq, : len(own)] = torch.tensor(own, dtype=torch.int32)
        contents = torch.randn(2, heads.num_kv_heads, context_len, heads.head_dim, device=device).to(dtype)
        positions = torch.arange(context_len, device=device)
        pages_of = block_tables[seq, positions // block_size]
        if pool.int4 is not None:
            contents = fill_int4(pool, pages_of * block_size + positions % block_size, contents)
        elif pool.scales is not None:
            codes, scales = reference.quantize(contents, pool.data.dtype)
            pool.data[pages_of, :, :, positions % block_size] = codes.permute(2, 0, 1, 3)
            pool.scales[pages_of, :, :, positions % block_size] = scales.permute(2, 0, 1)
            contents = codes.float() * scales[..., None]
        else:
            pool.data[pages_of, :, :, positions % block_size] = contents.permute(2, 0, 1, 3)
        keys.append(contents[0])
        values.append(contents[1])
    lens = torch.tensor(context_lens, dtype=torch.int32, device=device)
    return PagedBatch(heads, dtype, pool, block_tables, lens, keys, values)


def turned_back(query: Tensor, turns: Angles) -> Tensor:
    """Rotates queries by the negative of angles, in float64."""
    first, second = query.double().chunk(2, dim=-1)
    cosines, sines = turns.cosines[:, None].double(), turns.sines[:, None].double()
    return torch.cat([first * cosines + second * sines, second * cosines - first * sines], dim=-1)


def dense_attention(
    query: Tensor, key: Tensor, value: Tensor, variant: AttentionVariant, turned: Tensor | None = None
) -> Tensor:
    """The oracle: float64 attention [query_len, num_heads, head_dim] of the last positions over contiguous KV.

    turned: the queries that meet sinks which are behind the window.
    """
    query_len, num_heads, _ = query.shape
    group_size = num_heads // len(key)
    positions = torch.arange(key.shape[1], device=key.device)
    distance = positions[len(positions) - query_len :, None] - positions
    seen = (distance >= 0) & (distance < (variant.window or key.shape[1]))
    keys, values = (one.double().repeat_interleave(group_size, 0) for one in (key, value))
    scores = query.transpose(0, 1).double() @ keys.mT * variant.scale
    if turned is not None:
        behind = (positions < variant.num_sinks) & (distance >= (variant.window or key.shape[1]))
        scores = torch.where(behind, turned.transpose(0, 1).double() @ keys.mT * variant.scale, scores)
        seen = seen | behind
    if variant.scores.soft_cap is not None:
        scores = (scores / variant.scores.soft_cap).tanh() * variant.scores.soft_cap
    powers = scores.exp() * seen
    total = powers.sum(-1, keepdim=True)
    if variant.scores.sinks is not None:
        total += variant.scores.sinks.double().exp()[:, None, None]
    return (powers @ values / total).transpose(0, 1)
