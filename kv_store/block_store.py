"""What an engine sees below its own pages: find, fetch and publish blocks by name."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from kv_store.tiers.cold_tier import ColdStatus
from wire.directory import DirectoryStatus
from wire.ids import PageId, RequestId
from wire.keys import BlockName
from wire.tier import Tier


@dataclass(frozen=True)
class FetchedBlocks:
    """The first `len(tiers)` blocks asked for were copied and verified; where each came from."""

    tiers: list[Tier] = field(default_factory=list)


@dataclass(frozen=True)
class PublishedBlocks:
    """How many of the blocks given are in the host tier now, whoever wrote them."""

    num_resident: int = 0


@dataclass(frozen=True)
class StoreStatus:
    """None stands for a tier that is out of reach, or switched off. Counts since the start of this store."""

    directory: DirectoryStatus | None
    cold: ColdStatus | None
    block_bytes: int
    num_corrupt: int = 0
    num_failed: int = 0


class BlockStore(Protocol):
    """Blocking; one thread fetches, publishes and withdraws. A tier at fault is a miss and never an error."""

    def fence(self) -> None:
        """Called by the thread that computes, before it has pages fetched into or published."""

    def fetch(self, names: Sequence[BlockName], pages: Sequence[PageId]) -> FetchedBlocks:
        """Copies the longest verified prefix of `names` into the caller's own device pages, one for each name."""

    def publish(self, names: Sequence[BlockName], pages: Sequence[PageId], hold: RequestId | None) -> PublishedBlocks:
        """Copies device pages into the host tier where they are not yet; with `hold`, keeps them for that request."""

    def withdraw(self, names: Sequence[BlockName]) -> None:
        """Lets these blocks be found in no tier any more."""

    def renew(self, request_ids: Sequence[RequestId]) -> None:
        """Holds of these requests live on."""

    def release_holds(self, request_ids: Sequence[RequestId]) -> None:
        """Holds of these requests end."""

    def status(self) -> StoreStatus: ...

    def check(self) -> list[str]:
        """What is wrong with the books of the host tier; nothing, if all is well."""
