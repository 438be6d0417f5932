"""Names of tiers in messages, metrics and status, and counts of their pages by state."""

from dataclasses import dataclass, fields
from enum import StrEnum


class Tier(StrEnum):
    """Nearest first."""

    DEVICE = "device"
    HOST = "host"
    PEERS = "peers"
    REDIS = "redis"
    FILES = "files"


COLD_TIERS = (Tier.REDIS, Tier.FILES)
"""Tiers outside of the nodes' memory, nearest first."""
FAR_TIERS = (Tier.PEERS, *COLD_TIERS)
"""Tiers outside of a node's own memory, nearest first."""


class Write(StrEnum):
    """The blocks that a node's service writes to a cold tier, in the background; never a tail.

    ALL: every block of the arena. REUSED: blocks that were read from the arena, but for the hand-off, which reads every
    block once while a hold keeps it. DEMOTED: blocks that the arena is about to lose, and no cold tier has.
    """

    ALL = "all"
    REUSED = "reused"
    DEMOTED = "demoted"


@dataclass(frozen=True)
class ColdSettings:
    """A cold tier's settings. place: the URL of a server, or the path of a folder; empty for memory of a process."""

    tier: Tier
    place: str
    write: Write
    timeout_s: float
    max_bytes: int = 0


def host_memory(max_bytes: int) -> ColdSettings:
    """Describes an arena in the memory of this process, of at most `max_bytes`."""
    return ColdSettings(Tier.HOST, "", Write.ALL, 0.0, max_bytes)


def redis(url: str, timeout_s: float = 5.0) -> ColdSettings:
    """Describes a server: redis://HOST:PORT/DB, rediss://... or unix:///PATH. A reply later than `timeout_s` is a miss.

    The server has its own limit of memory and its own policy of eviction.
    """
    return ColdSettings(Tier.REDIS, url, Write.ALL, timeout_s)


def files(folder: str, max_bytes: int, timeout_s: float = 5.0) -> ColdSettings:
    """Describes a folder in which frames take at most `max_bytes`. A read later than `timeout_s` is a miss."""
    return ColdSettings(Tier.FILES, folder, Write.ALL, timeout_s, max_bytes)


@dataclass(frozen=True)
class FarStatus:
    """A far tier as one client finds it: "up", "broken", or "full" or "read-only" while it refuses blocks.

    Counts of blocks since the start of this client. `forged` ones had a right checksum and a wrong MAC; `refused` ones
    the client tried to write in vain. `errors` are of calls.
    """

    tier: Tier
    state: str
    hits: int = 0
    misses: int = 0
    errors: int = 0
    corrupt: int = 0
    forged: int = 0
    written: int = 0
    refused: int = 0

    @property
    def write_errors(self) -> int:
        """Errors of a client that writes, the node's service."""
        return self.errors


READ_COUNTS = ("hits", "misses", "errors", "corrupt", "forged")
WRITE_COUNTS = ("written", "refused", "write_errors")
FAR_COUNTS = READ_COUNTS + WRITE_COUNTS
"""Counts of a FarStatus: the first of workers, which read, the last of the node's service, which writes."""


_ADVICE = {
    (Tier.REDIS, "full"): "set its maxmemory-policy to allkeys-lru, or give it more memory",
    (Tier.FILES, "full"): "its disk or quota has no room",
    (Tier.FILES, "read-only"): "look at its mount, and at the rights of its folder",
    (Tier.FILES, "broken"): "look at its mount, and at files.folder",
}


def advice(tier: str, state: str) -> str:
    """Returns the way out of a tier's state; "" if it is clear, or nothing can be done."""
    return _ADVICE.get((Tier(tier), state), "")


@dataclass(frozen=True)
class LedgerCounts:
    """The number of pages in each of the five states of `kv_store.ledger`; they sum to `total`."""

    free: int
    owned: int
    published: int
    cached: int
    draining: int
    total: int


BLOCK_STATES = tuple(one.name for one in fields(LedgerCounts) if one.name != "total")
