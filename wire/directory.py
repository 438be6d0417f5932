"""Types in the calls to an arena's directory; `kv_store.node.directory_port` declares the calls.

Times are durations in seconds, counted by the directory's monotonic clock from arrival.
"""

from dataclasses import dataclass
from typing import Annotated

from wire.errors import WireError
from wire.ids import AttemptId, SlotId
from wire.names import BlockName
from wire.tier import FarStatus, LedgerCounts

MAX_TTL_S = 3600.0


def check_ttl(ttl_s: float) -> None:
    """Raises WireError for a time to live that is not positive or too long."""
    if not 0 < ttl_s <= MAX_TTL_S:
        raise WireError(f"a time to live of {ttl_s} s")


TtlS = Annotated[float, check_ttl]
ClientName = Annotated[str, "a name that a process gives to one of its writers or readers"]


@dataclass(frozen=True)
class Hold:
    """A claim of a request on blocks; it ends `ttl_s` after its last renewal."""

    attempt_id: AttemptId
    ttl_s: TtlS


@dataclass(frozen=True)
class Block:
    """A slot, the block in it, and the xxh3-128 of its payload."""

    slot: SlotId
    name: BlockName
    checksum: bytes


@dataclass(frozen=True)
class Entry:
    """The slot of a found block, and the xxh3-128 that its payload must have."""

    slot: SlotId
    checksum: bytes


@dataclass(frozen=True)
class DirectoryInfo:
    """The arena's place and geometry. An epoch is drawn at each start: slots of another epoch mean nothing."""

    epoch: str
    arena_path: str
    num_slots: int
    block_bytes: int


@dataclass(frozen=True)
class Reservation:
    """For each name a slot to write, or None if the block is there or no room is left; `num_resident` are there."""

    slots: list[SlotId | None]
    num_resident: int


@dataclass(frozen=True)
class Lease:
    """For each key its entry, or None. The slots keep their blocks until the release or the end of the lease."""

    lease_id: int
    entries: list[Entry | None]


@dataclass(frozen=True)
class DirectoryStatus:
    """Hits and misses count keys that readers asked for. cold: the tiers as the node's service finds them, writing."""

    counts: LedgerCounts
    num_leases: int
    num_holds: int
    epoch: str
    hits: int
    misses: int
    evictions: int
    cold: list[FarStatus]
