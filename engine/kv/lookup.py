"""The search for the blocks that a sequence begins with."""

from bisect import bisect_left
from collections.abc import Mapping, Sequence

from engine.kv.retention import Prefix
from kv_store.transfers import Fetch, FrontFetch
from wire.block_names import BlockName
from wire.ids import BlockKey, PageId
from wire.layout import Window
from wire.tier import Cause, Miss, MissRun, runs_of


class Lookup:
    """A search for the blocks of a prefix: on the device, then in the store.

    found: the device page of each block, None where there is none; a fetch adds to it. hits: pages found at first, but
    for blocks behind the window. missing: the places of blocks to ask the store for. starts: for each missing block the
    place in `missing` of the first one to fetch with it, where blocks on the device count as fetched; None without a
    window, for a block is then of no use without all before it.
    """

    def __init__(
        self, prefix: Prefix, names: Sequence[BlockName], found: Sequence[PageId | None], window: Window
    ) -> None:
        self.prefix = prefix
        self.names = names
        self.found = [*found]
        self._window = window
        _, behind = self.usable()
        self.hits = self.pages(len(found), behind)
        self.missing = [place for place, page in enumerate(found) if page is None and place not in behind]
        self.starts = None if window.layout.window is None else self._starts()

    def usable(self) -> tuple[int, range]:
        """Finds the end of the longest prefix whose next token can run, and the blocks that its row does not read."""
        sinks = self.found[: self._window.num_sink_blocks]
        end = sinks.index(None) if None in sinks else len(self.found)
        behind = self._behind(end)
        for place in reversed(range(end)):
            if place < behind.stop:
                break
            if self.found[place] is None:
                end, behind = place, self._behind(place)
        return end, behind

    def pages(self, end: int, behind: range) -> list[PageId]:
        """Lists the pages of the first `end` blocks that are here, and not behind the window."""
        return [page for place, page in enumerate(self.found[:end]) if page is not None and place not in behind]

    @property
    def num_to_fill(self) -> int:
        """The most pages that a fetch fills."""
        if self.starts is None:
            return len(self.missing)
        runs = (stop - start + min(self._num_sinks, start) for stop, start in enumerate(self.starts, 1))
        return max(runs, default=0)

    def cut(self) -> "Lookup":
        """Returns the search of the usable part alone, for which the store is not asked."""
        end, _ = self.usable()
        return Lookup(self.prefix, self.names[:end], self.found[:end], self._window)

    def misses(self, end: int, num_prompt: int, told: Mapping[BlockKey, Miss]) -> tuple[MissRun, ...]:
        """Finds the causes of a prompt's blocks that are not among the first `end`. told: by the store, of its misses.

        The block of a prompt's last token has no name where that is its only one: the last token is always computed.
        """
        block_size = self._window.layout.block_size
        num_blocks = -(-num_prompt // block_size)
        causes = [self._miss(place, told) for place in range(end, min(len(self.names), num_blocks))]
        unnamed = range(end + len(causes), num_blocks)
        is_short = (num_prompt - 1) % block_size == 0
        causes += [Miss(Cause.PARTIAL if is_short and at == num_blocks - 1 else Cause.NOT_READ) for at in unnamed]
        return runs_of(causes, end, block_size)

    def _miss(self, place: int, told: Mapping[BlockKey, Miss]) -> Miss:
        if self.found[place] is not None:
            return Miss(Cause.BEHIND)
        return told.get(self.names[place].key, Miss(Cause.NOT_READ))

    def fetch(self, pages: Sequence[PageId], peers: Sequence[str]) -> Fetch:
        """Orders the missing blocks."""
        names = [self.names[place] for place in self.missing]
        return Fetch(names, pages, peers, self.starts if names else None, self._num_sinks)

    def fetch_front(self, pages: Sequence[PageId], peers: Sequence[str]) -> FrontFetch:
        """Orders the missing blocks, or a front of them: each is of use once all before it are here."""
        return FrontFetch([self.names[place] for place in self.missing], pages, peers)

    @property
    def _num_sinks(self) -> int:
        """Missing blocks that all others need."""
        return bisect_left(self.missing, self._window.num_sink_blocks)

    def _starts(self) -> list[int]:
        ends = [*self.missing[1:], len(self.found)]
        firsts = [self._window.first_block(self._position(end)) for end in ends]
        return [bisect_left(self.missing, first) for first in firsts[: len(self.missing)]]

    def _behind(self, end: int) -> range:
        return self._window.behind(self._position(end))

    def _position(self, end: int) -> int:
        """Finds the place of the token after `end` blocks."""
        return min(end * self._window.layout.block_size, self.prefix.num_stored)
