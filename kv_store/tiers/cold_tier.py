"""The seam to the cold tier: blocks outside of the node's memory, kept on a best-effort basis."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from wire.ids import BlockKey
from wire.keys import BlockName


@dataclass(frozen=True)
class ColdStatus:
    """`state` is "up" or "broken"; counts of blocks since the start of this client."""

    state: str
    hits: int = 0
    misses: int = 0
    errors: int = 0
    corrupt: int = 0
    written: int = 0


class ColdTier(Protocol):
    """Every fault is a counted miss; no call raises for one, and each is bounded in time."""

    def exists(self, keys: Sequence[BlockKey]) -> list[bool]:
        """Tells for each key whether a value is stored; the value may be corrupt."""

    def get(self, name: BlockName, into: memoryview) -> bytes | None:
        """Fills `into`, a block's payload, and returns its checksum once both are verified to be that block's.

        None if it is missing; a value that cannot be that block is deleted and counted as corrupt. `into` is then undefined.
        """

    def put(self, name: BlockName, payload: memoryview, checksum: bytes) -> bool:
        """Stores a block; False if that failed."""

    def delete(self, keys: Sequence[BlockKey]) -> None:
        """Forgets blocks, as far as the tier can be reached."""

    def status(self) -> ColdStatus: ...

    def close(self) -> None: ...
