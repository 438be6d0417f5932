"""The reads of prefixes: pages that are acquired, fetches before a sequence runs, and groups read beside it.

admit    acquires the pages of known blocks, and begins the fetch of missing ones
take     gives the sequence what the fetch has brought; with a step that is left, it is a split prefix:
follow   acquires blocks that were read while the front was computed, and begins to read the next group
"""

from collections.abc import Callable, Iterable

from engine.events import Fetched, Jumped
from engine.kv.allocator import PageAllocator
from engine.kv.lookup import Lookup
from engine.kv.prefetch import Prefetch
from engine.kv.retention import BlockTable
from engine.schedule.batcher import Phase
from engine.sequence import Sequence
from kv_store.device_pool import DevicePool
from kv_store.ledger import OutOfBlocks
from kv_store.prefix.plan import Read
from kv_store.transfers import Done, ReadGroup, Transfer
from wire.ids import PageId
from wire.tier import Tier


class PrefixReads:
    """The reads of all sequences. For the engine's thread. begin: begins a transfer, as the cache does."""

    def __init__(self, pool: DevicePool, allocator: PageAllocator, begin: Callable[[Transfer], None]) -> None:
        self._pool = pool
        self._allocator = allocator
        self._ledger = pool.ledger
        self._block_size = pool.layout.block_size
        self._begin = begin
        self._reading: dict[Transfer, tuple[Sequence, Lookup | Prefetch]] = {}

    def admit(self, sequence: Sequence, siblings: Iterable[Sequence] = ()) -> bool:
        """Gives a waiting sequence the pages of its known prefix and begins the fetch of the missing blocks.

        False, and nothing changed, if too few pages are free. Covers readable tokens: the last known one is always run.
        Allocates reserved pages now: at a prompt's end all its blocks still have theirs.
        """
        prefix = sequence.prefix
        names = sequence.kv.names(sequence.tokens, prefix.num_tokens, prefix.num_dropped)
        found = [None if name.is_tail else self._ledger.find(name.key) for name in names]
        taken = self._take(Lookup(prefix, names, found, sequence.kv.window, sequence.request.num_prompt))
        if taken is None:
            return False
        lookup, pages = taken
        sequence.kv.reserved, to_fill = pages[: prefix.num_reserved], pages[prefix.num_reserved :]
        sequence.kv.begin(BlockTable([*lookup.hits, *to_fill], num_dropped=prefix.num_dropped))
        sequence.phase = Phase.FETCHING
        self._fetch(sequence, lookup, to_fill, siblings)
        return True

    def _take(self, lookup: Lookup) -> tuple[Lookup, list[PageId]] | None:
        """Acquires the pages found, and allocates reserved ones and ones to fill; None, and no change, without room.

        Windows that begin later may have no room beside the one on the device: they are cut from the search.
        """
        for page in lookup.hits:
            self._ledger.acquire(page)
        try:
            return lookup, self._ledger.allocate(lookup.prefix.num_reserved + lookup.num_to_fill)
        except OutOfBlocks:
            self._allocator.free(lookup.hits)
            return self._take(lookup.cut()) if lookup.starts else None

    def _fetch(self, sequence: Sequence, lookup: Lookup, to_fill: list[PageId], siblings: Iterable[Sequence]) -> None:
        """Begins a fetch; a tail is copied from a sibling's page instead, if all else is on the device."""
        if len(lookup.missing) == 1 and lookup.names[-1].is_tail:
            [place] = lookup.missing
            if self._copy_tail(sequence, place, to_fill[0], siblings):
                lookup.found[place], lookup.blocks[place] = to_fill[0], Tier.DEVICE
                lookup.missing, to_fill = [], []
        may_jump = sequence.kv.is_plain and not sequence.wants_scores  # all rows of a scored prompt run
        fetch = lookup.fetch(to_fill, sequence.request.peers, may_jump)
        self._reading[fetch] = sequence, lookup
        self._begin(fetch)

    def _copy_tail(self, sequence: Sequence, place: int, page: PageId, siblings: Iterable[Sequence]) -> bool:
        """Copies the tail of a prompt from a sibling that has computed the same tokens; False if there is none."""
        for one in siblings:
            is_same = sequence.num_known - 1 == sequence.request.num_prompt <= one.num_computed
            if is_same and place not in one.kv.table.behind:
                [source] = one.kv.table[place : place + 1]
                self._pool.page_bytes(page).copy_(self._pool.page_bytes(source))
                return True
        return False

    def take(self, done: Done) -> Fetched | None:
        """Takes what a transfer has read, before its pages are free of it; passes over other transfers."""
        sequence, read = self._reading.pop(done.transfer, (None, None))
        if isinstance(read, Lookup) and sequence is not None and sequence.phase is Phase.FETCHING:
            return self._fetched(sequence, read, done)
        if isinstance(read, Prefetch):
            read.note_read(len(done.transfer.pages), done.reading.tiers)
        if sequence is not None and sequence.prefetch is read:
            blocks = [*zip(done.transfer.names, done.transfer.pages, done.reading.tiers, strict=False)]
            for name, page, _ in reversed(blocks):
                self._ledger.index(page, name.key)
        return None

    def _fetched(self, sequence: Sequence, lookup: Lookup, done: Done) -> Fetched | None:
        """Makes the block table of the longest usable prefix, and gives the other pages back.

        None, and the sequence waits again, if it cannot begin with that.
        """
        for name, page in lookup.take(done):
            self._ledger.index(page, name.key)
        (end, behind), prefix = lookup.usable(), lookup.prefix
        if not sequence.kv.accepts(prefix, end):
            self._allocator.take_back(sequence)
            sequence.phase = Phase.WAITING
            return None
        pages = lookup.pages(end, behind)
        kept = {*pages}
        self._allocator.free([page for page in sequence.kv.table.present if page not in kept])
        sequence.kv.begin(BlockTable(pages, behind, prefix.num_dropped))
        sequence.begin_run(min(end * self._block_size, prefix.num_stored) + prefix.num_dropped)
        lookup.settle(end, behind)
        later = done.reading.later
        sequence.prefetch = None if later is None else Prefetch(lookup, later)
        return Fetched(sequence.choice.attempt_id, sequence.choice.index, lookup.tokens)

    def follow(self, sequence: Sequence, num_spare: int) -> Jumped | None:
        """Lets a sequence acquire the blocks at its place that its prefetch has read, and begins the next group.

        num_spare: pages that no running sequence lacks. The sequence ends its prefetch behind the last block of it.
        """
        prefetch, block_size = sequence.prefetch, self._block_size
        assert prefetch is not None
        start, is_within = divmod(sequence.num_computed, block_size)
        is_at_end = not is_within and len(sequence.kv.table) == start
        pages = prefetch.run(start, self._ledger.find) if is_at_end else []
        for page in pages:
            self._ledger.acquire(page)
        sequence.kv.table.extend(pages)
        if pages:
            sequence.begin_run((start + len(pages)) * block_size)
        place = start + len(pages)
        if place >= len(prefetch.names):
            sequence.prefetch = None
        elif group := prefetch.next_group(place, self._ledger.find, num_spare):
            self._read_group(sequence, prefetch, group)
        prefetch.end_chunk_after(place, self._ledger.find)
        if not pages:
            return None
        tokens, choice = prefetch.acquired(start, place), sequence.choice
        return Jumped(choice.attempt_id, choice.index, range(start * block_size, place * block_size), tokens)

    def _read_group(self, sequence: Sequence, prefetch: Prefetch, group: Read) -> None:
        """Begins to fill pages that drain meanwhile: batchers count on them, and no sequence has to give them back."""
        pages = self._allocator.allocate(len(group.names))
        order = ReadGroup(group.names, pages, step=group)
        self._reading[order] = sequence, prefetch
        self._begin(order)
        self._allocator.free(pages)
