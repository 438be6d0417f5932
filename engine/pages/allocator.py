"""The allocation of a pool's pages to sequences, and their return."""

from collections.abc import Iterator
from collections.abc import Sequence as Seq
from contextlib import contextmanager

from engine.schedule.batcher import Pages
from engine.sequence import Sequence
from kv_store.device_pool import DevicePool
from kv_store.ledger import OutOfBlocks
from wire.ids import PageId
from wire.layout import Window

MAX_KEPT_FREE = 128
"""The most pages that `reclaim` keeps free: room for 2,048 tokens in blocks of 16."""
PAGES_PER_FREE_PAGE = 64
"""The pages of a pool for each page that is kept free; a pool of fewer keeps none."""


class PageAllocator:
    """Allocates a pool's pages to sequences. Not thread-safe: for the engine's thread."""

    def __init__(self, pool: DevicePool) -> None:
        self.ledger = pool.ledger
        self.layout = pool.layout
        self._pool = pool

    @property
    def available(self) -> Pages:
        num_draining, most_needed = self.ledger.counts().draining, Window(self.layout).most_needed
        return Pages(self.ledger.num_allocatable, num_draining, self.layout.block_size, most_needed)

    def grow(self, sequence: Sequence, num_tokens: int) -> int:
        """Makes room for the next `num_tokens` tokens, or as many as may be open; returns the number.

        Without room returns 0 and changes nothing.
        """
        num_blocks, block_size = len(sequence.kv.table), self.layout.block_size
        num_writable = (num_blocks + self._pool.num_openable) * block_size - sequence.num_stored
        num_tokens = min(num_tokens, num_writable)
        try:
            num_more = max(0, -(-(sequence.num_stored + num_tokens) // block_size) - num_blocks)
            sequence.kv.table.extend(self.allocate(num_more))
        except OutOfBlocks:
            return 0
        return num_tokens

    def extend(self, sequences: Seq[Sequence], num_ahead: int = 0) -> list[PageId] | None:
        """Gives each sequence a page for position `num_stored + num_ahead`, the first of a block.

        Returns these pages, one a sequence. If too few are free, returns None and changes nothing.
        """
        places = [(one.num_stored + num_ahead) // self.layout.block_size for one in sequences]
        lacking = [one for one, place in zip(sequences, places, strict=True) if place == len(one.kv.table)]
        try:
            pages = self.allocate(len(lacking))
        except OutOfBlocks:
            return None
        for sequence, page in zip(lacking, pages, strict=True):
            sequence.kv.table.extend((page,))
        return pages if len(lacking) == len(sequences) else [one.kv.table[-1:][0] for one in sequences]

    def allocate(self, num_pages: int) -> list[PageId]:
        """Allocates pages to be written. Raises OutOfBlocks without room, or if too many are open."""
        if num_pages > self._pool.num_openable:
            raise OutOfBlocks(f"{num_pages} open blocks wanted, {self._pool.num_openable} free")
        pages = self.ledger.allocate(num_pages)
        self._pool.open(pages)
        return pages

    def reclaim(self) -> None:
        """Evicts cached pages until a few of the pool's are free, so that a prompt to come need not wait for that."""
        self.ledger.reclaim(min(MAX_KEPT_FREE, self.ledger.num_pages // PAGES_PER_FREE_PAGE))

    def drop(self, sequence: Sequence, places: Seq[int]) -> None:
        """Gives some full pages of a sequence back."""
        self.free(sequence.kv.table.drop(places, self.layout.block_size))

    def take_back(self, sequence: Sequence) -> None:
        """Frees all pages of a sequence, which then has no KV; pages with a running transfer drain first."""
        self.free(sequence.kv.table.present)
        self.free(sequence.kv.reserved)
        sequence.kv.reserved = []
        sequence.leave()

    @contextmanager
    def borrowed_page(self) -> Iterator[PageId | None]:
        """Lends a page without an owner; None if none is free."""
        pages = self.allocate(min(1, self.ledger.num_allocatable, self._pool.num_openable))
        yield pages[0] if pages else None
        self.free(pages)

    def free(self, pages: Seq[PageId]) -> None:
        """Frees pages in eviction order: a prefix's end first, or, with windows, its start."""
        self._pool.close(pages)
        for page in reversed(pages) if self.layout.window is None else pages:
            self.ledger.free(page)
