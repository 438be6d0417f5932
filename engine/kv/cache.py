"""The pages of an engine's sequences: their allocation, the fetch of known blocks, the writing of new ones.

No other module of the engine touches the pool's ledger and the transfers. All of it runs on the engine's thread.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from collections.abc import Sequence as Seq
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch

from engine.events import Fetched, Jumped, PromptTokens
from engine.kv.dropping import gather_tokens
from engine.kv.lookup import Lookup
from engine.kv.prefetch import Prefetch
from engine.kv.retention import BlockTable
from engine.request import HandOff
from engine.schedule.batcher import Pages, Phase
from engine.sequence import Sequence
from kv_store.block_store import Back
from kv_store.device_pool import DevicePool
from kv_store.ledger import OutOfBlocks
from kv_store.transfers import BackFetch, Done, Fetch, Purge, Retain, Transfer, Transfers, WriteThrough
from wire.ids import BlockKey, PageId
from wire.layout import Window
from wire.names import BlockName
from wire.tier import Tier


@dataclass(frozen=True)
class HandOffStored:
    """The store holds `num_held` blocks of a sequence to hand off."""

    sequence: Sequence
    num_held: int


class KVCache:
    """Pages of sequences over one pool, with the store behind it."""

    def __init__(self, pool: DevicePool, transfers: Transfers) -> None:
        self.pool = pool
        self._ledger = pool.ledger
        self._transfers = transfers
        self._layout = pool.layout
        self._waiting: dict[Transfer, tuple[Sequence, Lookup | None]] = {}
        self._reading: dict[Transfer, tuple[Sequence, Prefetch]] = {}

    @property
    def pages(self) -> Pages:
        num_draining, most_needed = self._ledger.counts().draining, Window(self._layout).most_needed
        return Pages(self._ledger.num_allocatable, num_draining, self._layout.block_size, most_needed)

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
        taken = self._take(Lookup(prefix, names, found, sequence.kv.window))
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
            self._free(lookup.hits)
            return self._take(lookup.cut()) if lookup.starts else None

    def _fetch(self, sequence: Sequence, lookup: Lookup, to_fill: list[PageId], siblings: Iterable[Sequence]) -> None:
        """Begins a fetch; a tail is copied from a sibling's page instead, if all else is on the device."""
        if len(lookup.missing) == 1 and lookup.names[-1].is_tail:
            [place] = lookup.missing
            if self._copy_tail(sequence, place, to_fill[0], siblings):
                lookup.found[place], lookup.missing, to_fill = to_fill[0], [], []
        may_jump = sequence.kv.is_plain and not sequence.wants_scores  # all rows of a scored prompt run
        order = lookup.fetch_front if may_jump else lookup.fetch
        fetch = order(to_fill, sequence.request.peers)
        self._waiting[fetch] = sequence, lookup
        self._begin(fetch)

    def _copy_tail(self, sequence: Sequence, place: int, page: PageId, siblings: Iterable[Sequence]) -> bool:
        """Copies the tail of a prompt from a sibling that has computed the same tokens; False if there is none."""
        for one in siblings:
            is_same = sequence.num_known - 1 == sequence.request.num_prompt <= one.num_computed
            if is_same and place not in one.kv.table.behind:
                [source] = one.kv.table[place : place + 1]
                self.pool.page_bytes(page).copy_(self.pool.page_bytes(source))
                return True
        return False

    def grow(self, sequence: Sequence, num_tokens: int) -> int:
        """Makes room for the next `num_tokens` tokens, or as many as may be open; returns their number.

        Returns 0, and nothing changed, if there is none.
        """
        num_blocks, block_size = len(sequence.kv.table), self._layout.block_size
        num_writable = (num_blocks + self.pool.num_openable) * block_size - sequence.num_stored
        num_tokens = min(num_tokens, num_writable)
        try:
            num_more = max(0, -(-(sequence.num_stored + num_tokens) // block_size) - num_blocks)
            sequence.kv.table.extend(self._allocate(num_more))
        except OutOfBlocks:
            return 0
        return num_tokens

    def extend(self, sequences: Seq[Sequence], num_ahead: int = 0) -> list[PageId] | None:
        """Makes room for the token `num_ahead` tokens after the next one of each sequence, the first of its page.

        Returns these pages, of which a sequence may have its own already; None, and nothing changed, without room.
        """
        places = [(one.num_stored + num_ahead) // self._layout.block_size for one in sequences]
        lacking = [one for one, place in zip(sequences, places, strict=True) if place == len(one.kv.table)]
        try:
            pages = self._allocate(len(lacking))
        except OutOfBlocks:
            return None
        for sequence, page in zip(lacking, pages, strict=True):
            sequence.kv.table.extend((page,))
        return [one.kv.table[-1:][0] for one in sequences]

    def _allocate(self, num_pages: int) -> list[PageId]:
        """Allocates pages to be written. Raises OutOfBlocks without room, or if too many are open."""
        if num_pages > self.pool.num_openable:
            raise OutOfBlocks(f"{num_pages} open blocks wanted, {self.pool.num_openable} free")
        pages = self._ledger.allocate(num_pages)
        self.pool.open(pages)
        return pages

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
            self.pool.close([page for _, page in blocks])
            for _, page in blocks if sequence.kv.reserved else ():
                self._ledger.acquire(page)
            (sequence.kv.delayed if sequence.kv.reserved else filled).extend(blocks)
        self._write_through(filled)
        for sequence in sequence_to_start:
            kv = sequence.kv
            self._free(kv.table.leave_behind(kv.window.behind(sequence.num_computed)))

    def keep_tokens(self, sequence: Sequence, chosen: torch.Tensor) -> None:
        """Moves a sequence to its reserved pages, with copies of chosen tokens, as in `gather_tokens`.

        Indexes the pages that have names, and writes them through unless a hand-off will.
        """
        kv, num_dropped = sequence.kv, sequence.num_computed - chosen.shape[-1]
        table, pages = (torch.tensor(one, device=chosen.device) for one in (kv.table[:], kv.reserved))
        gather_tokens(self.pool.kv, table, chosen, pages)
        self._free(kv.table.present)
        names = kv.names(sequence.tokens, sequence.num_computed, num_dropped)
        blocks, kept = [*zip(names, kv.reserved, strict=False)], BlockTable(kv.reserved, num_dropped=num_dropped)
        kv.reserved = []
        kv.begin(kept)
        for name, page in blocks:
            self._ledger.index(page, name.key)
        if not isinstance(sequence.request, HandOff):
            self._write_through(blocks)
            self._write_delayed(sequence)

    def drop_pages(self, sequence: Sequence, places: Seq[int]) -> None:
        """Gives some full pages of a sequence back."""
        self._free(sequence.kv.table.drop(places, self._layout.block_size))

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
        self._free([page for _, page in kv.delayed])
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

    def retain(self, sequences: Seq[Sequence]) -> None:
        """Passes on the hint of a request that is over, with the blocks of the choices that began."""
        names = [name for one in sequences if one.output_ids for name in one.kv.lasting_names]
        if names and (hint := sequences[0].request.hint) is not None:
            self._begin(Retain(names, hint=hint))

    @contextmanager
    def borrowed_page(self) -> Iterator[PageId | None]:
        """Lends a page without an owner; None if none is free."""
        pages = self._allocate(min(1, self._ledger.num_allocatable, self.pool.num_openable))
        yield pages[0] if pages else None
        self._free(pages)

    def free(self, sequence: Sequence) -> None:
        """Gives a sequence's pages back; pages with a transfer under way drain first."""
        self._write_delayed(sequence)
        self._free(sequence.kv.table.present)
        self._free(sequence.kv.reserved)
        sequence.kv.reserved = []
        sequence.leave()

    def poll(self) -> list[Fetched | HandOffStored]:
        """Collects the transfers with a sequence waiting that have ended since the last call."""
        ended: list[Fetched | HandOffStored] = []
        for done in self._transfers.poll():
            if done.transfer in self._reading:
                self._index_group(done)
            for page in done.transfer.pages:
                self._ledger.end_transfer(page)
            sequence, lookup = self._waiting.pop(done.transfer, (None, None))
            if sequence is not None and lookup is None:
                ended.append(HandOffStored(sequence, done.num_resident))
            elif sequence is not None and lookup is not None and sequence.phase is Phase.FETCHING:
                fetched = self._fetched(sequence, lookup, done)
                ended += [] if fetched is None else [fetched]
        return ended

    def follow(self, sequence: Sequence, num_spare: int) -> Jumped | None:
        """Lets a sequence acquire the blocks at its place that its prefetch has read, and begins the next group.

        num_spare: pages that no running sequence lacks. The sequence ends its prefetch behind the last block of it.
        """
        prefetch, block_size = sequence.prefetch, self._layout.block_size
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
        return self._jumped(sequence, prefetch, start, place) if pages else None

    def _read_group(self, sequence: Sequence, prefetch: Prefetch, group: Back) -> None:
        """Begins to fill pages that drain meanwhile: batchers count on them, and no sequence has to give them back."""
        pages = self._allocate(len(group.names))
        order = BackFetch(group.names, pages, back=group)
        self._reading[order] = sequence, prefetch
        self._begin(order)
        self._free(pages)

    def _index_group(self, done: Done) -> None:
        """Indexes the right pages of a group if its sequence still computes; the others come free."""
        sequence, prefetch = self._reading.pop(done.transfer)
        pages = done.transfer.pages
        prefetch.note_read(len(pages), done.tiers)
        if sequence.prefetch is prefetch:
            for name, page, _ in reversed([*zip(done.transfer.names, pages, done.tiers, strict=False)]):
                self._ledger.index(page, name.key)

    def _jumped(self, sequence: Sequence, prefetch: Prefetch, start: int, stop: int) -> Jumped:
        block_size, found = self._layout.block_size, Counter[str]()
        for place in range(start, stop):
            covered = sequence.request.num_prompt - place * block_size
            found[prefetch.tier_of(place)] += max(0, min(covered, block_size))
        tokens = range(start * block_size, stop * block_size)
        return Jumped(sequence.choice.attempt_id, sequence.choice.index, tokens, +found, block_size)

    def _fetched(self, sequence: Sequence, lookup: Lookup, done: Done) -> Fetched | None:
        """Makes the block table of the longest usable prefix, and gives the other pages back.

        None, and the sequence waits again, if it cannot begin with that.
        """
        found, fetch = lookup.found, done.transfer
        assert isinstance(fetch, Fetch)
        tiers = [Tier.DEVICE] * len(found)
        places = fetch.places(done.first, len(fetch.names))
        for at, page, tier in zip(places, fetch.pages, done.tiers, strict=False):
            found[lookup.missing[at]], tiers[lookup.missing[at]] = page, tier
            if not fetch.names[at].is_tail:
                self._ledger.index(page, fetch.names[at].key)
        (end, behind), prefix = lookup.usable(), lookup.prefix
        if not sequence.kv.accepts(prefix, end):
            self.free(sequence)
            sequence.phase = Phase.WAITING
            return None
        pages = lookup.pages(end, behind)
        kept = {*pages}
        self._free([page for page in sequence.kv.table.present if page not in kept])
        sequence.kv.begin(BlockTable(pages, behind, prefix.num_dropped))
        sequence.begin_run(min(end * self._layout.block_size, prefix.num_stored) + prefix.num_dropped)
        tiers[behind.start : behind.stop] = tiers[behind.stop : behind.stop + 1] * len(behind)
        sequence.prefetch = None if done.back is None else Prefetch(lookup.names, done.back)
        tokens = self._prompt_tokens(sequence, tiers[:end])
        if not prefix.num_dropped:
            tokens = replace(tokens, misses=lookup.misses(end, sequence.request.num_prompt, done.misses))
        return Fetched(sequence.choice.attempt_id, sequence.choice.index, tokens)

    def _prompt_tokens(self, sequence: Sequence, tiers: Seq[Tier]) -> PromptTokens:
        """Counts prompt tokens by the tier of their block, up to num_computed or the prompt's end.

        Dropped tokens count with the first kept block.
        """
        covered, num_dropped = min(sequence.num_computed, sequence.request.num_prompt), sequence.kv.table.num_dropped
        found, num_stored = Counter[str](dict.fromkeys(tiers[:1], num_dropped)), covered - num_dropped
        for index, tier in enumerate(tiers[: -(-num_stored // self._layout.block_size)]):
            found[tier] += min(num_stored - index * self._layout.block_size, self._layout.block_size)
        return PromptTokens(found, sequence.request.num_prompt - covered)

    def _write_delayed(self, sequence: Sequence) -> None:
        """Writes the delayed blocks of a sequence's prompt through."""
        blocks, sequence.kv.delayed = sequence.kv.delayed, []
        self._write_through(blocks)
        self._free([page for _, page in blocks])

    def _write_through(self, blocks: Seq[tuple[BlockName, PageId]]) -> None:
        """Copies blocks to the store, where there are any."""
        if blocks:
            self._begin(WriteThrough([name for name, _ in blocks], [page for _, page in blocks]))

    def _begin(self, transfer: Transfer) -> None:
        for page in transfer.pages:
            self._ledger.begin_transfer(page)
        self._transfers.begin(transfer)

    def _free(self, pages: Seq[PageId]) -> None:
        """Frees pages in eviction order: a prefix's end first, or its start where rows have windows."""
        self.pool.close(pages)
        for page in reversed(pages) if self._layout.window is None else pages:
            self._ledger.free(page)
