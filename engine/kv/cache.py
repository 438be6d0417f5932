"""The pages of an engine's sequences: the fetch of known blocks, and the writing of new ones.

    PageAllocator    pages that sequences write
    SplitPrefixes    pages that are filled while their sequences compute
    KVCache          prefix lookups, fetches from the store, write-through

Only these three change the pool's ledger and begin transfers, on the engine's thread.
"""

from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import torch

from engine.events import Fetched
from engine.kv.allocator import PageAllocator
from engine.kv.dropping import gather_tokens
from engine.kv.lookup import Lookup
from engine.kv.prefetch import Prefetch
from engine.kv.retention import BlockTable
from engine.kv.split_prefixes import SplitPrefixes
from engine.request import HandOff
from engine.schedule.batcher import Phase
from engine.sequence import Sequence
from kv_store.device_pool import DevicePool
from kv_store.ledger import OutOfBlocks
from kv_store.transfers import Done, Keep, Purge, Transfer, Transfers, WriteThrough
from wire.block_names import BlockName
from wire.ids import BlockKey, PageId
from wire.tier import Tier


@dataclass(frozen=True)
class HandOffStored:
    """The store holds `num_held` blocks of a sequence to hand off."""

    sequence: Sequence
    num_held: int


class KVCache:
    """Looks up prefixes, fetches missing blocks, and writes filled ones through."""

    def __init__(self, pool: DevicePool, transfers: Transfers) -> None:
        self.allocator = PageAllocator(pool)
        self.split_prefixes = SplitPrefixes(self.allocator, self._begin)
        self._pool = pool
        self._ledger = pool.ledger
        self._transfers = transfers
        self._block_size = pool.layout.block_size
        self._waiting: dict[Transfer, tuple[Sequence, Lookup | None]] = {}

    @property
    def num_in_flight(self) -> int:
        return self._transfers.pending

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
            self.allocator.free(lookup.hits)
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
        self._waiting[fetch] = sequence, lookup
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

    def cache_filled(self, sequence_to_start: Mapping[Sequence, int]) -> None:
        """Indexes the blocks that sequences have filled since they had `start` tokens with KV, and writes them through.

        One transfer takes the blocks of all sequences to the store. Blocks that are behind the window now are left;
        blocks of a prompt that does not stay whole go to the store after the kept ones.
        """
        filled: list[tuple[BlockName, PageId]] = []
        for sequence, start in sequence_to_start.items():
            blocks = sequence.kv.filled(sequence.tokens, start, sequence.num_computed)
            for name, page in blocks:
                self._ledger.index(page, name.key)
            self._pool.close([page for _, page in blocks])
            for _, page in blocks if sequence.kv.reserved else ():
                self._ledger.acquire(page)
            (sequence.kv.delayed if sequence.kv.reserved else filled).extend(blocks)
        self._write_through(filled)
        for sequence in sequence_to_start:
            kv = sequence.kv
            self.allocator.free(kv.table.leave_behind(kv.window.behind(sequence.num_computed)))

    def keep_tokens(self, sequence: Sequence, chosen: torch.Tensor) -> None:
        """Moves a sequence to its reserved pages, with copies of chosen tokens, as in `gather_tokens`.

        Indexes the pages that have names, and writes them through unless a hand-off will.
        """
        kv, num_dropped = sequence.kv, sequence.num_computed - chosen.shape[-1]
        table, pages = (torch.tensor(one, device=chosen.device) for one in (kv.table[:], kv.reserved))
        gather_tokens(self._pool.kv, table, chosen, pages)
        self.allocator.free(kv.table.present)
        names = kv.names(sequence.tokens, sequence.num_computed, num_dropped)
        blocks, kept = [*zip(names, kv.reserved, strict=False)], BlockTable(kv.reserved, num_dropped=num_dropped)
        kv.reserved = []
        kv.begin(kept)
        for name, page in blocks:
            self._ledger.index(page, name.key)
        if not isinstance(sequence.request, HandOff):
            self._write_through(blocks)
            self._write_delayed(sequence)

    def hand_off(self, sequence: Sequence) -> None:
        """Writes all blocks of a prompt that the next token needs, tail included; ends in HandOffStored.

        The attempt holds them. The other blocks of a prompt that does not stay whole follow, and are not held.
        """
        kv, num_prompt = sequence.kv, sequence.request.num_prompt
        names = kv.names(sequence.tokens, num_prompt, kv.table.num_dropped)
        places = kv.window.needed(len(names), num_prompt)
        pages = [kv.table[place : place + 1][0] for place in places]
        write = WriteThrough([names[place] for place in places], pages, sequence.request.attempt_id)
        self._waiting[write] = sequence, None
        self._begin(write)
        self._write_delayed(sequence)

    def set_aside(self, sequence: Sequence) -> None:
        """Takes a sequence's pages away; its computed blocks can be found again, its tail in the store."""
        kv, num_computed = sequence.kv, sequence.num_computed
        if num_computed == sequence.num_known - 1:
            names = kv.names(sequence.tokens, num_computed, kv.table.num_dropped)
            self._write_through([(name, kv.table[at : at + 1][0]) for at, name in enumerate(names) if name.is_tail])
        self.free(sequence)

    def purge(self, sequence: Sequence) -> None:
        """Deletes the blocks of a sequence: from the index, every tier, and the nodes that it may have read from."""
        kv, num_computed = sequence.kv, sequence.num_computed
        kept = kv.names(sequence.tokens, num_computed, kv.table.num_dropped) if kv.table.num_dropped else []
        names = [*kv.names(sequence.tokens, num_computed), *kept]
        found = (self._ledger.find(name.key) for name in names)
        for page in {*kv.table.present, *(page for page in found if page is not None)}:
            self._ledger.unindex(page)
        self.allocator.free([page for _, page in kv.delayed])
        kv.delayed = []
        if names:
            self._begin(Purge(names, peers=sequence.request.peers))

    def unindex(self, keys: Seq[BlockKey]) -> int:
        """Unindexes the pages of some keys, or else all; counts them."""
        found = [*map(self._ledger.find, keys)] if keys else self._ledger.pages
        pages = [page for page in found if page is not None and self._ledger.key_of(page) is not None]
        for page in pages:
            self._ledger.unindex(page)
        return len(pages)

    def pass_on_hint(self, sequences: Seq[Sequence]) -> None:
        """Passes on the hint of a request that is over, with the blocks of the choices that began."""
        names = [name for one in sequences if one.output_ids for name in one.kv.lasting_names]
        if names and (hint := sequences[0].request.hint) is not None:
            self._begin(Keep(names, hint=hint))

    def free(self, sequence: Sequence) -> None:
        """Gives a sequence's pages back; pages with a transfer under way drain first."""
        self._write_delayed(sequence)
        self.allocator.free(sequence.kv.table.present)
        self.allocator.free(sequence.kv.reserved)
        sequence.kv.reserved = []
        sequence.leave()

    def poll(self) -> list[Fetched | HandOffStored]:
        """Collects the transfers with a sequence waiting that have ended since the last call."""
        ended: list[Fetched | HandOffStored] = []
        for done in self._transfers.poll():
            self.split_prefixes.index_group(done)
            for page in done.transfer.pages:
                self._ledger.end_transfer(page)
            sequence, lookup = self._waiting.pop(done.transfer, (None, None))
            if sequence is not None and lookup is None:
                ended.append(HandOffStored(sequence, done.num_resident))
            elif sequence is not None and lookup is not None and sequence.phase is Phase.FETCHING:
                fetched = self._fetched(sequence, lookup, done)
                ended += [] if fetched is None else [fetched]
        return ended

    def _fetched(self, sequence: Sequence, lookup: Lookup, done: Done) -> Fetched | None:
        """Makes the block table of the longest usable prefix, and gives the other pages back.

        None, and the sequence waits again, if it cannot begin with that.
        """
        for name, page in lookup.take(done):
            self._ledger.index(page, name.key)
        (end, behind), prefix = lookup.usable(), lookup.prefix
        if not sequence.kv.accepts(prefix, end):
            self.free(sequence)
            sequence.phase = Phase.WAITING
            return None
        pages = lookup.pages(end, behind)
        kept = {*pages}
        self.allocator.free([page for page in sequence.kv.table.present if page not in kept])
        sequence.kv.begin(BlockTable(pages, behind, prefix.num_dropped))
        sequence.begin_run(min(end * self._block_size, prefix.num_stored) + prefix.num_dropped)
        lookup.settle(end, behind)
        later = done.reading.later
        sequence.prefetch = None if later is None else Prefetch(lookup, later)
        return Fetched(sequence.choice.attempt_id, sequence.choice.index, lookup.tokens)

    def _write_delayed(self, sequence: Sequence) -> None:
        """Writes the delayed blocks of a sequence's prompt through."""
        blocks, sequence.kv.delayed = sequence.kv.delayed, []
        self._write_through(blocks)
        self.allocator.free([page for _, page in blocks])

    def _write_through(self, blocks: Seq[tuple[BlockName, PageId]]) -> None:
        """Copies blocks to the store, where there are any."""
        if blocks:
            self._begin(WriteThrough([name for name, _ in blocks], [page for _, page in blocks]))

    def _begin(self, transfer: Transfer) -> None:
        for page in transfer.pages:
            self._ledger.begin_transfer(page)
        self._transfers.begin(transfer)
