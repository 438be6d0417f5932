"""The choice of the tokens whose KV a sequence keeps, by its latest rows' attention.

Tokens are dropped only at boundaries, which depend on the prompt and the number of emitted tokens: tokens at the
prompt's end, and with H2O pages whenever a block is full. Chunks do not cross boundaries, and guesses stay within a
page. So a row sees the same KV however the sequence was batched, preempted or moved.

    position    0 ........ start ............ boundary
    queries                  x   x   x   x   x          of the rows since the last boundary, as each was run
    attention        sum of the softmax of these rows, on each token with KV

KV is compacted: keys are rotated already, and a softmax knows no order.
"""

from collections.abc import Sequence

import torch
from torch.nn.functional import max_pool1d

from engine.model.batch import CausalModel, Watched
from kernels.backend import KVPages
from wire.kv_policy import Dropping, Rule


class Chooser:
    """The choice of the tokens that stay: the heaviest. Equal arguments give equal choices.

    Sources: SnapKV (arXiv 2404.14469), and H2O (arXiv 2306.14048), page by page behind the prompt. The latest half of
    the pages stays, and so does the first page.
    """

    def tokens(self, attention: torch.Tensor, num_kept: int, rule: Rule) -> torch.Tensor:
        """Chooses the tokens of a prompt that stay: int64 [num_layers, num_kv_heads, num_kept], in order of position.

        attention: float32 [num_layers, num_kv_heads, tokens].
        """
        num_latest = rule.num_latest(num_kept)
        earlier = attention[..., : attention.shape[-1] - num_latest]
        pooled = max_pool1d(earlier, rule.num_pooled, stride=1, padding=rule.num_pooled // 2)
        return with_latest(pooled.argsort(stable=True, dim=-1, descending=True), num_kept, num_latest)

    def pages(self, attention: torch.Tensor, num_going: int, num_computed: int) -> list[int]:
        """Chooses the full pages that a sequence of `num_computed` tokens loses, in order.

        attention: float32 [pages].
        """
        return going(attention[replaceable(len(attention), num_going)].argsort(stable=True), num_going)


HEAVIEST = Chooser()


class Watch:
    """The rows of a sequence that weigh its tokens, and the boundary up to which they run.

    start: the position of the first row not weighed yet. attention: the sum over earlier rows, for each kept token.
    """

    def __init__(self, dropping: Dropping, num_prompt: int, block_size: int) -> None:
        self.dropping = dropping
        self.start = max(0, num_prompt - dropping.rule.num_watched)
        self.attention: torch.Tensor | None = None
        self._num_prompt = num_prompt
        self._block_size = block_size
        self._queries: torch.Tensor | None = None

    @property
    def boundary(self) -> int:
        """The number of computed tokens at which tokens may be dropped next."""
        if self.start < self._num_prompt:
            return self._num_prompt
        num_stored = 0 if self.attention is None else self.attention.shape[-1]
        return self.start + self._block_size - num_stored % self._block_size

    def rows(self, model: CausalModel, position: int, start: int, stop: int) -> list[Watched]:
        """Maps the rows start to stop - 1 of a batch to the queries' buffer; `position`: the first row's."""
        start += max(0, self.start - position)
        if start >= stop:
            return []
        if self._queries is None:
            self._queries = model.new_queries(max(self.dropping.rule.num_watched, self._block_size))
        place = max(0, position - self.start)
        return [Watched(slice(start, stop), self._queries[:, place : place + stop - start])]

    def weigh(self, model: CausalModel, kv: KVPages, table: torch.Tensor, num_stored: int) -> torch.Tensor:
        """Adds the attention of the rows up to the boundary; returns the sum."""
        assert self._queries is not None, "no row was run"
        boundary = self.boundary
        attention = model.weigh(self._queries[:, : boundary - self.start], kv, table, num_stored)
        if self.attention is not None:
            attention[..., : self.attention.shape[-1]] += self.attention
        self.attention, self.start = attention, boundary
        return attention

    def keep(self, chosen: torch.Tensor) -> None:
        """Keeps the attention on chosen tokens alone."""
        assert self.attention is not None, "nothing was weighed"
        self.attention = self.attention.gather(-1, chosen)

    def drop(self, pages: Sequence[int]) -> None:
        """Drops the attention on pages that the sequence loses."""
        assert self.attention is not None, "nothing was weighed"
        kept = torch.ones(self.attention.shape[-1], dtype=torch.bool)
        for page in pages:
            kept[page * self._block_size : (page + 1) * self._block_size] = False
        self.attention = self.attention[..., kept.to(self.attention.device)]


def gather_tokens(kv: KVPages, table: torch.Tensor, chosen: torch.Tensor, pages: torch.Tensor) -> None:
    """Copies tokens of a sequence to other pages, in place.

    table: the sequence's pages, int64. chosen: places of tokens, int64 [num_layers, num_kv_heads, tokens]. pages: the
    destination, int64, full afterwards.
    """
    num_layers, num_heads, num_tokens = chosen.shape
    block_size = kv.data.shape[4]
    layers = torch.arange(num_layers, device=chosen.device)[:, None, None, None]
    planes = torch.arange(2, device=chosen.device)[:, None, None]
    heads = torch.arange(num_heads, device=chosen.device)[:, None]
    sources, offsets = table[chosen // block_size][:, None], (chosen % block_size)[:, None]
    for data in (kv.data, kv.scales):
        if data is not None:
            raw = data.view(torch.uint8) if data.itemsize == 1 else data
            found = raw[sources, layers, planes, heads, offsets]
            blocks = found.reshape(*found.shape[:3], num_tokens // block_size, block_size, *found.shape[4:])
            raw[pages] = blocks.movedim(3, 0)


def page_attention(attention: torch.Tensor, block_size: int) -> torch.Tensor:
    """Sums the attention on each full page, over layers and heads, too."""
    num_pages = attention.shape[-1] // block_size
    return attention[..., : num_pages * block_size].reshape(*attention.shape[:2], num_pages, block_size).sum((0, 1, 3))


def with_latest(order: torch.Tensor, num_kept: int, num_latest: int) -> torch.Tensor:
    """Picks the first earlier tokens in an order, and all latest tokens; sorts them by position."""
    num_earlier = order.shape[-1]
    latest = torch.arange(num_earlier, num_earlier + num_latest, device=order.device).expand(*order.shape[:2], -1)
    return torch.cat([order[..., : num_kept - num_latest], latest], -1).sort(-1).values


def replaceable(num_pages: int, num_going: int) -> slice:
    """Leaves out the first page and the latest pages, half of the pages that stay."""
    return slice(1, num_pages - (num_pages - num_going) // 2)


def going(order: torch.Tensor, num_going: int) -> list[int]:
    """Picks the first of the replaceable pages in an order."""
    return sorted((order[:num_going] + 1).tolist())
