"""The seam to the cold tier: blocks outside of the node's memory, kept on a best-effort basis.

A further tier of framed values is a `FramedTier` with the four methods that reach its bytes.
"""

import logging
import threading
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from wire.errors import WireError
from wire.frame import frame_len, seal, unseal
from wire.ids import BlockKey
from wire.keys import BlockName
from wire.layout import KVLayout

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ColdStatus:
    """`state` is "up", "broken", or "full" or "read-only" while the tier refuses blocks.

    Counts of blocks since the start of this client; `refused` ones it tried to write in vain.
    """

    state: str
    hits: int = 0
    misses: int = 0
    errors: int = 0
    corrupt: int = 0
    written: int = 0
    refused: int = 0


class ColdTier(Protocol):
    """Every fault is a counted miss; no call raises for one, and each is bounded in time."""

    def exists(self, keys: Sequence[BlockKey]) -> list[bool]:
        """Tells for each key whether a value is stored; the value may be corrupt."""

    def get(self, name: BlockName, into: memoryview) -> bytes | None:
        """Fills `into`, a block's payload, and returns its checksum once both are verified to be that block's.

        None if it is missing; a value that cannot be that block is deleted and counted as corrupt, `into` undefined.
        """

    def put(self, name: BlockName, payload: memoryview, checksum: bytes) -> bool:
        """Stores a block; False if that failed."""

    def delete(self, keys: Sequence[BlockKey]) -> None:
        """Forgets blocks, as far as the tier can be reached."""

    def status(self) -> ColdStatus: ...

    def close(self) -> None: ...


class FramedTier(ABC):
    """The common part of cold tiers that keep frames: it makes, checks and counts them. Thread-safe."""

    def __init__(self, layout: KVLayout) -> None:
        self._layout = layout
        self._counted = Counter[str]()
        self._lock = threading.Lock()

    @abstractmethod
    def delete(self, keys: Sequence[BlockKey]) -> None: ...

    @abstractmethod
    def _read(self, key: BlockKey, max_bytes: int) -> bytes:
        """Reads up to `max_bytes` of a value; none if it is missing or out of reach."""

    @abstractmethod
    def _write(self, key: BlockKey, frame: bytes) -> bool:
        """Stores a value; False if that failed."""

    @property
    def _state(self) -> str:
        return "up"

    def get(self, name: BlockName, into: memoryview) -> bytes | None:
        frame = self._read(name.key, frame_len(name, self._layout) + 1)  # one more, so that an over-long one shows
        if not frame:
            self._count("misses")
            return None
        try:
            checksum = unseal(frame, name, self._layout, into)
        except WireError as error:
            log.warning("the cold tier had %s: deleted", error)
            self._count("corrupt")
            self.delete([name.key])
            return None
        self._count("hits")
        return checksum

    def put(self, name: BlockName, payload: memoryview, checksum: bytes) -> bool:
        is_stored = self._write(name.key, seal(name, self._layout, payload, checksum))
        if is_stored:
            self._count("written")
        return is_stored

    def status(self) -> ColdStatus:
        with self._lock:
            return ColdStatus(self._state, **self._counted)

    def _count(self, outcome: str) -> None:
        with self._lock:
            self._counted[outcome] += 1
