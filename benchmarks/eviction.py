"""Hit rates of the eviction policies over a trace of requests, beside Belady's order and an endless cache.

    python benchmarks/eviction.py --trace mooncake_conversation.jsonl --share 0.1 --json
    python benchmarks/eviction.py --trace agents --share 0.1
    python benchmarks/eviction.py --trace mooncake_conversation.jsonl --scan 0.5 --share 0.03

--trace: a file of Mooncake's format (a JSON object a line, with `hash_ids`), or `agents`: sessions of many turns, 20 at
once, with tools of 1 to 60 s between turns, and forks. --scan: prompts that never come back, for each other request.
--share: the pool's size, of the trace's different blocks. The product's policies (lru, hit_density) run in its own
ledger; 2Q (Johnson and Shasha, VLDB 1994) and S3-FIFO (Yang et al., SOSP 2023) run as their papers have them.
Rates are of the second half's blocks: blocks found as a prefix, over blocks that an endless cache finds.
"""

import argparse
import hashlib
import heapq
import json
import random
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Protocol, TypedDict

from kv_store.eviction.hit_density import HitDensity
from kv_store.eviction.order import EvictionPolicy
from kv_store.eviction.policy import LeastRecentlyUsed
from kv_store.ledger import Ledger
from wire.ids import BlockKey, PageId

POLICIES: dict[str, Callable[[int], EvictionPolicy]] = {"lru": LeastRecentlyUsed, "hit_density": HitDensity}
Request = Sequence[int]
_SYSTEM_BLOCKS = 8
_SESSIONS_AT_ONCE = 20
_NEVER = 1 << 60


def main() -> None:
    arguments = _parser().parse_args()
    requests = (
        list(agents(arguments.seed, arguments.sessions)) if arguments.trace == "agents" else read(arguments.trace)
    )
    num_blocks = int(len({block for request in requests for block in request}) * arguments.share)
    requests = list(with_scan(requests, arguments.scan, arguments.seed))
    rates = compare(requests, num_blocks)
    if arguments.json:
        print(json.dumps(rates))
        return
    print(f"{len(requests)} requests, a pool of {num_blocks} blocks; an endless cache finds {rates['infinite']:.3f}")
    for name, rate in [*rates["policies"].items(), ("belady", rates["belady"])]:
        print(f"| {name} | {rate:.3f} |")


class Rates(TypedDict):
    """Hits over an endless cache's hits; `infinite`: that cache's hits over all blocks."""

    policies: dict[str, float]
    belady: float
    infinite: float


def compare(requests: Sequence[Request], num_blocks: int) -> Rates:
    endless = _second_half(endless_hits(requests))
    found = {name: hits(requests, num_blocks, make) for name, make in POLICIES.items()}
    found |= {name: peer_hits(requests, make(num_blocks)) for name, make in PEERS.items()}
    return {
        "policies": {name: _second_half(counts) / endless for name, counts in found.items()},
        "belady": _second_half(clairvoyant_hits(requests, num_blocks)) / endless,
        "infinite": endless / _second_half([len(request) for request in requests]),
    }


def hits(requests: Sequence[Request], num_blocks: int, policy: Callable[[int], EvictionPolicy]) -> list[int]:
    """Returns the blocks of each request that a pool finds as its prefix."""
    ledger = Ledger[PageId](num_blocks, policy=policy)
    return [_serve(ledger, [_key(block) for block in request[:num_blocks]]) for request in requests]


def _serve(ledger: Ledger[PageId], keys: Sequence[BlockKey]) -> int:
    pages: list[PageId] = []
    for key in keys:
        if (page := ledger.find(key)) is None:
            break
        ledger.acquire(page)
        pages.append(page)
    num_hits = len(pages)
    for page in ledger.allocate(len(keys) - num_hits):
        place = len(pages)
        ledger.index(page, keys[place], parent=keys[place - 1] if place else None)
        pages.append(page)
    for page in reversed(pages):
        ledger.free(page)
    return num_hits


class Peer(Protocol):
    """A cache of blocks without families."""

    def __contains__(self, block: int) -> bool: ...

    def use(self, block: int) -> None: ...


class TwoQueues:
    """Blocks seen once first in, first out, in a quarter; blocks that come back later by last use."""

    def __init__(self, num_blocks: int) -> None:
        self._max_new, self._max_kept, self._max_gone = num_blocks // 4, num_blocks - num_blocks // 4, num_blocks // 2
        self._new, self._kept, self._gone = OrderedDict[int, int](), OrderedDict[int, int](), OrderedDict[int, int]()

    def __contains__(self, block: int) -> bool:
        return block in self._new or block in self._kept

    def use(self, block: int) -> None:
        if block in self._kept:
            self._kept.move_to_end(block)
        elif block in self._gone:
            del self._gone[block]
            _push(self._kept, self._max_kept, block)
        elif block not in self._new and (gone := _push(self._new, self._max_new, block)) is not None:
            _push(self._gone, self._max_gone, gone)


class S3Fifo:
    """A small queue for a tenth, a main one where each use gives a round more, and the small one's latest losses."""

    def __init__(self, num_blocks: int) -> None:
        self._max_small, self._max_main = num_blocks // 10, num_blocks - num_blocks // 10
        self._small, self._main, self._gone = OrderedDict[int, int](), OrderedDict[int, int](), OrderedDict[int, int]()

    def __contains__(self, block: int) -> bool:
        return block in self._small or block in self._main

    def use(self, block: int) -> None:
        for queue in (self._small, self._main):
            if block in queue:
                queue[block] = min(queue[block] + 1, 3)
                return
        if self._gone.pop(block, None) is not None:
            self._add_to_main(block)
            return
        self._small[block] = 0
        while len(self._small) > self._max_small:
            oldest, uses = self._small.popitem(last=False)
            if uses > 1:
                self._add_to_main(oldest)
            else:
                _push(self._gone, self._max_main, oldest)

    def _add_to_main(self, block: int) -> None:
        self._main[block] = 0
        while len(self._main) > self._max_main:
            oldest, uses = self._main.popitem(last=False)
            if uses:
                self._main[oldest] = uses - 1


def _push(queue: "OrderedDict[int, int]", most: int, block: int) -> int | None:
    """Adds a block; returns the oldest one where there are too many."""
    queue[block] = 0
    return queue.popitem(last=False)[0] if len(queue) > most else None


PEERS: dict[str, Callable[[int], Peer]] = {"2q": TwoQueues, "s3_fifo": S3Fifo}


def peer_hits(requests: Sequence[Request], cache: Peer) -> list[int]:
    found = []
    for request in requests:
        found.append(next((index for index, block in enumerate(request) if block not in cache), len(request)))
        for block in reversed(request):
            cache.use(block)
    return found


def endless_hits(requests: Sequence[Request]) -> list[int]:
    seen: set[int] = set()
    found = []
    for request in requests:
        found.append(_prefix(request, seen))
        seen.update(request)
    return found


def clairvoyant_hits(requests: Sequence[Request], num_blocks: int) -> list[int]:
    """Returns the hits of Belady's order: the block that is wanted latest goes first, and the last one of a request."""
    wanted_next, after = [], dict[int, int]()
    for index in reversed(range(len(requests))):
        wanted_next.append([after.get(block, _NEVER) for block in requests[index]])
        after.update(dict.fromkeys(requests[index], index))
    cached: dict[int, int] = {}
    latest: list[tuple[int, int, int]] = []
    found = []
    for request, next_uses in zip(requests, reversed(wanted_next), strict=True):
        found.append(_prefix(request, cached))
        for place, (block, next_use) in enumerate(zip(request, next_uses, strict=True)):
            cached[block] = next_use
            heapq.heappush(latest, (-next_use, -place, block))
        while len(cached) > num_blocks:
            next_use, _, block = heapq.heappop(latest)
            if cached.get(block) == -next_use:
                del cached[block]
    return found


def read(path: str) -> list[Request]:
    return [json.loads(line)["hash_ids"] for line in Path(path).read_text().splitlines()]


def agents(seed: int, num_sessions: int) -> Iterator[Request]:
    """Draws sessions of 20 to 40 turns in the order of their calls; one turn in ten forks from an earlier point."""
    rng = random.Random(seed)
    num_drawn = _SYSTEM_BLOCKS
    waiting: list[tuple[float, int, list[int], int]] = []

    def new_blocks(num: int) -> list[int]:
        nonlocal num_drawn
        num_drawn += num
        return list(range(num_drawn - num, num_drawn))

    for session in range(num_sessions):
        if len(waiting) < _SESSIONS_AT_ONCE:
            start = [*range(_SYSTEM_BLOCKS), *new_blocks(rng.randint(4, 30))]
            heapq.heappush(waiting, (3.0 * session, session, start, rng.randint(20, 40)))
    num_started = len(waiting)
    while waiting:
        time_s, session, blocks, num_left = heapq.heappop(waiting)
        yield blocks
        if num_left > 1:
            kept = blocks[: rng.randint(_SYSTEM_BLOCKS, len(blocks))] if rng.random() < 0.1 else blocks
            longer = kept + new_blocks(rng.choice([1, 1, 2, 3, 8]))
            heapq.heappush(waiting, (time_s + 2 + rng.uniform(1, 60), session, longer, num_left - 1))
        elif num_started < num_sessions:
            start = [*range(_SYSTEM_BLOCKS), *new_blocks(rng.randint(4, 30))]
            heapq.heappush(waiting, (time_s + rng.uniform(1, 10), num_started, start, rng.randint(20, 40)))
            num_started += 1


def with_scan(requests: Sequence[Request], share: float, seed: int) -> Iterator[Request]:
    """Adds prompts of 5 to 60 blocks that no other request has."""
    rng = random.Random(seed)
    num_drawn = 1 << 40
    for request in requests:
        yield request
        if rng.random() < share:
            num = rng.randint(5, 60)
            yield range(num_drawn, num_drawn + num)
            num_drawn += num


def _prefix(request: Request, cached: set[int] | dict[int, int]) -> int:
    return next((index for index, block in enumerate(request) if block not in cached), len(request))


def _second_half(counts: Sequence[int]) -> int:
    return sum(counts[len(counts) // 2 :])


def _key(block: int) -> BlockKey:
    return BlockKey(hashlib.sha256(block.to_bytes(8, "little")).digest())


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", required=True)
    parser.add_argument("--share", type=float, default=0.1)
    parser.add_argument("--scan", type=float, default=0.0)
    parser.add_argument("--sessions", type=int, default=400)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", action="store_true")
    return parser


if __name__ == "__main__":
    main()
