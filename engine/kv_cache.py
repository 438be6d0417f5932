"""The pages of an engine's sequences: their allocation, the fetch of known blocks, the publishing of new ones.

No other module of the engine touches the pool's ledger and the transfers. All of it runs on the engine's thread.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from collections.abc import Sequence as Seq
from contextlib import contextmanager
from dataclasses import dataclass

from engine.events import Fetched, TierTokens
from engine.schedule.batcher import Pages, Phase
from engine.sequence import BlockTable, Sequence
from kv_store.device_pool import DevicePool
from kv_store.ledger import OutOfBlocks
from kv_store.transfers import Fetch, Publish, Transfer, Transfers, Withdraw
from wire.ids import PageId
from wire.keys import BlockName
from wire.tier import Tier


@dataclass(frozen=True)
class PublishedFor:
    """The store holds `num_held` blocks of a sequence to hand off."""

    sequence: Sequence
    num_held: int


class KVCache:
    """Pages of sequences over one pool, with the store behind it."""

    def __init__(self, pool: DevicePool, transfers: Transfers) -> None:
        self.pool = pool
        self._ledger = pool.ledger
        self._transfers = transfers
        self._block_size = pool.layout.block_size
        self._waiting: dict[Transfer, Sequence] = {}

    @property
    def pages(self) -> Pages:
        return Pages(self._ledger.num_allocatable, self._ledger.counts().draining, self._block_size)

    @property
    def num_in_flight(self) -> int:
        return self._transfers.pending

    def admit(self, sequence: Sequence, siblings: Iterable[Sequence] = ()) -> bool:
        """Gives a waiting sequence the pages of its known prefix and begins the fetch of the missing blocks.

        False, and nothing changed, if too few pages are free. Covers at most known - 1 tokens: the last is always run.
        The tail of a prompt is copied from a sibling's page, if all before it is on the device.
        """
        names = [] if sequence.request.computes_all else sequence.cover(sequence.num_known - 1)
        hits = self._ledger.find_longest([name.key for name in names if not name.is_tail])
        for page in hits:
            self._ledger.acquire(page)
        try:
            to_fill = self._ledger.allocate(len(names) - len(hits))
        except OutOfBlocks:
            self._free(hits)
            return False
        sequence.pages = BlockTable([*hits, *to_fill])
        sequence.phase = Phase.FETCHING
        if len(to_fill) == 1 and names[-1].is_tail and self._copy_tail(sequence, siblings):
            names, to_fill = names[: len(hits)], []
        self._begin(Fetch(names[len(hits) :], to_fill, sequence.request.sources), sequence)
        return True

    def _copy_tail(self, sequence: Sequence, siblings: Iterable[Sequence]) -> bool:
        """Copies the last page from a sibling that has computed the same tokens; False if there is none."""
        last = len(sequence.pages) - 1
        for one in siblings:
            if sequence.num_known - 1 == sequence.num_prompt <= one.num_computed:
                [page], [source] = sequence.pages[last:], one.pages[last : last + 1]
                self.pool.page_bytes(page).copy_(self.pool.page_bytes(source))
                return True
        return False

    def grow(self, sequence: Sequence, num_tokens: int) -> bool:
        """Makes room for the next `num_tokens` tokens; False, and nothing changed, if there is none."""
        num_blocks = -(-(sequence.num_computed + num_tokens) // self._block_size)
        try:
            sequence.pages.extend(self._ledger.allocate(max(0, num_blocks - len(sequence.pages))))
        except OutOfBlocks:
            return False
        return True

    def extend(self, sequences: Seq[Sequence]) -> list[PageId] | None:
        """Gives a further page to each of these sequences and returns them; None, and nothing changed, without room."""
        try:
            pages = self._ledger.allocate(len(sequences))
        except OutOfBlocks:
            return None
        for sequence, page in zip(sequences, pages, strict=True):
            sequence.pages.extend((page,))
        return pages

    def publish_filled(self, sequence_to_start: Mapping[Sequence, int]) -> None:
        """Publishes the blocks that sequences have filled since they had `start` tokens with KV.

        On the device, and through to the store, all in one transfer.
        """
        filled = [one for sequence, start in sequence_to_start.items() for one in sequence.full_blocks(start)]
        for name, page in filled:
            self._ledger.publish(page, name.key)
        self._publish([name for name, _ in filled], [page for _, page in filled], None)

    def hand_off(self, sequence: Sequence) -> None:
        """Publishes all blocks of a sequence's prompt, tail included, under a hold; PublishedFor tells the end."""
        names = sequence.cover(sequence.num_prompt)
        self._publish(names, sequence.pages[: len(names)], sequence)

    def set_aside(self, sequence: Sequence) -> None:
        """Takes a sequence's pages away; its computed blocks can be found again, its tail in the store."""
        tail = sequence.tail(sequence.num_computed)
        if tail is not None and sequence.num_computed == sequence.num_known - 1:
            index = sequence.num_computed // self._block_size
            self._publish([tail], sequence.pages[index : index + 1], None)
        self.free(sequence)

    def withdraw(self, sequence: Sequence) -> None:
        """Makes the blocks of a sequence unfindable: here, in the store, and on nodes that it may have read from."""
        names = sequence.cover(sequence.num_computed)
        for page in sequence.pages[:]:
            self._ledger.withdraw(page)
        if names:
            self._begin(Withdraw(names, sources=sequence.request.sources), None)

    @contextmanager
    def borrowed_page(self) -> Iterator[PageId | None]:
        """Lends a page without an owner; None if none is free."""
        pages = self._ledger.allocate(min(1, self._ledger.num_allocatable))
        yield pages[0] if pages else None
        self._free(pages)

    def free(self, sequence: Sequence) -> None:
        """Gives a sequence's pages back; pages with a transfer under way drain first."""
        self._free(sequence.pages[:])
        sequence.drop_pages()

    def poll(self) -> list[Fetched | PublishedFor]:
        """Collects the transfers with a sequence waiting that have ended since the last call."""
        ended: list[Fetched | PublishedFor] = []
        for done in self._transfers.poll():
            for page in done.transfer.pages:
                self._ledger.end_transfer(page)
            sequence = self._waiting.pop(done.transfer, None)
            if sequence is not None and isinstance(done.transfer, Publish):
                ended.append(PublishedFor(sequence, done.num_resident))
            elif sequence is not None and sequence.phase is Phase.FETCHING:
                ended.append(self._fetched(sequence, done.transfer.names, done.tiers))
        return ended

    def _fetched(self, sequence: Sequence, names: Seq[BlockName], tiers: Seq[Tier]) -> Fetched:
        num_device = len(sequence.pages) - len(names)
        num_hits = num_device + len(tiers)
        self._free(sequence.pages[num_hits:])
        sequence.pages = BlockTable(sequence.pages[:num_hits])
        sequence.begin_run(min(num_hits * self._block_size, sequence.num_known - 1))
        for name, page in zip(names, sequence.pages[num_device:], strict=False):
            if not name.is_tail:
                self._ledger.publish(page, name.key)
        tokens = self._prompt_tokens(sequence, [Tier.DEVICE] * num_device + list(tiers))
        return Fetched(sequence.choice.request_id, sequence.choice.index, tokens)

    def _prompt_tokens(self, sequence: Sequence, tiers: Seq[Tier]) -> TierTokens:
        """Counts prompt tokens by the tier of their block, up to num_computed or the prompt's end."""
        covered = min(sequence.num_computed, sequence.num_prompt)
        found = Counter[str]()
        for index, tier in enumerate(tiers[: -(-covered // self._block_size)]):
            found[tier] += min(covered - index * self._block_size, self._block_size)
        return TierTokens(found, sequence.num_prompt - covered)

    def _publish(self, names: list[BlockName], pages: list[PageId], hand_off: Sequence | None) -> None:
        hold = None if hand_off is None else hand_off.request.request_id
        if names:
            self._begin(Publish(names, pages, hold), hand_off)

    def _begin(self, transfer: Transfer, waiting: Sequence | None) -> None:
        for page in transfer.pages:
            self._ledger.begin_transfer(page)
        if waiting is not None:
            self._waiting[transfer] = waiting
        self._transfers.begin(transfer)

    def _free(self, pages: Seq[PageId]) -> None:
        """Frees the last page first, so that a prefix's end is evicted before its start."""
        for page in reversed(pages):
            self._ledger.free(page)
