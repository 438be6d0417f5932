"""A list of tiers, nearest first: a block is read from the nearest that has it, and written to all."""

import threading
from collections.abc import Callable, Generator, Sequence
from contextlib import closing
from functools import partial

from kv_store.frame import checksum_of
from kv_store.prefix.sources import locate, read
from kv_store.tiers.arena_tier import ArenaTier
from kv_store.tiers.cold_tier import ColdTier
from wire.block_names import BlockName
from wire.errors import Unsupported
from wire.ids import BlockKey
from wire.tier import FarStatus, Tier


class TierList:
    """A list of tiers. Thread-safe. A failed tier has no block and takes none; no call raises for that."""

    def __init__(self, tiers: Sequence[ColdTier]) -> None:
        self._tiers = [*tiers]
        self._lock = threading.Lock()

    @property
    def host(self) -> ArenaTier:
        """The first tier in host memory. Raises Unsupported without one."""
        for tier in self._tiers:
            if isinstance(tier, ArenaTier):
                return tier
        raise Unsupported("pinned blocks are kept in host memory, and no tier of this store is there")

    def exists(self, names: Sequence[BlockName]) -> list[bool]:
        """Returns for each block whether some tier has a value; the value may be corrupt."""
        with self._lock:
            return [tier is not None for tier in locate(names, self._tiers)]

    def read(self, names: Sequence[BlockName], into: Sequence[memoryview]) -> Generator[Tier, None, None]:
        """Fills payloads from the front; yields each block's tier once it is verified and copied to nearer tiers.

        Ends at the first block that no tier has; a block damaged in one tier is read from the next. Other calls wait
        until its end, or `close`.
        """
        place, left_out = 0, set[ColdTier]()
        with self._lock:
            while True:
                tiers, start = [tier for tier in self._tiers if tier not in left_out], place
                there = [*iter(partial(next, locate(names[place:], tiers), None), None)]
                with closing(read(names[place:], there, into[place:], _get)) as blocks:
                    for source, checksum in blocks:
                        for nearer in self._tiers[: self._tiers.index(source)]:
                            nearer.put(names[place], into[place], checksum)
                        yield source.tier
                        place += 1
                wrong = there[place - start : place - start + 1]
                if not wrong and (place == start or not left_out):
                    return
                left_out = {*wrong} | (left_out if place == start else set())

    def write(self, names: Sequence[BlockName], payload_of: Callable[[int], memoryview]) -> list[bool]:
        """Writes each block to the tiers that lack it; returns for each block whether some tier has it at the end.

        A tier smaller than the blocks loses some of them again, the last but one first. payload_of: returns the payload
        at a place in `names`, valid until its next call; called for blocks that a tier lacks.
        """
        keys = [name.key for name in names]
        with self._lock:
            found = [tier.exists(keys) for tier in self._tiers]
            for place, name in enumerate(names):
                lacking = [number for number, here in enumerate(found) if not here[place]]
                if lacking:
                    payload = payload_of(place)
                    checksum = checksum_of(payload)
                for number in lacking:
                    self._tiers[number].put(name, payload, checksum)
        return self.exists(names)

    def delete(self, keys: Sequence[BlockKey]) -> None:
        """Deletes blocks from every tier."""
        with self._lock:
            for tier in self._tiers:
                tier.delete(keys)

    def status(self) -> list[FarStatus]:
        return [tier.status() for tier in self._tiers]

    def close(self) -> None:
        with self._lock:
            for tier in self._tiers:
                tier.close()


def _get(tier: ColdTier, names: Sequence[BlockName], into: Sequence[memoryview]) -> Generator[bytes, None, None]:
    return tier.get(names, into)
