"""What is said to the directory of an arena, and what it answers. Each request has the answer named beside it.

A process says Hello first. Times are durations in seconds, counted by the directory's monotonic clock from arrival.
"""

from dataclasses import dataclass

from wire.block_counts import BlockCounts
from wire.errors import WireError
from wire.ids import BlockKey, PageId, RequestId
from wire.keys import BlockName

MAX_TTL_S = 3600.0


@dataclass(frozen=True)
class Hold:
    """Keeps blocks for a request; renewed, or given up after `ttl_s`."""

    request_id: RequestId
    ttl_s: float

    def __post_init__(self) -> None:
        _check_ttl(self.ttl_s)


@dataclass(frozen=True)
class Block:
    """A slot, the block in it, and the xxh3-128 of its payload."""

    slot: PageId
    name: BlockName
    checksum: bytes


@dataclass(frozen=True)
class Entry:
    """Where a reader finds a block, and what its payload's xxh3-128 must be."""

    slot: PageId
    checksum: bytes


# Requests


@dataclass(frozen=True)
class Hello:
    """-> DirectoryInfo, or Refused. Of one client only the connection with the highest number is heard."""

    protocol_version: int
    client_id: str
    connection: int


@dataclass(frozen=True)
class GetInfo:
    """-> DirectoryInfo"""


@dataclass(frozen=True)
class GetExisting:
    """-> Flags"""

    keys: list[BlockKey]


@dataclass(frozen=True)
class Reserve:
    """-> Reservation"""

    writer: str
    names: list[BlockName]
    hold: Hold | None


@dataclass(frozen=True)
class Commit:
    """-> Count, of those whose keys are found now"""

    writer: str
    blocks: list[Block]
    hold: Hold | None


@dataclass(frozen=True)
class Abandon:
    """-> Count, of slots given back"""

    writer: str


@dataclass(frozen=True)
class TakeLease:
    """-> Lease"""

    reader: str
    keys: list[BlockKey]
    ttl_s: float

    def __post_init__(self) -> None:
        _check_ttl(self.ttl_s)


@dataclass(frozen=True)
class ReleaseLease:
    """-> Flags, one: False if the lease had run out"""

    lease_id: int


@dataclass(frozen=True)
class WithdrawBlocks:
    """-> Count, of blocks no longer found"""

    blocks: list[Block]


@dataclass(frozen=True)
class RenewHolds:
    """-> Count, of requests that hold something"""

    request_ids: list[RequestId]
    ttl_s: float

    def __post_init__(self) -> None:
        _check_ttl(self.ttl_s)


@dataclass(frozen=True)
class ReleaseHolds:
    """-> Count, of requests that held something"""

    request_ids: list[RequestId]


@dataclass(frozen=True)
class MarkCold:
    """-> Count, of those keys found"""

    keys: list[BlockKey]


@dataclass(frozen=True)
class GetStatus:
    """-> DirectoryStatus"""


@dataclass(frozen=True)
class Check:
    """-> Problems"""


# Answers


@dataclass(frozen=True)
class DirectoryInfo:
    """The arena's place and geometry. An epoch is drawn at each start: slots of another epoch mean nothing."""

    epoch: str
    arena_path: str
    num_slots: int
    block_bytes: int


@dataclass(frozen=True)
class Reservation:
    """A slot to write for each name, or None: the block is there, or there is no room. And how many are there."""

    slots: list[PageId | None]
    num_resident: int


@dataclass(frozen=True)
class Lease:
    """For each key its entry, or None. Slots stay what they are until the release or the end of the lease's time."""

    lease_id: int
    entries: list[Entry | None]


@dataclass(frozen=True)
class DirectoryStatus:
    """Hits and misses count keys that readers asked for; `copied` counts blocks written to the cold tier."""

    counts: BlockCounts
    num_leases: int
    num_holds: int
    epoch: str
    hits: int
    misses: int
    evictions: int
    copied: int


@dataclass(frozen=True)
class Flags:
    values: list[bool]


@dataclass(frozen=True)
class Count:
    value: int


@dataclass(frozen=True)
class Problems:
    lines: list[str]


@dataclass(frozen=True)
class Refused:
    """The request was refused; nothing was changed."""

    message: str


MESSAGES = (
    Hello,
    GetInfo,
    GetExisting,
    Reserve,
    Commit,
    Abandon,
    TakeLease,
    ReleaseLease,
    WithdrawBlocks,
    RenewHolds,
    ReleaseHolds,
    MarkCold,
    GetStatus,
    Check,
    DirectoryInfo,
    Reservation,
    Lease,
    DirectoryStatus,
    Flags,
    Count,
    Problems,
    Refused,
)


def _check_ttl(ttl_s: float) -> None:
    if not 0 < ttl_s <= MAX_TTL_S:
        raise WireError(f"a time to live of {ttl_s} s")
