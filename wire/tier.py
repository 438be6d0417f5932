"""Tiers in messages and status: names, settings, counts, events, causes of misses, and learned durations."""

from collections.abc import Iterable
from dataclasses import dataclass, fields
from enum import StrEnum
from itertools import groupby

from wire.ids import BlockKey


class Tier(StrEnum):
    """The tiers, nearest first."""

    DEVICE = "device"
    HOST = "host"
    PEERS = "peers"
    REDIS = "redis"
    FILES = "files"


COLD_TIERS = (Tier.REDIS, Tier.FILES)
"""Tiers outside the nodes' memory, nearest first."""
FAR_TIERS = (Tier.PEERS, *COLD_TIERS)
"""Tiers outside a node's own memory, nearest first."""


class Write(StrEnum):
    """The blocks that a node's service writes to a cold tier, in the background; never a tail.

    ALL: every block of the arena. REUSED: blocks that were read from the arena; the hand-off's read, the first under a
    hold, does not count. DEMOTED: blocks that the arena is about to lose, and no cold tier has.
    """

    ALL = "all"
    REUSED = "reused"
    DEMOTED = "demoted"


_MEMORY = 8
_SHORTEST_S = 1e-7


class Duration:
    """A learned duration in seconds: the geometric mean of a prior and samples; the last eight samples count most."""

    def __init__(self, prior_s: float) -> None:
        self.mean_s = prior_s
        self._num_samples = 1

    @property
    def learned_s(self) -> float | None:
        """The mean; None before the first sample."""
        return self.mean_s if self._num_samples > 1 else None

    def learn(self, sample_s: float) -> None:
        self._num_samples = min(self._num_samples + 1, _MEMORY)
        self.mean_s *= (max(sample_s, _SHORTEST_S) / self.mean_s) ** (1 / self._num_samples)


@dataclass(frozen=True, kw_only=True)
class ColdSettings:
    """A cold tier's settings. place: the URL of a server, or the path of a folder; empty for a process's memory.

    ttl_s: time to live since a block's last use; 0 for no end.
    """

    tier: Tier
    place: str
    write: Write
    timeout_s: float
    max_bytes: int = 0
    ttl_s: float = 0.0


def host_memory(max_bytes: int) -> ColdSettings:
    """Describes an arena in this process's memory, of at most `max_bytes`."""
    return ColdSettings(tier=Tier.HOST, place="", write=Write.ALL, timeout_s=0.0, max_bytes=max_bytes)


def redis(url: str, timeout_s: float = 5.0) -> ColdSettings:
    """Describes a server: redis://HOST:PORT/DB, rediss://... or unix:///PATH. A reply later than `timeout_s` is a miss.

    The server has its own memory limit and eviction policy.
    """
    return ColdSettings(tier=Tier.REDIS, place=url, write=Write.ALL, timeout_s=timeout_s)


def files(folder: str, max_bytes: int, timeout_s: float = 5.0) -> ColdSettings:
    """Describes a folder of frames, of at most `max_bytes`. A read later than `timeout_s` is a miss."""
    return ColdSettings(tier=Tier.FILES, place=folder, write=Write.ALL, timeout_s=timeout_s, max_bytes=max_bytes)


@dataclass(frozen=True, kw_only=True)
class FarStatus:
    """A far tier's state for one client: "up", "broken", or, while it refuses blocks, "full" or "read-only".

    Counts since the client's start, of blocks except `errors`, which counts calls. forged: blocks with a right checksum
    and a wrong MAC. refused: blocks that the client tried to write in vain. evicted: blocks that this client, not the
    server, removed to make room, beyond a share, or by TTL.
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
    evicted: int = 0

    @property
    def write_errors(self) -> int:
        """Errors of a client that writes, the node's service."""
        return self.errors


READ_COUNTS = ("hits", "misses", "errors", "corrupt", "forged")
WRITE_COUNTS = ("written", "refused", "write_errors", "evicted")
FAR_COUNTS = READ_COUNTS + WRITE_COUNTS
"""Counts of a FarStatus: workers, which read, have the first; the node's service, which writes, the last."""


_ADVICE = {
    (Tier.REDIS, "full"): "set its maxmemory-policy to allkeys-lru, or give it more memory",
    (Tier.FILES, "full"): "its disk or quota has no room",
    (Tier.FILES, "read-only"): "look at its mount, and at the rights of its folder",
    (Tier.FILES, "broken"): "look at its mount, and at files.folder",
}


def advice(tier: str, state: str) -> str:
    """Returns the way out of a tier's state; "" if it is obvious, or there is none."""
    return _ADVICE.get((Tier(tier), state), "")


@dataclass(frozen=True)
class StoredBlock:
    """A block in a tier. namespace: the digest of its root; empty if the value is no frame.

    num_bytes: includes the frame. idle_s: seconds since its last use.
    """

    key: BlockKey
    namespace: bytes
    num_bytes: int
    idle_s: float


@dataclass(frozen=True, kw_only=True)
class LedgerCounts:
    """The number of pages in each of the five states of `kv_store.ledger`; they sum to `total`."""

    free: int
    owned: int
    published: int
    cached: int
    draining: int
    total: int


BLOCK_STATES = tuple(one.name for one in fields(LedgerCounts) if one.name != "total")


class EventKind(StrEnum):
    """The kind of an event of blocks in a tier. CLEARED: all blocks of the tier are gone."""

    STORED = "stored"
    REMOVED = "removed"
    CLEARED = "cleared"


MAX_RUNS = 32
"""Bound on the runs of a message; blocks after them count as BEHIND, which is true of them."""


class Cause(StrEnum):
    """The cause of a block's computation."""

    NEVER_SEEN = "never_seen"
    NO_LONGER_KNOWN = "no_longer_known"
    EVICTED = "evicted"
    DIFFERS = "differs"
    OTHER_NAMESPACE = "other_namespace"
    PARTIAL = "partial"
    LOAD_FAILED = "load_failed"
    ELSEWHERE = "elsewhere"
    CHEAPER = "cheaper"
    BEHIND = "behind"
    NOT_READ = "not_read"


@dataclass(frozen=True)
class Miss:
    """The cause of one uncached block.

    how: words about an eviction, a failure, a source not asked, or another namespace. age_s: time since the eviction;
    for NEVER_SEEN and NO_LONGER_KNOWN, how far back the node's record of evicted blocks reaches.
    """

    cause: Cause
    how: str = ""
    age_s: float = 0.0


Disposition = Tier | Miss
"""The disposition of a block: the tier that had its KV, or the miss that has it computed."""


@dataclass(frozen=True)
class MissRun:
    """Consecutive computed blocks of a prompt, with one cause.

    miss: equal in `cause` and `how` for all blocks; `age_s` is the first block's. first_token: position of the run's
    first token. The last of MAX_RUNS runs joins all the rest, as BEHIND.
    """

    miss: Miss
    first_token: int
    num_blocks: int


def runs_of(blocks: Iterable[Disposition], block_size: int) -> tuple[MissRun, ...]:
    """Joins the causes of consecutive computed blocks. blocks: all blocks of a prompt."""
    runs: list[MissRun] = []
    place, all_blocks = 0, [*blocks]
    for _, group in groupby(all_blocks, key=lambda one: (one.cause, one.how) if isinstance(one, Miss) else None):
        same = [*group]
        if isinstance(same[0], Miss):
            if len(runs) == MAX_RUNS - 1:
                num_left = sum(isinstance(one, Miss) for one in all_blocks[place:])
                return (*runs, MissRun(Miss(Cause.BEHIND), place * block_size, num_left))
            runs.append(MissRun(same[0], place * block_size, len(same)))
        place += len(same)
    return tuple(runs)


def words_of(run: MissRun) -> str:
    """Describes a run of blocks and its cause, for an operator."""
    blocks = "1 block" if run.num_blocks == 1 else f"{run.num_blocks} blocks"
    values = {"how": run.miss.how, "age": _duration(run.miss.age_s), "token": run.first_token}
    return f"{blocks} from token {run.first_token}: {_TEXTS[run.miss.cause].format_map(values)}"


_TEXTS = {
    Cause.NEVER_SEEN: "new to its node, whose record of blocks began {age} before the lookup",
    Cause.NO_LONGER_KNOWN: "not known: new, or evicted more than {age} before the lookup, as older evictions"
    " are forgotten; a larger arena keeps and remembers more",
    Cause.EVICTED: "evicted from the arena {age} before the lookup: {how}",
    Cause.DIFFERS: "its prompt differs from known ones within the block that begins at token {token}"
    " (`baton why --prompt A --prompt B` names the token)",
    Cause.OTHER_NAMESPACE: "at least the first is stored under other settings, in another namespace of its"
    " tenant: {how}",
    Cause.PARTIAL: "the prompt's partly filled last block: a new request computes it, as always; only full blocks"
    " are found again",
    Cause.LOAD_FAILED: "found, and not loaded: {how}",
    Cause.ELSEWHERE: "evicted from the arena {age} before the lookup, a copy went to a cold tier: {how}",
    Cause.CHEAPER: "found, and not read: computing up to it was expected to take less time",
    Cause.BEHIND: "of no use without a block before it, which was not read",
    Cause.NOT_READ: "not looked up: the request scores its prompt (as with prompt_logprobs),"
    " or reads no cached block there",
}
NOUNS = {
    Cause.NEVER_SEEN: "new",
    Cause.NO_LONGER_KNOWN: "no longer known",
    Cause.EVICTED: "evicted",
    Cause.DIFFERS: "differing from known prompts",
    Cause.OTHER_NAMESPACE: "under another namespace",
    Cause.PARTIAL: "partly filled",
    Cause.LOAD_FAILED: "not loaded by a fault",
    Cause.ELSEWHERE: "elsewhere and too far",
    Cause.CHEAPER: "cheaper to compute",
    Cause.BEHIND: "behind a missing one",
    Cause.NOT_READ: "not looked up",
}
"""Words for each cause, after a number of blocks."""


def _duration(age_s: float) -> str:
    for unit, length_s in (("h", 3600), ("min", 60)):
        if age_s >= 2 * length_s:
            return f"{age_s / length_s:.0f} {unit}"
    return f"{age_s:.1f} s"
