"""The arguments and answers of calls of an arena's directory over its socket.

Times are durations in seconds, counted by the directory's monotonic clock from arrival.
"""

import math
import sys
from dataclasses import dataclass
from typing import Annotated, NamedTuple

from wire.block_names import BlockName
from wire.errors import WireError
from wire.ids import AttemptId, SlotId
from wire.tier import FarStatus, LedgerCounts
from wire.typed_reader import Between

MAX_TTL_S = 3600.0
NO_LEASE = 0
"""The id of a lease without slots, which needs no release."""


def check_session(session: bytes) -> None:
    """Checks that a session is empty or a digest. Raises WireError."""
    if len(session) not in (0, 32):
        raise WireError(f"a session of {len(session)} bytes")


TtlS = Annotated[float, Between(math.ulp(0.0), MAX_TTL_S)]
NumBlocks = Annotated[int, Between(0, (1 << 32) - 1)]
KeepS = Annotated[float, Between(0.0, sys.float_info.max)]
SessionDigest = Annotated[bytes, check_session]


@dataclass(frozen=True)
class Hold:
    """A claim of a request on blocks; it ends `ttl_s` after its last renewal."""

    attempt_id: AttemptId
    ttl_s: TtlS


@dataclass(frozen=True)
class HoldRoom:
    """The part of an arena that other routers' holds take or will take, and the number of routers, the asker included.

    Counts routers that have holds, or wait for room.
    """

    num_blocks_of_others: int = 0
    num_routers: int = 1


@dataclass(frozen=True)
class KeepHint:
    """A request's hint about its KV: its session, and the time to keep it after use.

    namespace: the digest of the request's root. session: result of `wire.block_names.session_of`; empty for none.
    keep_s: 0 if the session needs nothing more of it; None if the request does not say.
    """

    namespace: bytes
    session: SessionDigest
    keep_s: KeepS | None


class Block(NamedTuple):
    """A slot, the block in it, and the checksum of its payload."""

    slot: SlotId
    name: BlockName
    checksum: bytes


class Entry(NamedTuple):
    """The slot of a found block, and the expected checksum of its payload."""

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
    """A slot to write for each name, or None if the block is there or there is no room. num_resident: blocks there."""

    slots: list[SlotId | None]
    num_resident: int


@dataclass(frozen=True)
class Lease:
    """An entry for each key, or None. The slots keep their blocks until the release or the end of the lease."""

    lease_id: int
    entries: list[Entry | None]


@dataclass(frozen=True, kw_only=True)
class DirectoryStatus:
    """The state of a directory. Hits and misses count keys that readers asked for. cold: the writers' cold tiers."""

    counts: LedgerCounts
    num_leases: int
    num_holds: int
    num_kept: int
    epoch: str
    hits: int
    misses: int
    evictions: int
    cold: list[FarStatus]
