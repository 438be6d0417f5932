r"""Retention: the KV of a sequence that stays, in the layers of one group; a sequence has one group today.

    Retention   KV that a later row reads: all, or of layers with windows the blocks of sinks and window
    SnapKV      the whole prompt up to its end, then chosen tokens of it, and all that follows
    H2O         the same, and behind the prompt a page is dropped whenever one is full

The decisions of a retention:

    prefix      the tokens whose KV may be looked up, and further pages to reserve
    names       the blocks to look up, write or purge, by the tokens dropped from them
    window      the blocks that a position reads
    boundary    the number of computed tokens at which KV may be dropped; no chunk crosses it
    choose      the tokens or pages to drop there, by the attention that `watch` has summed

and its state: `table`, the pages; `reserved`, pages for the kept tokens of a prompt; `delayed`, full blocks of the
prompt, which are written through after the kept ones. A new table moves SnapKV and H2O from one state to the next:

    without pages -> whole, num_dropped 0 -> kept, num_dropped > 0      the last state has names with SnapKV,
         \------- by the names of kept blocks ----^                     and none with H2O
"""

from array import array
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import cast

import numpy as np
import torch

from engine.kv.dropping import Chooser, Watch, page_attention
from engine.request import EngineRequest, HandOff
from wire.block_names import BlockName, NameChain
from wire.errors import InvalidRequest
from wire.ids import PageId
from wire.kv_policy import Dropping, Rule
from wire.layout import KVLayout, Window


class BlockTable:
    """The block table of a sequence; kernels read its `row`, int32.

    behind: blocks between sinks and window, which have no page; nothing reads the row's numbers there. num_dropped:
    tokens whose KV was dropped; the pages have the others, without gaps.
    """

    def __init__(self, pages: Iterable[PageId] = (), behind: range = range(0), num_dropped: int = 0) -> None:
        self._pages = array("i", pages)
        self._pages[behind.start : behind.start] = array("i", [0] * len(behind))
        self.behind = behind
        self.num_dropped = num_dropped

    def __len__(self) -> int:
        return len(self._pages)

    def __getitem__(self, span: slice) -> list[PageId]:
        """Lists pages. Raises ValueError for a block behind the window, whose page may be another sequence's."""
        start, stop, _ = span.indices(len(self._pages))
        if self.behind and (lost := range(max(start, self.behind.start), min(stop, self.behind.stop))):
            raise ValueError(f"block {lost.start} is behind the window")
        return cast(list[PageId], self._pages[span].tolist())

    def extend(self, pages: Iterable[PageId]) -> None:
        self._pages.extend(pages)

    @property
    def present(self) -> list[PageId]:
        """Lists the pages of blocks that are not behind the window, sinks last."""
        return self[self.behind.stop :] + self[: self.behind.start]

    def leave_behind(self, behind: range) -> list[PageId]:
        """Puts these blocks behind the window; returns the freed pages."""
        pages = self[max(behind.start, self.behind.stop) : behind.stop] if behind else []
        self.behind = max(self.behind, behind, key=len)
        return pages

    @property
    def row(self) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
        """Views the pages; drop the view before the next change."""
        return np.frombuffer(self._pages, dtype=np.int32)

    def slots(self, start: int, stop: int, block_size: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        """Computes the slots of positions start to stop - 1: page * block_size + offset."""
        start, stop = start - self.num_dropped, stop - self.num_dropped
        first = start // block_size
        pages = self.row[first : -(-stop // block_size)].astype(np.int64)
        slots = (pages[:, None] * block_size + np.arange(block_size)).ravel()
        return slots[start - first * block_size : stop - first * block_size]

    def drop(self, places: Iterable[int], block_size: int) -> list[PageId]:
        """Takes full pages out; returns them."""
        pages = [PageId(self._pages.pop(place)) for place in sorted(places, reverse=True)]
        self.num_dropped += len(pages) * block_size
        return pages


Tokens = Callable[[int, int], "array[int]"]
"""A function that returns known tokens of a sequence, by first position and count."""


@dataclass(frozen=True)
class Prefix:
    """The KV that a sequence may begin with: its first `num_tokens` tokens' without that of `num_dropped` of them.

    num_reserved: further pages that the sequence needs.
    """

    num_tokens: int
    num_dropped: int = 0
    num_reserved: int = 0

    @property
    def num_stored(self) -> int:
        """Tokens with KV."""
        return self.num_tokens - self.num_dropped


class Retention:
    """The retention of all KV that later rows read."""

    def __init__(self, request: EngineRequest, layout: KVLayout) -> None:
        self.window = Window(layout)
        self.table = BlockTable()
        self.reserved: list[PageId] = []
        self.delayed: list[tuple[BlockName, PageId]] = []
        self.watch: Watch | None = None
        self._request = request
        self._chains = {0: NameChain(request.root, layout.block_size, request.public)}

    @property
    def boundary(self) -> int | None:
        """The number of computed tokens at which KV may be dropped next."""
        return None if self.watch is None else self.watch.boundary

    @property
    def is_plain(self) -> bool:
        """Whether all KV stays, in pages that have names once they are full."""
        layout = self.window.layout
        return layout.window is None and not layout.has_open_blocks and type(self) is Retention

    def prefix(self, num_readable: int, num_known: int) -> Prefix:
        """Returns the prefix that a sequence without pages may begin with.

        num_readable: tokens whose KV may be read, not computed. num_known: tokens of prompt and output so far.
        """
        return Prefix(num_readable)

    def accepts(self, prefix: Prefix, num_blocks: int) -> bool:
        """Returns whether a sequence can begin with the first `num_blocks` blocks of a prefix; else it waits again."""
        return True

    def begin(self, table: BlockTable) -> None:
        """Replaces the block table, by an empty table while the sequence waits, and when it ends."""
        self.table = table

    def names(self, tokens: Tokens, num_tokens: int, num_dropped: int = 0) -> list[BlockName]:
        """Names the blocks of the first `num_tokens` tokens, dropped tokens left out; a tail only if it has a name."""
        if self.window.layout.has_open_blocks:
            num_tokens -= num_tokens % self.window.layout.block_size
        chain = self._chain(tokens, num_tokens, num_dropped)
        return [] if chain is None else chain.cover(num_tokens - num_dropped)

    @property
    def lasting_names(self) -> list[BlockName]:
        """Lists the names of the full blocks that a continuing prompt reads, also of kept tokens."""
        chains = [chain.full(chain.num_tokens) for chain in self._chains.values()]
        block_size = self.window.layout.block_size
        return [names[place] for names in chains for place in self.window.needed(len(names), len(names) * block_size)]

    def filled(self, tokens: Tokens, start: int, num_computed: int) -> list[tuple[BlockName, PageId]]:
        """Lists the blocks filled since the sequence had `start` tokens with KV, then its sinks.

        Sinks are listed again so that they count as recently used: no prefix can be read without its sinks.
        """
        num_dropped, block_size = self.table.num_dropped, self.window.layout.block_size
        start, stop = start - num_dropped, num_computed - num_dropped
        first, last = start // block_size, stop // block_size
        chain = self._chain(tokens, num_computed, num_dropped) if first < last else None
        if chain is None:
            return []
        num_sinks = min(first, self.window.num_sink_blocks)
        names = chain.full(stop, start) + chain.full(num_sinks * block_size)
        pages = self.table[first:last] + (self.table[:num_sinks] if num_sinks else [])
        return list(zip(names, pages, strict=True))

    def _chain(self, tokens: Tokens, num_tokens: int, num_dropped: int) -> NameChain | None:
        """Extends the chain, without dropped tokens, to the first `num_tokens`; None if they have no names."""
        chain = self._chains.get(num_dropped)
        if chain is not None:
            start = chain.num_tokens + num_dropped
            chain.extend(tokens(start, max(0, num_tokens - start)))
        return chain


class Weighed(Retention):
    """The retention of prompt tokens chosen at the prompt's end by its last rows' attention.

    num_kept: blocks that chosen tokens are copied to; 0 if the whole prompt stays.
    """

    def __init__(self, request: EngineRequest, layout: KVLayout, dropping: Dropping) -> None:
        super().__init__(request, layout)
        self.num_kept = dropping.num_copied(request.num_prompt, layout.block_size)
        self._dropping = dropping
        self.begin(self.table)

    def prefix(self, num_readable: int, num_known: int) -> Prefix:
        """Returns whole blocks before the rows whose attention is summed; these rows run even on a hit."""
        block_size, first = self.window.layout.block_size, self._request.num_prompt - self._dropping.rule.num_watched
        return Prefix(max(0, min(num_readable, first)) // block_size * block_size, num_reserved=self.num_kept)

    def begin(self, table: BlockTable) -> None:
        super().begin(table)
        if not table.num_dropped:
            self.watch = Watch(self._dropping, self._request.num_prompt, self.window.layout.block_size)

    def choose(self, watch: Watch, attention: torch.Tensor, chooser: Chooser) -> torch.Tensor | list[int]:
        """Chooses the tokens to keep, as a Chooser does, or the indices of full pages to drop.

        attention: on each stored token, float32 [num_layers, num_kv_heads, tokens].
        """
        chosen = chooser.tokens(attention, self.num_kept * self.window.layout.block_size, self._dropping.rule)
        watch.keep(chosen)
        return chosen


class SnapKV(Weighed):
    """The retention of chosen prompt tokens, and of all later tokens. Source: arXiv 2404.14469.

    Blocks of kept tokens have names, and may be found once the first token was drawn from the whole prompt.
    """

    _is_lost = False

    def prefix(self, num_readable: int, num_known: int) -> Prefix:
        num_prompt = self._request.num_prompt
        if self._is_lost or self._request.computes_all or num_known == num_prompt:
            return super().prefix(num_readable, num_known)
        return Prefix(num_known - 1, num_prompt - self.num_kept * self.window.layout.block_size)

    def accepts(self, prefix: Prefix, num_blocks: int) -> bool:
        """Refuses part of the kept blocks; tokens are then chosen again from the whole prompt."""
        is_lost = prefix.num_dropped > 0 and num_blocks < self.num_kept
        self._is_lost |= is_lost
        return not is_lost

    def begin(self, table: BlockTable) -> None:
        super().begin(table)
        if table.num_dropped:
            self.watch, self._is_lost = None, False

    def _chain(self, tokens: Tokens, num_tokens: int, num_dropped: int) -> NameChain | None:
        """Begins the chain with the names of kept blocks, if tokens were dropped."""
        num_prompt = self._request.num_prompt
        if num_dropped not in self._chains and (prompt := super()._chain(tokens, num_prompt, 0)) is not None:
            self._chains[num_dropped] = prompt.kept(self._dropping.terms, num_prompt, self.num_kept)
        return super()._chain(tokens, num_tokens, num_dropped)


class H2O(Weighed):
    """The retention of chosen prompt tokens, and of as many later tokens, page by page. Source: arXiv 2306.14048.

    Blocks have no names once a token was dropped: a reader would lack the attention summed for their tokens.
    """

    def choose(self, watch: Watch, attention: torch.Tensor, chooser: Chooser) -> torch.Tensor | list[int]:
        if self.num_kept and not self.table.num_dropped:
            return super().choose(watch, attention, chooser)
        block_size = self.window.layout.block_size
        weights = page_attention(attention, block_size)
        num_to_drop = len(weights) - self._dropping.num_blocks(self._request.num_prompt, block_size)
        pages = chooser.pages(weights, num_to_drop, watch.start) if num_to_drop > 0 else []
        watch.drop(pages)
        return pages


def retention_of(request: EngineRequest, layout: KVLayout) -> Retention:
    """Makes the retention of a choice. KV stays whole for a hand-off with H2O, and for short prompts with SnapKV."""
    dropping = request.dropping
    if dropping is None or (dropping.rule is Rule.H2O and isinstance(request, HandOff)):
        return Retention(request, layout)
    if dropping.rule is Rule.H2O:
        return H2O(request, layout, dropping)
    is_long = dropping.num_copied(request.num_prompt, layout.block_size) > 0
    return SnapKV(request, layout, dropping) if is_long else Retention(request, layout)


def require_storable(request: EngineRequest, layout: KVLayout, num_pages: int) -> None:
    """Raises InvalidRequest if the pool cannot hold a choice at its longest, or its KV cannot be dropped as requested.

    A hand-off draws first tokens only: a later token would see KV that is dropped elsewhere.
    """
    most = request.max_len
    if request.dropping is not None:
        if layout.window is not None:
            raise InvalidRequest("kv_policy", "tokens of a model with windows are not dropped by attention")
        if layout.has_open_blocks:
            raise InvalidRequest("kv_policy", "tokens of KV in int4 are not dropped by attention")
        if isinstance(request, HandOff) and any(choice.output_ids for choice in request.choices):
            raise InvalidRequest("choices", "a hand-off draws first tokens: later ones would see all KV")
        most += request.dropping.num_copied(request.num_prompt, layout.block_size) * layout.block_size
    if most > (capacity := Window(layout).max_len(num_pages, most)):
        raise InvalidRequest("max_tokens", f"{most} tokens exceed what the pool holds ({capacity})")
