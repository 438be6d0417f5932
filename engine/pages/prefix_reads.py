"""The reads of prefixes: acquired pages, fetches before a sequence runs, and groups read while it runs.

admit    acquires the pages of known blocks, and begins the fetch of missing ones
take     gives the sequence what the fetch has brought; with a step that is left, it is a split prefix:
follow   acquires blocks that were read while the front was computed, and begins to read the next group
prefetch begins to read blocks that prefill has published of a prompt, before the sequence is here: no state of any
"""

from collections.abc import Callable, Iterable
from collections.abc import Sequence as Seq

from engine.events import Fetched, Jumped
from engine.kv.later_read import LaterRead
from engine.kv.prefix_read import PrefixRead
from engine.kv.retention import BlockTable
from engine.pages.allocator import PageAllocator
from engine.request import BlocksAhead
from engine.schedule.batcher import Phase
from engine.sequence import Sequence
from kv_store.device_pool import DevicePool
from kv_store.ledger import OutOfBlocks
from kv_store.prefix.plan import Read
from kv_store.transfers import Done, Fetch, Prefetch, Transfer
from wire.ids import AttemptId, BlockKey, PageId
from wire.tier import Tier

GROUP_BYTES = 32 << 20
"""KV of one prefetch: other transfers wait for that much at most."""
MAX_PREFETCHES = 64


class PrefixReads:
    """The prefix reads of all sequences. For the engine's thread. begin: the function that begins a transfer."""

    def __init__(self, pool: DevicePool, allocator: PageAllocator, begin: Callable[[Transfer], None]) -> None:
        self._pool = pool
        self._allocator = allocator
        self._ledger = pool.ledger
        self._block_size = pool.layout.block_size
        self._begin = begin
        self._fetches: dict[Transfer, tuple[Sequence, PrefixRead]] = {}
        self._groups: dict[Transfer, tuple[Sequence, LaterRead]] = {}
        self._splits: dict[Sequence, LaterRead] = {}
        self._ahead: dict[Transfer, AttemptId] = {}
        self._for_attempts: dict[
            PageId, tuple[BlockKey, AttemptId]
        ] = {}  # pages read ahead, until their attempt begins

    def admit(self, sequence: Sequence, siblings: Iterable[Sequence] = ()) -> bool:
        """Gives a waiting sequence the pages of its known prefix and begins the fetch of the missing blocks.

        If too few pages are free, returns False and changes nothing. Covers readable tokens: the last known token
        always runs. Allocates reserved pages now, for at a prompt's end its blocks still have all their pages.
        """
        prefix = sequence.prefix
        names = sequence.kv.names(sequence.tokens, prefix.num_tokens, prefix.num_dropped)
        attempt_id = sequence.choice.attempt_id
        found = [None if name.is_tail else self._find(name.key, attempt_id) for name in names]
        taken = self._acquire(PrefixRead(prefix, names, found, sequence.kv.window, sequence.request.num_prompt))
        if taken is None:
            return False
        read, pages = taken
        sequence.kv.reserved, to_fill = pages[: prefix.num_reserved], pages[prefix.num_reserved :]
        sequence.kv.begin(BlockTable([*read.hits, *to_fill], num_dropped=prefix.num_dropped))
        sequence.phase = Phase.FETCHING
        self._begin_fetch(sequence, read, to_fill, siblings)
        return True

    def _acquire(self, read: PrefixRead) -> tuple[PrefixRead, list[PageId]] | None:
        """Acquires found pages, and allocates reserved pages and pages to fill; without room returns None, unchanged.

        If there is no room for later windows besides the window on the device, cuts them from the read.
        """
        for page in read.hits:
            self._ledger.acquire(page)
        try:
            return read, self._ledger.allocate(read.prefix.num_reserved + read.num_to_fill)
        except OutOfBlocks:
            self._allocator.free(read.hits)
            return self._acquire(read.cut()) if read.starts else None

    def _begin_fetch(
        self, sequence: Sequence, read: PrefixRead, to_fill: list[PageId], siblings: Iterable[Sequence]
    ) -> None:
        """Begins a fetch; if only the tail is missing, copies it from a sibling's page instead, if possible."""
        if len(read.missing) == 1 and read.names[-1].is_tail:
            [place] = read.missing
            if self._copy_tail(sequence, place, to_fill[0], siblings):
                read.found[place], read.blocks[place] = to_fill[0], Tier.DEVICE
                read.missing, to_fill = [], []
        for order in [one for one, attempt in self._ahead.items() if attempt == sequence.choice.attempt_id]:
            del self._ahead[order]  # what it has not brought by now, the fetch does
        may_jump = sequence.kv.is_plain and not sequence.wants_scores  # all rows of a scored prompt run
        fetch = read.fetch(to_fill, sequence.request.peers, may_jump)
        self._fetches[fetch] = sequence, read
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
        """Gives a finished fetch's blocks to its sequence, or indexes a group's or a prefetch's.

        Returns None for a group, another transfer, or a sequence that waits again. Call before `end_transfer` of the
        pages.
        """
        fetched, group = self._fetches.pop(done.transfer, None), self._groups.pop(done.transfer, None)
        if fetched is not None and fetched[0].phase is Phase.FETCHING:
            return self._end_fetch(*fetched, done)
        if group is not None and group[0].chunk_end is not None and self._splits.get(group[0]) is group[1]:
            group[1].end_group(done)
            self._index(done)
        attempt_id = self._ahead.pop(done.transfer, None)
        if attempt_id is not None:
            blocks = zip(done.transfer.names, done.transfer.pages, strict=True)
            self._for_attempts.update({page: (name.key, attempt_id) for name, page in blocks})
            self._index(done)
        return None

    def _find(self, key: BlockKey, attempt_id: AttemptId) -> PageId | None:
        """Finds a block's page for an attempt that begins.

        A page that was read ahead of another attempt, which has not begun, is no longer found: prefill may have ended
        with logits that are no numbers, and its blocks are deleted elsewhere.
        """
        page = self._ledger.find(key)
        if page is None or (reader := self._reader_to_come(page, key)) is None:
            return page
        del self._for_attempts[page]
        if reader == attempt_id:
            return page
        self._ledger.unindex(page)
        return None

    def _find_begun(self, key: BlockKey) -> PageId | None:
        """Finds a block's page, unless it was read ahead of an attempt that has not begun."""
        page = self._ledger.find(key)
        return None if page is None or self._reader_to_come(page, key) is not None else page

    def _reader_to_come(self, page: PageId, key: BlockKey) -> AttemptId | None:
        """Returns the attempt that a page was read ahead of, if it has not begun and the page still has the block."""
        of_key, attempt_id = self._for_attempts.get(page, (None, None))
        return attempt_id if of_key == key else None

    def _index(self, done: Done) -> None:
        """Indexes the blocks that were read, a prefix's end first; their pages have no owner."""
        read = [*zip(done.transfer.names, done.transfer.pages, done.reading.tiers, strict=False)]
        for name, page, _ in reversed(read):
            self._ledger.index(page, name.key)

    def _end_fetch(self, sequence: Sequence, read: PrefixRead, done: Done) -> Fetched | None:
        """Makes the block table of the longest usable prefix, and frees the other pages.

        Returns None if the sequence cannot begin with that and waits again.
        """
        for name, page in read.take(done):
            self._ledger.index(page, name.key)
        (end, behind), prefix = read.usable(), read.prefix
        if not sequence.kv.accepts(prefix, end):
            self._allocator.take_back(sequence)
            sequence.phase = Phase.WAITING
            return None
        pages = read.pages(end, behind)
        kept = {*pages}
        self._allocator.free([page for page in sequence.kv.table.present if page not in kept])
        sequence.kv.begin(BlockTable(pages, behind, prefix.num_dropped))
        sequence.begin_run(min(end * self._block_size, prefix.num_stored) + prefix.num_dropped)
        read.settle(end, behind)
        if done.reading.later is not None:
            self._splits[sequence], sequence.chunk_end = LaterRead(read, done.reading.later), 0
        return Fetched(sequence.choice.attempt_id, sequence.choice.index, read.tokens)

    def follow(self, running: Seq[Sequence]) -> list[Jumped]:
        """Has sequences acquire newly read blocks; begins to read groups into pages that no sequence needs."""
        self._splits = {one: self._splits[one] for one in running if one.chunk_end is not None}
        jumps = []
        for sequence, later in self._splits.items():
            jumps += self._follow(sequence, later, self._num_spare(running))
        return jumps

    def prefetch(self, ahead: BlocksAhead, running: Seq[Sequence]) -> None:
        """Begins to read blocks that are not on the device, in groups, into pages that no running sequence needs.

        The pages drain meanwhile, and are cached then. Blocks that come too late, or not at all, are misses.
        """
        layout, under_way = self._pool.layout, {name.key for order in self._ahead for name in order.names}
        if layout.window is not None or layout.has_open_blocks:
            return
        lacking = [name for name in ahead.names if name.key not in under_way and self._ledger.find(name.key) is None]
        num_spare, size = self._num_spare(running), -(-GROUP_BYTES // layout.payload_bytes)
        for start in range(0, min(len(lacking), num_spare), size):
            if len(self._ahead) == MAX_PREFETCHES:
                return
            names = lacking[start : min(start + size, num_spare)]
            pages = self._allocator.allocate(len(names))
            order = Prefetch(names, pages, ahead.peers, self._ahead.__contains__)
            self._ahead[order] = ahead.attempt_id
            self._begin(order)
            self._allocator.free(pages)

    def forget_ahead(self) -> None:
        """Drops all prefetches: their blocks may be deleted by now."""
        self._ahead.clear()

    def _num_spare(self, running: Iterable[Sequence]) -> int:
        """Counts the pages that running sequences do not need for their known tokens and the next."""
        pages = self._allocator.available
        return pages.num_allocatable - sum(pages.needed_in_all(one.candidate) for one in running)

    def _follow(self, sequence: Sequence, later: LaterRead, num_spare: int) -> list[Jumped]:
        """Has a sequence acquire the blocks that it has reached, and begins a group of at most `num_spare` pages."""
        block_size, find = self._block_size, self._find_begun
        start, is_within = divmod(sequence.num_computed, block_size)
        is_at_end = not is_within and len(sequence.kv.table) == start
        pages = later.run(start, find) if is_at_end else []
        for page in pages:
            self._ledger.acquire(page)
        sequence.kv.table.extend(pages)
        if pages:
            sequence.begin_run((start + len(pages)) * block_size)
        place = start + len(pages)
        if place < later.stop and (group := later.next_group(place, find, num_spare)) is not None:
            self._begin_group(sequence, later, group)
        sequence.chunk_end = later.chunk_stop(place, find) * block_size if place < later.stop else None
        if not pages:
            return []
        tokens, choice = later.acquired(start, place), sequence.choice
        return [Jumped(choice.attempt_id, choice.index, range(start * block_size, place * block_size), tokens)]

    def _begin_group(self, sequence: Sequence, later: LaterRead, group: Read) -> None:
        """Begins to read a group. Its pages drain meanwhile, so that batchers count them as soon free."""
        pages = self._allocator.allocate(len(group.names))
        order = Fetch(group.names, pages, step=group)
        self._groups[order] = sequence, later
        self._begin(order)
        self._allocator.free(pages)
