"""Prompt tokens that agents' requests compute in an arena, beside a clairvoyant order.

    python benchmarks/agents.py
    python benchmarks/agents.py --seed 2 --keep-share 0.5 --hints guess bound years
    python benchmarks/agents.py --seed 101 --seeds 10 --hints none bound years

Draws agents: 20 sessions at once, of 40 requests each, with tools of 1 to 60 s between them; one request in ten goes on
from an earlier point. A request's answer becomes part of the next prompt. Simulated time, so the machine does not
matter; the arena is the product's directory without bytes. Its size is a part of the blocks that the 20 sessions have
on average. Clairvoyant: Belady's order, the block that is wanted latest goes first.

Hints: `session` alone; `guess`: the tool's time as its caller guesses it, 0.5 to 2 times the true one; `bound`: 1 to 2
times; `60 s` for each tool; all of these with 0 after the last request, and `no end` like `bound` without that; `years`
for each tool in a quarter of the sessions, and `bound` in the others.

--seeds: with more than one, each cell is the mean of as many seeds from --seed on, and the worst of them.
"""

import argparse
import hashlib
import heapq
import random
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from statistics import fmean

from benchmarks.eviction import clairvoyant_hits
from kv_store.eviction.hit_density import HitDensity
from kv_store.eviction.order import EvictionPolicy
from kv_store.eviction.policy import LeastRecentlyUsed
from kv_store.node.directory import Directory
from kv_store.node.messages import Block, KeepHint
from kv_store.node.sessions import KeepLimits
from wire.block_names import BlockName
from wire.ids import BlockKey

BLOCK_TOKENS = 16
SYSTEM_BLOCKS = 8
SESSIONS_AT_ONCE = 20
REQUESTS = 40
SERVICE_S = 2.0
YEARS_S = 1e8
NAMESPACE = bytes(32)
POLICIES: dict[str, Callable[[int], EvictionPolicy]] = {"lru": LeastRecentlyUsed, "hit density": HitDensity}


@dataclass(frozen=True)
class Event:
    """A request's begin, with its prompt, or its end, with the answer's blocks, too: a path from the root.

    tool_s: the time until the session's next request; 0 after the last one. error: the error of a caller's guess of
    tool_s, 0 to 1.
    """

    at_s: float
    session: int
    blocks: Sequence[int]
    is_end: bool
    tool_s: float = 0.0
    error: float = 0.0


Hints = Callable[[Event], KeepHint | None]


def _hint(event: Event, keep_s: float | None) -> KeepHint:
    return KeepHint(NAMESPACE, hashlib.sha256(b"%d" % event.session).digest(), keep_s)


HINTS: dict[str, Hints] = {
    "none": lambda _: None,
    "session": lambda event: _hint(event, None),
    "guess": lambda event: _hint(event, event.tool_s * (0.5 + 1.5 * event.error)),
    "bound": lambda event: _hint(event, event.tool_s * (1 + event.error)),
    "60 s": lambda event: _hint(event, 60.0 if event.tool_s else 0.0),
    "no end": lambda event: _hint(event, event.tool_s * (1 + event.error) or None),
    "years": lambda event: _hint(event, event.tool_s * (1 + event.error) if event.session % 4 else YEARS_S),
}


def draw(seed: int, num_sessions: int) -> list[Event]:
    """Draws the events of all sessions, in order of time."""
    rng = random.Random(seed)
    events: list[Event] = []
    free = [(3.0 * place, place) for place in range(SESSIONS_AT_ONCE)]
    num_blocks = SYSTEM_BLOCKS

    def more(num: int) -> list[int]:
        nonlocal num_blocks
        num_blocks += num
        return [*range(num_blocks - num, num_blocks)]

    for session in range(num_sessions):
        now_s, place = heapq.heappop(free)
        blocks = [*range(SYSTEM_BLOCKS), *more(rng.randint(4, 30))]
        for nth in range(REQUESTS):
            events.append(Event(now_s, session, blocks, is_end=False))
            answered = blocks + more(rng.choice([1, 1, 2]))
            tool_s = rng.uniform(1, 60)
            end = Event(now_s + SERVICE_S, session, answered, True, tool_s, rng.random())
            events.append(end if nth < REQUESTS - 1 else replace(end, tool_s=0.0))
            is_fork = rng.random() < 0.1
            kept = answered[: rng.randint(SYSTEM_BLOCKS, len(answered))] if is_fork else answered
            blocks = kept + more(rng.choice([1, 1, 2, 5]))
            now_s += SERVICE_S + tool_s
        heapq.heappush(free, (now_s + rng.uniform(1, 10), place))
    return sorted(events, key=lambda event: event.at_s)


def average_live(events: Sequence[Event]) -> int:
    """Returns the blocks that sessions at once have on average."""
    num_requests = sum(event.is_end for event in events)
    return SESSIONS_AT_ONCE * sum(len(event.blocks) for event in events if event.is_end) // num_requests


def computed(events: Sequence[Event], found: Sequence[int]) -> int:
    """Counts the prompt tokens that are computed, by the blocks found at each event; the first of each are counted."""
    missing = [len(event.blocks) - num for event, num in zip(events, found, strict=True) if not event.is_end]
    return BLOCK_TOKENS * sum(missing)


def replay(events: Sequence[Event], directory: Directory, clock: list[float], hints: Hints) -> list[int]:
    """Returns the blocks of each event that the arena finds as its prefix."""
    found = []
    for event in events:
        clock[0] = event.at_s
        names = [_name(block, parent) for block, parent in zip(event.blocks, [-1, *event.blocks], strict=False)]
        keys = [name.key for name in names]
        lease = directory.lease("", keys, 1.0)
        found.append(next((n for n, entry in enumerate(lease.entries) if entry is None), len(keys)))
        slots = directory.reserve("", names, None).slots
        written = [Block(slot, name, bytes(16)) for slot, name in zip(slots, names, strict=True) if slot is not None]
        directory.commit("", written, None)
        directory.release(lease.lease_id)
        if event.is_end and (hint := hints(event)) is not None:
            directory.records.keep(keys, hint)
    return found


@cache
def _name(block: int, parent: int) -> BlockName:
    above = NAMESPACE if parent < 0 else _key(parent)
    return BlockName(_key(block), above, bytes(32), NAMESPACE)


@cache
def _key(block: int) -> BlockKey:
    return BlockKey(hashlib.sha256(b"block %d" % block).digest())


def row(events: Sequence[Event], policy: str, hint: str, sizes: Mapping[int, int], limits: KeepLimits) -> list[float]:
    """Returns the tokens computed in arenas of these slots, over the ones that a clairvoyant order computes in each."""
    ratios = []
    for num_slots, least in sizes.items():
        clock = [0.0]
        directory = Directory(num_slots, lambda clock=clock: clock[0], policy=POLICIES[policy], keeps=limits)  # type: ignore[misc]
        ratios.append(computed(events, replay(events, directory, clock, HINTS[hint])) / least)
        assert directory.records.check() == []
    return ratios


def clairvoyant(events: Sequence[Event], num_slots: int) -> int:
    return computed(events, clairvoyant_hits([event.blocks for event in events], num_slots))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sessions", type=int, default=40)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--shares", type=float, nargs="+", default=[0.25, 0.5, 0.75, 1.0])
    parser.add_argument("--keep-share", type=float, default=0.75)
    parser.add_argument("--hints", nargs="+", choices=HINTS, default=[*HINTS])
    arguments = parser.parse_args()
    limits = KeepLimits(share=arguments.keep_share)
    each = [
        table(draw(seed, arguments.sessions), arguments.shares, arguments.hints, limits)
        for seed in range(arguments.seed, arguments.seed + arguments.seeds)
    ]
    print("| order | hints | " + " | ".join(f"{share:.0%}" for share in arguments.shares) + " |")
    print("|---" * (2 + len(arguments.shares)) + "|")
    for order, hint in each[0]:
        columns = zip(*(rows[order, hint] for rows in each), strict=True)
        print(f"| {order} | {hint} | " + " | ".join(_cell(ratios) for ratios in columns) + " |")


def table(
    events: Sequence[Event], shares: Sequence[float], hints: Sequence[str], limits: KeepLimits
) -> dict[tuple[str, str], list[float]]:
    """Returns the rows of one seed by order and hints, and says what was drawn."""
    num_live = average_live(events)
    sizes = {num: clairvoyant(events, num) for num in (int(num_live * share) for share in shares)}
    sys.stderr.write(f"{len(events) // 2} requests; {num_live} blocks are live on average\n")
    endless = clairvoyant(events, 1 << 40)
    rows = {("endless", ""): [endless / least for least in sizes.values()]}
    rows["lru", "none"] = row(events, "lru", "none", sizes, limits)
    return rows | {("hit density", hint): row(events, "hit density", hint, sizes, limits) for hint in hints}


def _cell(ratios: Sequence[float]) -> str:
    """Shows one seed's ratio, or mean and worst of several."""
    return f"{ratios[0]:.2f}" if len(ratios) == 1 else f"{fmean(ratios):.2f} ({max(ratios):.2f})"


if __name__ == "__main__":
    main()
