"""The seam to a cold tier: blocks outside the node's memory, kept on a best-effort basis.

A further tier of framed values is a `FramedTier` with the methods that reach its bytes, and an entry in `cold_tiers`.
"""

import logging
import threading
from abc import ABC, abstractmethod
from collections import Counter, deque
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import closing
from typing import Protocol, TypeVar

from kv_store.connection import Breaker
from kv_store.frame import FrameSeal
from kv_store.tiers.contents import ListableTier
from wire.block_names import BlockName
from wire.errors import ForgedFrame, StoreError, WireError
from wire.ids import BlockKey
from wire.layout import KVLayout
from wire.tier import FarStatus, Tier

T = TypeVar("T")
MAX_LOST = 4096

log = logging.getLogger(__name__)


class BlockSource(Protocol):
    """A source of blocks. Every fault is a counted miss; no call raises for a fault, and each is bounded in time."""

    tier: Tier

    def exists(self, keys: Sequence[BlockKey]) -> list[bool]:
        """Returns for each key whether a value is stored; the value may be corrupt."""

    def get(self, names: Sequence[BlockName], into: Sequence[memoryview]) -> Generator[bytes, None, None]:
        """Fills a payload of `into` for each block, and yields its checksum once it is verified.

        Ends at the first missing block. A value that cannot be the block is deleted and counted as corrupt or forged;
        its payload is undefined. A payload is written only between two yields, so several may share memory.
        """

    def delete(self, keys: Sequence[BlockKey]) -> None:
        """Deletes blocks; does nothing while the source does not answer."""

    def status(self) -> FarStatus: ...

    def close(self) -> None: ...


class ColdTier(BlockSource, ListableTier, Protocol):
    """A BlockSource that stores blocks, too."""

    def put(self, name: BlockName, payload: memoryview, checksum: bytes) -> bool:
        """Stores a block; returns False if that failed."""

    def sweep(self, shares: Mapping[bytes, float]) -> None:
        """Evicts expired blocks, and while little room is left, blocks beyond the shares. Raises StoreError.

        shares: the part of the tier's bytes for each namespace, by digest, from now on; beyond it, the namespace's own
        blocks go first. The node's service calls it from time to time.
        """

    def take_lost(self) -> list[BlockKey]:
        """Returns keys that this process evicted, or that the tier reported missing, since the last call.

        At most the latest MAX_LOST; no key that a failed tier did not answer for.
        """


class FramedTier(ABC):
    """The common part of cold tiers that store frames: seals, verifies and counts them. Thread-safe.

    Three failures in a row make a tier "broken", three refused writes in a row "full" or "read-only".
    """

    def __init__(self, tier: Tier, layout: KVLayout, mac_key: bytes, clock: Callable[[], float]) -> None:
        self.tier = tier
        self._seal = FrameSeal(layout, mac_key)
        self._breaker = Breaker(clock)
        self._writes = Breaker(clock)
        self._refusal = ""
        self._counted = Counter[str]()
        self._lost: deque[BlockKey] = deque(maxlen=MAX_LOST)
        self._lock = threading.Lock()

    @abstractmethod
    def _remove(self, keys: Sequence[BlockKey]) -> bool:
        """Deletes values; returns False if that failed."""

    @abstractmethod
    def _read(self, keys: Sequence[BlockKey], into: Sequence[memoryview]) -> Generator[bytes | memoryview, None, None]:
        """Fills the payloads and yields the front of each value; b"" for a value that is no frame.

        Ends at the first value that is missing or unreachable.
        """

    @abstractmethod
    def _write(self, key: BlockKey, front: bytes, payload: memoryview) -> bool:
        """Stores a value; returns False if that failed."""

    def get(self, names: Sequence[BlockName], into: Sequence[memoryview]) -> Generator[bytes, None, None]:
        with closing(self._read([name.key for name in names], into)) as fronts:
            for name, payload in zip(names, into, strict=True):
                checksum = self._verified(name, next(fronts, None), payload)
                if checksum is None:
                    return
                yield checksum

    def put(self, name: BlockName, payload: memoryview, checksum: bytes) -> bool:
        is_tried = self._writes.allows()
        is_stored = is_tried and self._write(name.key, self._seal.seal(name, payload, checksum), payload)
        if is_stored:
            self._count("written")
        return is_stored

    def delete(self, keys: Sequence[BlockKey]) -> None:
        self._remove(keys)

    def clear(self, keys: Sequence[BlockKey]) -> None:
        self._answer(self._remove(keys) or None)
        self._lost += keys

    def _answer(self, answer: T | None) -> T:
        """Returns the answer to a call. Raises StoreError if there is none."""
        if answer is None:
            raise StoreError(f"tier {self.tier} did not answer")
        return answer

    def take_lost(self) -> list[BlockKey]:
        with self._lock:
            return [self._lost.popleft() for _ in range(len(self._lost))]

    def status(self) -> FarStatus:
        with self._lock:
            return FarStatus(tier=self.tier, state=self._state, **self._counted)

    @property
    def _state(self) -> str:
        if self._breaker.is_open:
            return "broken"
        return self._refusal if self._writes.is_open else "up"

    def _verified(self, name: BlockName, front: bytes | memoryview | None, payload: memoryview) -> bytes | None:
        if front is None:
            self._count("misses")
            return None
        try:
            checksum = self._seal.verify(name, front, payload)
        except ForgedFrame as error:
            log.critical("somebody writes to tier %s who must not: %s, deleted", self.tier, error)
            self._reject(name.key, "forged")
            return None
        except WireError as error:
            log.warning("tier %s had %s: deleted", self.tier, error)
            self._reject(name.key, "corrupt")
            return None
        self._count("hits")
        return checksum

    def _note_found(self, keys: Sequence[BlockKey], found: Sequence[bool]) -> list[bool]:
        """Notes the keys that the tier has reported missing."""
        self._lost.extend(key for key, is_there in zip(keys, found, strict=True) if not is_there)
        return [*found]

    def _reject(self, key: BlockKey, reason: str) -> None:
        self._count(reason)
        self.delete([key])

    def _failed(self, error: Exception) -> None:
        """Notes that a call has failed."""
        with self._lock:
            was_open = self._breaker.is_open
            self._breaker.failed()
            self._counted["errors"] += 1
        if self._breaker.is_open and not was_open:
            log.warning("tier %s is left alone for now: %s", self.tier, error)

    def _succeeded(self) -> None:
        """Notes that a call was answered."""
        with self._lock:
            was_open = self._breaker.is_open
            self._breaker.succeeded()
        if was_open:
            log.warning("tier %s answers again", self.tier)

    def _refused(self, state: str, error: Exception, advice: str = "") -> None:
        """Notes that the tier answers, but takes no block."""
        with self._lock:
            was_refusing = self._writes.is_open
            self._writes.failed()
            self._refusal = state
            self._counted["refused"] += 1
        if self._writes.is_open and not was_refusing:
            log.warning("tier %s refuses blocks (%s)%s", self.tier, error, advice)

    def _accepted(self) -> None:
        """Notes that the tier has taken a block."""
        with self._lock:
            was_refusing = self._writes.is_open
            self._writes.succeeded()
        if was_refusing:
            log.warning("tier %s takes blocks again", self.tier)

    def _count(self, outcome: str, num: int = 1) -> None:
        with self._lock:
            self._counted[outcome] += num
