"""The causes of uncached blocks: one for each block of a prompt, and runs of blocks with one cause."""

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from itertools import groupby

MAX_RUNS = 32
"""Runs that one message may have; blocks behind them count as BEHIND, which is true of them."""


class Cause(StrEnum):
    """The cause of a block's computation."""

    NEVER_SEEN = "never_seen"
    NO_LONGER_KNOWN = "no_longer_known"
    EVICTED = "evicted"
    DIFFERS = "differs"
    PARTIAL = "partial"
    LOAD_FAILED = "load_failed"
    ELSEWHERE = "elsewhere"
    CHEAPER = "cheaper"
    BEHIND = "behind"
    NOT_READ = "not_read"


@dataclass(frozen=True)
class Miss:
    """The cause of one uncached block.

    how: in words, of an eviction, a failure, or a source not asked. age_s: since the eviction; of NEVER_SEEN and
    NO_LONGER_KNOWN, how far back the node's memory of evicted blocks reaches.
    """

    cause: Cause
    how: str = ""
    age_s: float = 0.0


@dataclass(frozen=True)
class MissRun:
    """Consecutive blocks of a prompt with one cause; `miss` is the first one's. first_token: of the first block."""

    miss: Miss
    first_token: int
    num_blocks: int


def runs_of(misses: Iterable[Miss], first_block: int, block_size: int) -> tuple[MissRun, ...]:
    """Joins the causes of consecutive blocks, of which the first is the prompt's `first_block`-th from 0."""
    runs: list[MissRun] = []
    place, all_blocks = first_block, [*misses]
    for _, group in groupby(all_blocks, key=lambda one: (one.cause, one.how)):
        blocks = [*group]
        if len(runs) == MAX_RUNS - 1:
            runs.append(MissRun(Miss(Cause.BEHIND), place * block_size, first_block + len(all_blocks) - place))
            break
        runs.append(MissRun(blocks[0], place * block_size, len(blocks)))
        place += len(blocks)
    return tuple(runs)


def words_of(run: MissRun) -> str:
    """Describes a run of blocks and its cause, for an operator."""
    blocks = "1 block" if run.num_blocks == 1 else f"{run.num_blocks} blocks"
    values = {"how": run.miss.how, "age": _duration(run.miss.age_s), "token": run.first_token}
    return f"{blocks} from token {run.first_token}: {_TEXTS[run.miss.cause].format_map(values)}"


_TEXTS = {
    Cause.NEVER_SEEN: "never seen by its node, which knows all blocks of its arena of the last {age}",
    Cause.NO_LONGER_KNOWN: "not known: never seen, or evicted more than {age} ago, and forgotten since",
    Cause.EVICTED: "evicted from the arena {age} ago: {how}",
    Cause.DIFFERS: "its prompt differs from known ones within the block that begins at token {token}",
    Cause.PARTIAL: "the prompt's last block, partly filled: kept for the same prompt alone, and no longer than others",
    Cause.LOAD_FAILED: "found, and not loaded: {how}",
    Cause.ELSEWHERE: "evicted from the arena {age} ago, with a copy in a cold tier: {how}",
    Cause.CHEAPER: "found in a farther tier, and cheaper to compute than to read",
    Cause.BEHIND: "of no use without a block before it, which was not cached",
    Cause.NOT_READ: "not looked up: the request reads no cached block there, or scores its tokens",
}
NOUNS = {
    Cause.NEVER_SEEN: "never seen",
    Cause.NO_LONGER_KNOWN: "no longer known",
    Cause.EVICTED: "evicted",
    Cause.DIFFERS: "differing from known prompts",
    Cause.PARTIAL: "partly filled",
    Cause.LOAD_FAILED: "not loaded by a fault",
    Cause.ELSEWHERE: "elsewhere and too far",
    Cause.CHEAPER: "cheaper to compute",
    Cause.BEHIND: "behind a missing one",
    Cause.NOT_READ: "not looked up",
}
"""Each cause in a sum of blocks."""


def _duration(age_s: float) -> str:
    for unit, length_s in (("h", 3600), ("min", 60)):
        if age_s >= 2 * length_s:
            return f"{age_s / length_s:.0f} {unit}"
    return f"{age_s:.1f} s"
