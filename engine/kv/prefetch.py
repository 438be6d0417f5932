"""The prefetch of the back of a prefix: groups of blocks, from the last one on, while the front is computed.

 blocks   0 ... p ─── computed in chunks ──▶        ◀── read in groups ─── last
                  p: pages that are indexed are acquired, and count as run

A group has pages that no sequence owns: they drain while they are filled, and are cached once they are right.
"""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from functools import partial

from engine.events import PromptTokens
from engine.kv.lookup import Lookup
from kv_store.prefix.plan import Read
from wire.ids import BlockKey, PageId
from wire.tier import Tier

Find = Callable[[BlockKey], PageId | None]
"""Finds the device page of a block."""


class Prefetch:
    """The books of one sequence's prefetch, with at most one group at the store.

    names: of the prefix that `lookup` was for, in which the step's may have gaps for blocks on the device. until: the
    block before which the next chunk ends, at which there may be more on the device by then.
    """

    def __init__(self, lookup: Lookup, step: Read) -> None:
        place_of = {name.key: place for place, name in enumerate(lookup.names)}
        self._places = [place_of[name.key] for name in step.names]
        self._step = step
        self._num_left = len(step.names)
        self._tiers: dict[int, Tier] = {}
        self._chunk = step.num_in_chunk
        self._lookup = lookup
        self.names = lookup.names[: self._places[-1] + 1]
        self.until = 0
        self.is_reading = False
        self._is_over = False

    def run(self, start: int, find: Find) -> list[PageId]:
        """Lists the pages of the blocks from `start` on that are on the device, without a gap."""
        pages = (find(name.key) for name in self.names[start:])
        return [*iter(partial(next, pages, None), None)]

    def acquired(self, start: int, stop: int) -> PromptTokens:
        """Notes that these blocks were acquired, by the tiers that they were read from; returns the prompt's tokens."""
        self._lookup.blocks[start:stop] = [self._tiers.get(place, Tier.DEVICE) for place in range(start, stop)]
        return self._lookup.tokens

    def end_chunk_after(self, start: int, find: Find) -> None:
        """Ends the chunk from block `start` on at the first block that is cached, or before the group being read."""
        stop = start + self._chunk
        group = self._places[self._num_left] if self._num_left < len(self._places) else len(self.names)
        stop = min(stop, group) if group > start else stop
        later = range(start + 1, min(stop, len(self.names)))
        self.until = next((place for place in later if find(self.names[place].key) is not None), stop)

    def next_group(self, start: int, find: Find, max_pages: int) -> Read | None:
        """Takes the next group, which is read before a sequence at block `start` has computed up to it.

        None, now and later, if there is none, or if it has no room.
        """
        if self.is_reading or self._is_over:
            return None
        while self._num_left and find(self._step.names[self._num_left - 1].key) is not None:
            self._num_left -= 1
        first = min(bisect_left(self._places, start), self._num_left)
        num_before = [place - start for place in self._places[first : self._num_left]]
        left = self._step.part(first, self._num_left)
        num = max(0, min(left.num_in_group(num_before), max_pages))
        self._num_left -= num
        self.is_reading, self._is_over = num > 0, num == 0
        return self._step.part(self._num_left, self._num_left + num) if num else None

    def note_read(self, num_pages: int, tiers: Sequence[Tier]) -> None:
        """Ends a group; after one that came back short no other begins."""
        self.is_reading, self._is_over = False, len(tiers) < num_pages
        self._tiers |= dict(zip(self._places[self._num_left :], tiers, strict=False))
