"""The later read of a prefix: groups of blocks, read while a sequence computes the blocks before them.

 blocks   0 ... p ─── computed in chunks ──▶        ◀── read in groups ─── last
                  p: pages that are indexed are acquired, and count as run

No sequence owns a group's pages: they drain while they are filled, and are cached once verified.
"""

from bisect import bisect_left
from collections.abc import Callable
from functools import partial

from engine.events import PromptTokens
from engine.kv.prefix_read import PrefixRead
from kv_store.prefix.plan import Read
from kv_store.transfers import Done
from wire.ids import BlockKey, PageId
from wire.tier import Tier

Find = Callable[[BlockKey], PageId | None]
"""A function that finds the device page of a block."""


class LaterRead:
    """The read of a step that a prefix's fetch has left, in groups from its end on, with at most one running group.

    front: the read of the blocks before, with the prefix's names; acquired blocks change its dispositions. stop: the
    block after the step's last.
    """

    def __init__(self, front: PrefixRead, step: Read) -> None:
        self.front = front
        self._step = step
        place_of = {name.key: place for place, name in enumerate(front.names)}
        self._places = [place_of[name.key] for name in step.names]
        self.stop = self._places[-1] + 1
        self._num_left = len(step.names)
        self._may_begin = True
        self._tiers: dict[int, Tier] = {}

    def run(self, start: int, find: Find) -> list[PageId]:
        """Lists the pages of consecutive blocks on the device, from `start` on."""
        pages = (find(name.key) for name in self.front.names[start : self.stop])
        return [*iter(partial(next, pages, None), None)]

    def acquired(self, start: int, stop: int) -> PromptTokens:
        """Notes acquired blocks, by the tiers that they were read from; returns the prompt's tokens."""
        self.front.blocks[start:stop] = [self._tiers.get(place, Tier.DEVICE) for place in range(start, stop)]
        return self.front.tokens

    def chunk_stop(self, start: int, find: Find) -> int:
        """Finds the end of a chunk from block `start` on: the first block that is cached, or the group being read."""
        group = self._places[self._num_left] if self._num_left < len(self._places) else self.stop
        stop = start + self._step.num_in_chunk
        stop = min(stop, group) if group > start else stop
        later = range(start + 1, min(stop, self.stop))
        return next((place for place in later if find(self.front.names[place].key) is not None), stop)

    def next_group(self, start: int, find: Find, max_pages: int) -> Read | None:
        """Takes the next group, if it can be read before a sequence at block `start` computes up to it.

        Returns None, now and later, if there is no group or no room.
        """
        if not self._may_begin:
            return None
        while self._num_left and find(self._step.names[self._num_left - 1].key) is not None:
            self._num_left -= 1
        first = min(bisect_left(self._places, start), self._num_left)
        num_before = [place - start for place in self._places[first : self._num_left]]
        left = self._step.part(first, self._num_left)
        num = max(0, min(left.num_in_group(num_before), max_pages))
        self._num_left -= num
        self._may_begin = False
        return self._step.part(self._num_left, self._num_left + num) if num else None

    def end_group(self, done: Done) -> None:
        """Ends a group; after an incomplete group no other begins."""
        tiers = done.reading.tiers
        self._may_begin = len(tiers) == len(done.transfer.pages)
        self._tiers |= dict(zip(self._places[self._num_left :], tiers, strict=False))
