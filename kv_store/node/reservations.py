"""Who writes to which slots. A reserved slot is a transfer and nothing else: it drains until its writer is done."""

from collections import Counter

from kv_store.ledger import Ledger
from wire.ids import PageId
from wire.keys import BlockName


class Reservations:
    """Slots that are being written to, by writer. They never run out: only a writer, or its death, ends them."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._writing: dict[str, dict[PageId, BlockName]] = {}

    @property
    def transfers(self) -> Counter[PageId]:
        """Writers of each slot."""
        return Counter(slot for names in self._writing.values() for slot in names)

    def take(self, writer: str, names: list[BlockName]) -> list[PageId]:
        """A slot for each of the first of `names`, as many as can be had."""
        slots = self._ledger.allocate(min(len(names), self._ledger.num_allocatable))
        for slot in slots:
            self._ledger.begin_transfer(slot)
            self._ledger.free(slot)
        if slots:
            self._writing.setdefault(writer, {}).update(zip(slots, names, strict=False))
        return slots

    def name_of(self, writer: str, slot: PageId) -> BlockName | None:
        """What a writer is to write to a slot; None if it is not its slot."""
        return self._writing.get(writer, {}).get(slot)

    def end(self, writer: str, slot: PageId) -> None:
        """A writer is done with one of its slots."""
        del self._writing[writer][slot]
        if not self._writing[writer]:
            del self._writing[writer]
        self._ledger.end_transfer(slot)

    def end_all_of(self, writer: str) -> int:
        """How many slots a writer was not done with."""
        slots = self._writing.pop(writer, {})
        for slot in slots:
            self._ledger.end_transfer(slot)
        return len(slots)
