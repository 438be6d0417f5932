"""Split prefixes: the back is read from the store while the front is computed; sequences jump over read blocks."""

from collections.abc import Callable

from engine.events import Jumped
from engine.kv.allocator import PageAllocator
from engine.kv.prefetch import Prefetch
from engine.sequence import Sequence
from kv_store.prefix.plan import Read
from kv_store.transfers import Done, ReadGroup, Transfer


class SplitPrefixes:
    """Groups of blocks under way, and the jumps of sequences to read ones. For the engine's thread.

    begin: begins a transfer, as the cache does.
    """

    def __init__(self, allocator: PageAllocator, begin: Callable[[Transfer], None]) -> None:
        self._allocator = allocator
        self._ledger = allocator.ledger
        self._block_size = allocator.layout.block_size
        self._begin = begin
        self._reading: dict[Transfer, tuple[Sequence, Prefetch]] = {}

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

    def index_group(self, done: Done) -> None:
        """Indexes the right pages of a group if its sequence still computes; the others come free.

        Does nothing for another transfer than a group's.
        """
        reading = self._reading.pop(done.transfer, None)
        if reading is None:
            return
        (sequence, prefetch), pages = reading, done.transfer.pages
        prefetch.note_read(len(pages), done.reading.tiers)
        if sequence.prefetch is prefetch:
            for name, page, _ in reversed([*zip(done.transfer.names, pages, done.reading.tiers, strict=False)]):
                self._ledger.index(page, name.key)

    def _read_group(self, sequence: Sequence, prefetch: Prefetch, group: Read) -> None:
        """Begins to fill pages that drain meanwhile: batchers count on them, and no sequence has to give them back."""
        pages = self._allocator.allocate(len(group.names))
        order = ReadGroup(group.names, pages, step=group)
        self._reading[order] = sequence, prefetch
        self._begin(order)
        self._allocator.free(pages)
