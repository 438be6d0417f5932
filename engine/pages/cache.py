"""The writing of filled blocks to the store, and the ends of all transfers. Three classes own an engine's pages:

    PageAllocator    pages that sequences write
    PrefixReads      prefix lookups, fetches from the store, split prefixes, blocks read ahead of a request
    KVCache          write-through, hand-offs, purges, hints, ends of transfers

Only these three change the pool's ledger and begin transfers, on the engine's thread.
"""

from collections.abc import Callable, Collection, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from functools import partial

import torch

from engine.events import Fetched
from engine.kv.dropping import gather_tokens
from engine.kv.retention import BlockTable
from engine.pages.allocator import PageAllocator
from engine.pages.prefix_reads import PrefixReads
from engine.request import HandOff
from engine.sequence import Sequence
from kv_store.device_pool import DevicePool
from kv_store.transfers import Keep, Purge, Transfer, Transfers, WriteThrough
from wire.block_names import BlockName
from wire.ids import BlockKey, PageId


@dataclass(frozen=True)
class HandOffStored:
    """The store holds `num_held` blocks of a handed-off sequence."""

    sequence: Sequence
    num_held: int


class KVCache:
    """The writer of filled blocks to the store; also collects the ends of transfers."""

    def __init__(self, pool: DevicePool, transfers: Transfers) -> None:
        self.allocator = PageAllocator(pool)
        self.prefixes = PrefixReads(pool, self.allocator, self._begin)
        self._pool = pool
        self._ledger = pool.ledger
        self._transfers = transfers
        self._handing_off: dict[Transfer, Sequence] = {}

    @property
    def num_in_flight(self) -> int:
        return self._transfers.pending

    def cache_filled(self, sequence_to_start: Mapping[Sequence, int], handing_off: Collection[Sequence] = ()) -> None:
        """Indexes the blocks that sequences have filled since they had `start` tokens with KV, and writes them through.

        One transfer writes the blocks of all sequences. Skips blocks that are behind the window by now; if KV of a
        prompt is to be dropped, its blocks follow the kept blocks. handing_off: sequences whose blocks `hand_off` will
        write.
        """
        filled: list[tuple[BlockName, PageId]] = []
        told: list[Callable[[], None]] = []
        for sequence, start in sequence_to_start.items():
            blocks = sequence.kv.filled(sequence.tokens, start, sequence.num_computed)
            for name, page in blocks:
                self._ledger.index(page, name.key)
            self._pool.close([page for _, page in blocks])
            for _, page in blocks if sequence.kv.reserved else ():
                self._ledger.acquire(page)
            if sequence not in handing_off:
                (sequence.kv.delayed if sequence.kv.reserved else filled).extend(blocks)
            told += self._on_stored(sequence)
        self._write_through(filled, told)
        for sequence in sequence_to_start:
            kv = sequence.kv
            self.allocator.free(kv.table.leave_behind(kv.window.behind(sequence.num_computed)))

    def keep_tokens(self, sequence: Sequence, chosen: torch.Tensor) -> None:
        """Copies chosen tokens of a sequence to its reserved pages, by `gather_tokens`, and moves it there.

        Indexes the named pages, and writes them through unless a hand-off will.
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

        The attempt holds these blocks. If KV of the prompt was dropped, its own blocks follow without a hold.
        """
        kv, num_prompt = sequence.kv, sequence.request.num_prompt
        names = kv.names(sequence.tokens, num_prompt, kv.table.num_dropped)
        places = kv.window.needed(len(names), num_prompt)
        pages = [kv.table[place : place + 1][0] for place in places]
        write = WriteThrough([names[place] for place in places], pages, sequence.request.attempt_id)
        self._handing_off[write] = sequence
        self._begin(write)
        self._write_delayed(sequence)

    def set_aside(self, sequence: Sequence) -> None:
        """Takes a sequence's pages away; its computed blocks stay findable, its tail in the store."""
        kv, num_computed = sequence.kv, sequence.num_computed
        if num_computed == sequence.num_known - 1:
            names = kv.names(sequence.tokens, num_computed, kv.table.num_dropped)
            self._write_through([(name, kv.table[at : at + 1][0]) for at, name in enumerate(names) if name.is_tail])
        self.free(sequence)

    def purge(self, sequence: Sequence) -> None:
        """Deletes the blocks of a sequence from the index, every tier, and the nodes that it may have read from."""
        kv, num_computed = sequence.kv, sequence.num_computed
        kept = kv.names(sequence.tokens, num_computed, kv.table.num_dropped) if kv.table.num_dropped else []
        names = [*kv.names(sequence.tokens, num_computed), *kept]
        found = (self._ledger.find(name.key) for name in names)
        for page in {*kv.table.present, *(page for page in found if page is not None)}:
            self._ledger.unindex(page)
        self.allocator.free([page for _, page in kv.delayed])
        kv.delayed = []
        self.prefixes.forget_ahead()
        if names:
            self._begin(Purge(names, peers=sequence.request.peers))

    def unindex(self, keys: Seq[BlockKey]) -> int:
        """Unindexes the pages of some keys, or all; counts them."""
        found = [*map(self._ledger.find, keys)] if keys else self._ledger.pages
        pages = [page for page in found if page is not None and self._ledger.key_of(page) is not None]
        for page in pages:
            self._ledger.unindex(page)
        self.prefixes.forget_ahead()
        return len(pages)

    def pass_on_hint(self, sequences: Seq[Sequence]) -> None:
        """Passes on the hint of an ended request, with the blocks of its started choices."""
        names = [name for one in sequences if one.output_ids for name in one.kv.lasting_names]
        if names and (hint := sequences[0].request.hint) is not None:
            self._begin(Keep(names, hint=hint))

    def free(self, sequence: Sequence) -> None:
        """Frees a sequence's pages; pages with a running transfer drain first."""
        self._write_delayed(sequence)
        self.allocator.take_back(sequence)

    def poll(self) -> list[Fetched | HandOffStored]:
        """Returns the transfers that ended since the last call, if a sequence waits for them."""
        ended: list[Fetched | HandOffStored] = []
        for done in self._transfers.poll():
            fetched, sequence = self.prefixes.take(done), self._handing_off.pop(done.transfer, None)
            ended += [] if fetched is None else [fetched]
            ended += [] if sequence is None else [HandOffStored(sequence, done.num_resident)]
            for page in done.transfer.pages:
                self._ledger.end_transfer(page)
        return ended

    def _write_delayed(self, sequence: Sequence) -> None:
        """Writes the delayed blocks of a sequence's prompt through."""
        blocks, sequence.kv.delayed = sequence.kv.delayed, []
        self._write_through(blocks)
        self.allocator.free([page for _, page in blocks])

    def _on_stored(self, sequence: Sequence) -> list[Callable[[], None]]:
        """Makes the call for a hand-off amid its prompt, once the store has all of its blocks so far."""
        request, num_computed = sequence.request, sequence.num_computed
        if not isinstance(request, HandOff) or request.on_stored is None or not sequence.kv.is_plain:
            return []
        num_blocks = num_computed // self.allocator.layout.block_size
        return [partial(request.on_stored, num_blocks)] if num_computed < request.num_prompt else []

    def _write_through(self, blocks: Seq[tuple[BlockName, PageId]], told: Seq[Callable[[], None]] = ()) -> None:
        """Copies blocks to the store; does nothing without blocks. told: see WriteThrough."""
        if blocks:
            self._begin(WriteThrough([name for name, _ in blocks], [page for _, page in blocks], told=told))

    def _begin(self, transfer: Transfer) -> None:
        for page in transfer.pages:
            self._ledger.begin_transfer(page)
        self._transfers.begin(transfer)
