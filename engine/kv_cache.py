"""The pages of an engine's sequences: their allocation, the fetch of known blocks, the publishing of new ones.

No other module of the engine touches the pool's ledger and the transfers. All of it runs on the engine's thread.
"""

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from collections.abc import Sequence as Seq
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from engine.events import Fetched, TierTokens
from engine.model.dropping import gather_tokens
from engine.request import HandOff
from engine.schedule.batcher import Pages, Phase
from engine.sequence import BlockTable, KeptPrompt, Sequence
from kv_store.device_pool import DevicePool
from kv_store.ledger import OutOfBlocks
from kv_store.transfers import Done, Fetch, Publish, Transfer, Transfers, Withdraw
from wire.ids import PageId
from wire.keys import BlockName
from wire.tier import Tier


@dataclass(frozen=True)
class PublishedFor:
    """The store holds `num_held` blocks of a sequence to hand off."""

    sequence: Sequence
    num_held: int


@dataclass(frozen=True)
class Lookup:
    """A search for the blocks of a sequence's first `num_tokens` tokens, or of the kept ones among these.

    found: the device page of each block, None where there is none. missing: the places of blocks to ask the store for.
    """

    sequence: Sequence
    num_tokens: int
    found: list[PageId | None]
    missing: list[int]

    @property
    def num_stored(self) -> int:
        return self.num_tokens - self.sequence.pages.num_dropped


class KVCache:
    """Pages of sequences over one pool, with the store behind it."""

    def __init__(self, pool: DevicePool, transfers: Transfers) -> None:
        self.pool = pool
        self._ledger = pool.ledger
        self._transfers = transfers
        self._layout = pool.layout
        self._lookups: dict[Transfer, Lookup] = {}
        self._hand_offs: dict[Transfer, Sequence] = {}

    @property
    def pages(self) -> Pages:
        layout, num_draining = self._layout, self._ledger.counts().draining
        return Pages(self._ledger.num_allocatable, num_draining, layout.block_size, layout.most_needed)

    @property
    def num_in_flight(self) -> int:
        return self._transfers.pending

    def admit(self, sequence: Sequence, siblings: Iterable[Sequence] = ()) -> bool:
        """Gives a waiting sequence the pages of its known prefix and begins the fetch of the missing blocks.

        False, and nothing changed, if too few pages are free. Covers readable tokens: the last known one is always run.
        The tail of a prompt is copied from a sibling's page, if all else that is needed is on the device. Kept tokens
        of a prompt have pages from the beginning: at its end the blocks of the whole prompt are still there.
        """
        kept, findable = sequence.kept, sequence.findable
        if findable is not None:
            num_tokens, num_dropped, num_reserved = sequence.num_known - 1, findable.num_dropped, 0
            names = sequence.cover_kept(num_tokens)
        else:
            num_tokens, num_dropped = 0 if sequence.request.computes_all else sequence.num_readable, 0
            names, num_reserved = sequence.cover(num_tokens), 0 if kept is None else kept.num_blocks
        found = [None if name.is_tail else self._ledger.find(name.key) for name in names]
        end, behind = self._usable(found, num_tokens)
        hits = _pages(found, behind)
        missing = [place for place, page in enumerate(found) if page is None and place not in behind]
        starts = None if self._layout.window is None else self._starts(missing, len(found), num_tokens)
        num_sinks = bisect_left(missing, self._layout.num_sink_blocks)
        runs = (stop - start + min(num_sinks, start) for stop, start in enumerate(starts or (), 1))
        for page in hits:
            self._ledger.acquire(page)
        try:
            to_fill = self._ledger.allocate(num_reserved + (len(missing) if starts is None else max(runs, default=0)))
        except OutOfBlocks:
            self._free(hits)
            if starts is None:
                return False
            # Windows that begin later have no room beside the one on the device, which is taken as it is.
            found, missing, to_fill = found[:end], [], []
            hits = _pages(found, behind)
            for page in hits:
                self._ledger.acquire(page)
        if kept is not None:
            kept.reserved, to_fill = to_fill[:num_reserved], to_fill[num_reserved:]
        sequence.pages = BlockTable([*hits, *to_fill], num_dropped=num_dropped)
        sequence.phase = Phase.FETCHING
        if len(missing) == 1 and names[-1].is_tail and self._copy_tail(sequence, missing[0], to_fill[0], siblings):
            found[-1], missing, to_fill = to_fill[0], [], []
        wanted = [names[place] for place in missing]
        fetch = Fetch(wanted, to_fill, sequence.request.sources, starts if wanted else None, num_sinks)
        self._lookups[fetch] = Lookup(sequence, num_tokens, found, missing)
        self._begin(fetch)
        return True

    def _usable(self, found: Seq[PageId | None], num_tokens: int) -> tuple[int, range]:
        """Finds the end of the longest prefix whose next token can be run, and the blocks that its row needs not."""
        sinks = found[: self._layout.num_sink_blocks]
        end = sinks.index(None) if None in sinks else len(found)
        behind = self._behind(end, num_tokens)
        for place in reversed(range(end)):
            if place < behind.stop:
                break
            if found[place] is None:
                end, behind = place, self._behind(place, num_tokens)
        return end, behind

    def _behind(self, end: int, num_tokens: int) -> range:
        """Finds the blocks that the token after `end` blocks, or after `num_tokens`, does not need."""
        return self._layout.behind(min(end * self._layout.block_size, num_tokens))

    def _starts(self, missing: Seq[int], num_blocks: int, num_tokens: int) -> list[int]:
        """Returns for each missing block the place in `missing` of the first one that must be fetched with it.

        Blocks on the device count as fetched.
        """
        ends = [*missing[1:], num_blocks]
        firsts = [self._layout.first_block(min(end * self._layout.block_size, num_tokens)) for end in ends]
        return [bisect_left(missing, first) for first in firsts[: len(missing)]]

    def _copy_tail(self, sequence: Sequence, place: int, page: PageId, siblings: Iterable[Sequence]) -> bool:
        """Copies the tail of a prompt from a sibling that has computed the same tokens; False if there is none."""
        for one in siblings:
            is_same = sequence.num_known - 1 == sequence.num_prompt <= one.num_computed
            if is_same and place not in one.pages.behind:
                [source] = one.pages[place : place + 1]
                self.pool.page_bytes(page).copy_(self.pool.page_bytes(source))
                return True
        return False

    def grow(self, sequence: Sequence, num_tokens: int) -> int:
        """Makes room for the next `num_tokens` tokens, or as many as may be open; returns their number.

        Returns 0, and nothing changed, if there is none.
        """
        num_blocks, block_size = len(sequence.pages), self._layout.block_size
        num_writable = (num_blocks + self.pool.num_openable) * block_size - sequence.num_stored
        num_tokens = min(num_tokens, num_writable)
        try:
            num_more = max(0, -(-(sequence.num_stored + num_tokens) // block_size) - num_blocks)
            sequence.pages.extend(self._allocate(num_more))
        except OutOfBlocks:
            return 0
        return num_tokens

    def extend(self, sequences: Seq[Sequence]) -> list[PageId] | None:
        """Gives a further page to each of these sequences and returns them; None, and nothing changed, without room."""
        try:
            pages = self._allocate(len(sequences))
        except OutOfBlocks:
            return None
        for sequence, page in zip(sequences, pages, strict=True):
            sequence.pages.extend((page,))
        return pages

    def _allocate(self, num_pages: int) -> list[PageId]:
        """Allocates pages to be written. Raises OutOfBlocks without room, or if too many are open."""
        if num_pages > self.pool.num_openable:
            raise OutOfBlocks(f"{num_pages} open blocks wanted, {self.pool.num_openable} to be had")
        pages = self._ledger.allocate(num_pages)
        self.pool.open(pages)
        return pages

    def publish_filled(self, sequence_to_start: Mapping[Sequence, int]) -> None:
        """Publishes the blocks that sequences have filled since they had `start` tokens with KV.

        On the device, and through to the store, all in one transfer. Blocks that are behind the window now are left;
        blocks of a prompt that does not stay whole go to the store after the kept ones.
        """
        filled = []
        for sequence, start in sequence_to_start.items():
            blocks = sequence.full_blocks(start)
            for name, page in blocks:
                self._ledger.publish(page, name.key)
            self.pool.close([page for _, page in blocks])
            if sequence.kept is not None and sequence.kept.has_names and sequence.watch is not None:
                self._delay(sequence.kept, blocks)
            else:
                filled += blocks
        self._publish([name for name, _ in filled], [page for _, page in filled])
        for sequence in sequence_to_start:
            self._free(sequence.pages.leave_behind(self._layout.behind(sequence.num_computed)))

    def keep_tokens(self, sequence: Sequence, kept: KeptPrompt, chosen: torch.Tensor) -> None:
        """Replaces a sequence's pages by the reserved ones, with copies of chosen tokens, as in `gather_tokens`."""
        table, pages = (torch.tensor(one, device=chosen.device) for one in (sequence.pages[:], kept.reserved))
        gather_tokens(self.pool.kv, table, chosen, pages)
        self._free(sequence.pages.held)
        sequence.pages = BlockTable(kept.reserved, num_dropped=kept.num_dropped)
        kept.reserved, kept.is_lost = [], False
        if kept.has_names:
            sequence.watch = None
            self._publish_kept(sequence)

    def _publish_kept(self, sequence: Sequence) -> None:
        """Publishes the kept blocks of a prompt, on the device, and to the store unless a hand-off will."""
        names, pages = sequence.cover_kept(sequence.num_prompt), sequence.pages[:]
        for name, page in zip(names, pages, strict=True):
            self._ledger.publish(page, name.key)
        if not isinstance(sequence.request, HandOff):
            self._publish(names, pages)
            self._publish_delayed(sequence)

    def drop_pages(self, sequence: Sequence, places: Seq[int]) -> None:
        """Gives some full pages of a sequence back."""
        self._free(sequence.pages.drop(places, self._layout.block_size))

    def hand_off(self, sequence: Sequence) -> None:
        """Publishes all blocks of a prompt that the next token needs, tail included; PublishedFor tells the end.

        They are held for the request. The other blocks of a prompt that does not stay whole follow, and are not held.
        """
        num_prompt, behind = sequence.num_prompt, self._layout.behind(sequence.num_prompt)
        names = (sequence.cover_kept if sequence.pages.num_dropped else sequence.cover)(num_prompt)
        needed = names[: behind.start] + names[behind.stop :]
        pages = sequence.pages[: behind.start] + sequence.pages[behind.stop : len(names)]
        publish = Publish(needed, pages, sequence.request.request_id)
        self._hand_offs[publish] = sequence
        self._begin(publish)
        self._publish_delayed(sequence)

    def set_aside(self, sequence: Sequence) -> None:
        """Takes a sequence's pages away; its computed blocks can be found again, its tail in the store."""
        tail = sequence.tail()
        if tail is not None and sequence.num_computed == sequence.num_known - 1:
            index = sequence.num_stored // self._layout.block_size
            self._publish([tail], sequence.pages[index : index + 1])
        self.free(sequence)

    def withdraw(self, sequence: Sequence) -> None:
        """Makes the blocks of a sequence unfindable: here, in the store, and on nodes that it may have read from."""
        names = sequence.cover(sequence.num_computed)
        if sequence.kept is not None and sequence.kept.has_names and sequence.pages.num_dropped:
            names = [*sequence.cover(sequence.num_prompt), *sequence.cover_kept(sequence.num_computed)]
        found = (self._ledger.find(name.key) for name in names)
        for page in {*sequence.pages.held, *(page for page in found if page is not None)}:
            self._ledger.withdraw(page)
        if sequence.kept is not None:
            self._free([page for _, page in sequence.kept.delayed])
            sequence.kept.delayed = []
        if names:
            self._begin(Withdraw(names, sources=sequence.request.sources))

    @contextmanager
    def borrowed_page(self) -> Iterator[PageId | None]:
        """Lends a page without an owner; None if none is free."""
        pages = self._allocate(min(1, self._ledger.num_allocatable, self.pool.num_openable))
        yield pages[0] if pages else None
        self._free(pages)

    def free(self, sequence: Sequence) -> None:
        """Gives a sequence's pages back; pages with a transfer under way drain first."""
        self._publish_delayed(sequence)
        self._free(sequence.pages.held)
        if sequence.kept is not None:
            self._free(sequence.kept.reserved)
            sequence.kept.reserved = []
        sequence.drop_pages()

    def poll(self) -> list[Fetched | PublishedFor]:
        """Collects the transfers with a sequence waiting that have ended since the last call."""
        ended: list[Fetched | PublishedFor] = []
        for done in self._transfers.poll():
            for page in done.transfer.pages:
                self._ledger.end_transfer(page)
            lookup = self._lookups.pop(done.transfer, None)
            handing_off = self._hand_offs.pop(done.transfer, None)
            if handing_off is not None:
                ended.append(PublishedFor(handing_off, done.num_held))
            elif lookup is not None and lookup.sequence.phase is Phase.FETCHING:
                fetched = self._fetched(lookup, done)
                ended += [] if fetched is None else [fetched]
        return ended

    def _fetched(self, lookup: Lookup, done: Done) -> Fetched | None:
        """Makes the block table of the longest usable prefix, and gives the other pages back.

        None, and the sequence waits again, if not all kept blocks of the prompt are there: they are chosen anew.
        """
        sequence, found, fetch = lookup.sequence, lookup.found, done.transfer
        assert isinstance(fetch, Fetch)
        tiers = [Tier.DEVICE] * len(found)
        places = fetch.places(done.first, len(fetch.names))
        for at, page, tier in zip(places, fetch.pages, done.tiers, strict=False):
            found[lookup.missing[at]], tiers[lookup.missing[at]] = page, tier
            if not fetch.names[at].is_tail:
                self._ledger.publish(page, fetch.names[at].key)
        (end, behind), num_dropped = self._usable(found, lookup.num_stored), sequence.pages.num_dropped
        if num_dropped and sequence.kept is not None and end < sequence.kept.num_blocks:
            self.free(sequence)
            sequence.phase, sequence.kept.is_lost = Phase.WAITING, True
            return None
        table = _pages(found[:end], behind)
        kept = {*table}
        self._free([page for page in sequence.pages.held if page not in kept])
        sequence.pages = BlockTable(table, behind, num_dropped)
        sequence.watch = None if num_dropped else sequence.watch
        sequence.begin_run(min(end * self._layout.block_size, lookup.num_stored) + num_dropped)
        tiers[behind.start : behind.stop] = tiers[behind.stop : behind.stop + 1] * len(behind)
        return Fetched(sequence.choice.request_id, sequence.choice.index, self._prompt_tokens(sequence, tiers[:end]))

    def _prompt_tokens(self, sequence: Sequence, tiers: Seq[Tier]) -> TierTokens:
        """Counts prompt tokens by the tier of their block, up to num_computed or the prompt's end.

        Dropped tokens count with the first kept block.
        """
        covered, num_dropped = min(sequence.num_computed, sequence.num_prompt), sequence.pages.num_dropped
        found, num_stored = Counter[str](dict.fromkeys(tiers[:1], num_dropped)), covered - num_dropped
        for index, tier in enumerate(tiers[: -(-num_stored // self._layout.block_size)]):
            found[tier] += min(num_stored - index * self._layout.block_size, self._layout.block_size)
        return TierTokens(found, sequence.num_prompt - covered)

    def _delay(self, kept: KeptPrompt, blocks: Seq[tuple[BlockName, PageId]]) -> None:
        """Keeps blocks for `_publish_delayed`."""
        for _, page in blocks:
            self._ledger.acquire(page)
        kept.delayed += blocks

    def _publish_delayed(self, sequence: Sequence) -> None:
        """Publishes the delayed blocks of a sequence's prompt, if there are any."""
        if sequence.kept is None:
            return
        names, pages = [name for name, _ in sequence.kept.delayed], [page for _, page in sequence.kept.delayed]
        sequence.kept.delayed = []
        self._publish(names, pages)
        self._free(pages)

    def _publish(self, names: list[BlockName], pages: list[PageId]) -> None:
        if names:
            self._begin(Publish(names, pages))

    def _begin(self, transfer: Transfer) -> None:
        for page in transfer.pages:
            self._ledger.begin_transfer(page)
        self._transfers.begin(transfer)

    def _free(self, pages: Seq[PageId]) -> None:
        """Frees the page first that is to be evicted first: a prefix's end, or its start where rows have windows."""
        self.pool.close(pages)
        for page in reversed(pages) if self._layout.window is None else pages:
            self._ledger.free(page)


def _pages(found: Seq[PageId | None], behind: range) -> list[PageId]:
    """Lists the pages of blocks that are here, and not behind the window."""
    return [page for place, page in enumerate(found) if page is not None and place not in behind]
