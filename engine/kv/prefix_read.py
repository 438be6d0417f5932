"""The read of a prefix: the blocks that a sequence begins with; `later_read` has blocks read while it computes."""

from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence

from engine.events import PromptTokens
from engine.kv.retention import Prefix
from kv_store.prefix.plan import Needs, usable_end
from kv_store.transfers import Done, Fetch
from wire.block_names import BlockName
from wire.ids import PageId
from wire.layout import Window
from wire.tier import Cause, Disposition, Miss, Tier, runs_of


class PrefixRead:
    """The read of a sequence's prefix: from the device, then from the store, with at most one running order.

    found: the device page of each block or None; a fetch adds pages. blocks: the blocks' dispositions. hits: pages
    found first, except for blocks behind the window. missing: the places of blocks to ask the store for. starts: for
    each missing block the place in `missing` of the first block to fetch with it; None without a window, where a block
    needs all blocks before it.
    """

    def __init__(
        self,
        prefix: Prefix,
        names: Sequence[BlockName],
        found: Sequence[PageId | None],
        window: Window,
        num_prompt: int,
    ) -> None:
        self.prefix = prefix
        self.names = names
        self.found = [*found]
        unread = Miss(Cause.NOT_READ)
        self.blocks: list[Disposition] = [unread if page is None else Tier.DEVICE for page in found]
        self._window = window
        self._num_prompt = num_prompt
        _, behind = self.usable()
        self.hits = self.pages(len(found), behind)
        self.missing = [place for place, page in enumerate(found) if page is None and place not in behind]
        self.starts = None if window.layout.window is None else self._starts()

    def usable(self) -> tuple[int, range]:
        """Finds the end of the longest prefix after which a token can run, and the blocks that it does not read."""
        if self._window.layout.window is None:
            return self.found.index(None) if None in self.found else len(self.found), range(0)
        sinks = self.found[: self._window.num_sink_blocks]
        num_found = sinks.index(None) if None in sinks else len(self.found)
        from_the_end = ((place, self.found[place] is not None) for place in reversed(range(num_found)))
        end = usable_end(num_found, lambda end: self._behind(end).stop, from_the_end)
        return end, self._behind(end)

    def pages(self, end: int, behind: range) -> list[PageId]:
        """Lists the pages, on the device, of the first `end` blocks, except blocks behind the window."""
        return [page for place, page in enumerate(self.found[:end]) if page is not None and place not in behind]

    @property
    def num_to_fill(self) -> int:
        """The most pages that a fetch fills."""
        if self.starts is None:
            return len(self.missing)
        runs = (stop - start + min(self._num_sinks, start) for stop, start in enumerate(self.starts, 1))
        return max(runs, default=0)

    def cut(self) -> "PrefixRead":
        """Returns the read of the usable part alone, without the store."""
        end, _ = self.usable()
        return PrefixRead(self.prefix, self.names[:end], self.found[:end], self._window, self._num_prompt)

    def take(self, done: Done) -> list[tuple[BlockName, PageId]]:
        """Takes the dispositions of a fetch; returns the full blocks that were read, and their pages."""
        for place, block in zip(self.missing, done.reading.blocks, strict=False):
            self.blocks[place] = block
        read = [place for place in self.missing if isinstance(self.blocks[place], Tier)]
        pages = dict(zip(read, done.transfer.pages, strict=False))
        for place, page in pages.items():
            self.found[place] = page
        return [(self.names[place], page) for place, page in pages.items() if not self.names[place].is_tail]

    def settle(self, end: int, behind: range) -> None:
        """Gives each block of the prompt its disposition, once the sequence begins with the first `end` blocks.

        A block with only the prompt's last token has no name here: that token is always computed.
        """
        blocks, block_size = self.blocks, self._window.layout.block_size
        blocks[behind.start : behind.stop] = [next(iter(blocks[behind.stop : end]), Tier.DEVICE)] * len(behind)
        blocks[end:] = [Miss(Cause.BEHIND) if isinstance(one, Tier) else one for one in blocks[end:]]
        num_stored = self._num_prompt - self.prefix.num_dropped
        unnamed = [Miss(Cause.NOT_READ)] * (-(-num_stored // block_size) - len(blocks))
        if unnamed and (num_stored - 1) % block_size == 0:
            unnamed[-1] = Miss(Cause.PARTIAL)
        blocks += unnamed

    @property
    def tokens(self) -> PromptTokens:
        """The prompt's tokens by the dispositions of their blocks; dropped tokens count with the first kept block."""
        block_size, num_dropped = self._window.layout.block_size, self.prefix.num_dropped
        num_blocks = -(-(self._num_prompt - num_dropped) // block_size)
        num_stored = min(self._num_prompt, self.prefix.num_tokens) - num_dropped
        found = Counter[str]()
        for place, block in enumerate(self.blocks[:num_blocks]):
            if isinstance(block, Tier):
                found[block] += min(num_stored - place * block_size, block_size) + (0 if place else num_dropped)
        num_computed = self._num_prompt - found.total()
        return PromptTokens(found, num_computed, runs_of(self.blocks[:num_blocks], block_size))

    def fetch(self, pages: Sequence[PageId], peers: Sequence[str], splits: bool) -> Fetch:
        """Orders the missing blocks. splits: whether a block is of use before all blocks before it are here."""
        names = [self.names[place] for place in self.missing]
        return Fetch(names, pages, peers, Needs(self.starts if names else None, self._num_sinks, splits))

    @property
    def _num_sinks(self) -> int:
        """The number of missing sink blocks, which all others need."""
        return bisect_left(self.missing, self._window.num_sink_blocks)

    def _starts(self) -> list[int]:
        ends = [*self.missing[1:], len(self.found)]
        firsts = [self._window.first_block(self._position(end)) for end in ends]
        return [bisect_left(self.missing, first) for first in firsts[: len(self.missing)]]

    def _behind(self, end: int) -> range:
        return self._window.behind(self._position(end))

    def _position(self, end: int) -> int:
        """Computes the position of the token after `end` blocks."""
        return min(end * self._window.layout.block_size, self.prefix.num_stored)
