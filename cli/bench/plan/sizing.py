"""The search for the fewest workers that keep limits on latency: each candidate serves the load, on virtual time.

A pool that grows never makes requests late, so that bisection finds a size; candidates that have missed the share of
good requests for certain end at once.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from cli.bench.latency import ModeSummary, Record, Slo, summarize
from cli.bench.plan import virtual_time
from cli.bench.plan.twin_cluster import TwinCluster, TwinSettings
from cli.bench.schedule import Arrival
from wire.pools import PoolSizes, Role


@dataclass(frozen=True)
class TriedSizes:
    """Sizes of the pools, and how they served the load. busy: the share of the time that the engines of a pool worked.

    share: requests within the limits; for a candidate that was given up, the most that it could have reached.
    """

    sizes: PoolSizes
    share: float
    is_whole: bool
    summary: ModeSummary
    busy: Mapping[Role, float]

    @property
    def num_workers(self) -> int:
        return self.sizes.prefill + self.sizes.decode


@dataclass(frozen=True)
class SizingVerdict:
    """The smallest candidates that keep the limits, of one pool and of two. tried: all within the bound on workers."""

    co_located: TriedSizes | None
    disaggregated: TriedSizes | None
    tried: Sequence[TriedSizes]

    @property
    def best(self) -> TriedSizes:
        """The candidate with the greatest share; candidates that served the whole load come first."""
        return max(self.tried, key=lambda one: (one.is_whole, one.share))

    @property
    def chosen(self) -> TriedSizes | None:
        """The candidate with the fewest workers; of equals the greater share, then the co-located one."""
        fit = [one for one in (self.co_located, self.disaggregated) if one is not None]
        return min(fit, key=lambda one: (one.num_workers, -one.share), default=None)


@dataclass
class PlannedLoad:
    """A load, the cluster that serves it, and its limits; remembers the candidates that have served it."""

    arrivals: Sequence[Arrival]
    settings: TwinSettings
    slo: Slo
    tell: Callable[[TriedSizes], object] = lambda _: None
    candidates: dict[tuple[int, int], TriedSizes] = field(default_factory=dict)

    def served_by(self, prefill: int, decode: int) -> TriedSizes:
        """Serves the load, up to its end or until the limits are missed for certain."""
        key = prefill, decode
        if key not in self.candidates:
            most_missed = int((1.0 - self.slo.share) * len(self.arrivals) + 1e-9)
            self.candidates[key] = self._serve(PoolSizes(prefill, decode), most_missed)
            self.tell(self.candidates[key])
        return self.candidates[key]

    def keeps(self, prefill: int, decode: int) -> bool:
        return self.served_by(prefill, decode).share >= self.slo.share

    def served_whole_by(self, sizes: PoolSizes) -> TriedSizes:
        """Serves the load to its end, whatever is missed."""
        return self._serve(sizes, len(self.arrivals))

    def _serve(self, sizes: PoolSizes, most_missed: int) -> TriedSizes:
        return virtual_time.run(self._play(sizes, most_missed))

    async def _play(self, sizes: PoolSizes, most_missed: int) -> TriedSizes:
        cluster, records = TwinCluster(self.settings), list[Record]()
        await cluster.start(sizes)
        num_missed, is_hopeless = 0, asyncio.Event()

        def take(record: Record) -> None:
            nonlocal num_missed
            records.append(record)
            num_missed += record.error is not None or not self.slo.holds_for(record)
            if num_missed > most_missed:
                is_hopeless.set()

        playing = asyncio.create_task(cluster.play(self.arrivals, take))
        giving_up = asyncio.create_task(is_hopeless.wait())
        await asyncio.wait([playing, giving_up], return_when=asyncio.FIRST_COMPLETED)
        if playing.done():
            playing.result()
        ended_s = asyncio.get_running_loop().time()
        busy = {role: cluster.busy_s(role) / ended_s for role in Role if sizes[role]}
        share = 1.0 - num_missed / len(self.arrivals)
        return TriedSizes(sizes, share, len(records) == len(self.arrivals), summarize([records], self.slo), busy)


def find_sizes(load: PlannedLoad, max_workers: int) -> SizingVerdict:
    """Finds the fewest workers that keep the limits, in one pool and in two; if none do, the largest sizes, too."""
    alone, pair = smallest(lambda decode: load.keeps(0, decode), max_workers), _smallest_pair(load, max_workers)
    co_located = None if alone is None else load.served_by(0, alone)
    disaggregated = None if pair is None else load.served_by(*pair)
    is_met = co_located is not None or disaggregated is not None
    reached = [] if is_met else [load.served_whole_by(sizes) for sizes in _largest(max_workers)]
    tried = [one for one in (*load.candidates.values(), *reached) if one.num_workers <= max_workers]
    return SizingVerdict(co_located, disaggregated, tried)


def _largest(max_workers: int) -> list[PoolSizes]:
    """Lists the sizes that take all workers: one pool, and two that are split at each quarter."""
    splits = {max_workers * quarter // 4 for quarter in range(1, 4)} - {0}
    return [PoolSizes(prefill, max_workers - prefill) for prefill in (0, *sorted(splits))]


def _smallest_pair(load: PlannedLoad, max_workers: int) -> tuple[int, int] | None:
    """Finds the least sum of two pools: from the least of each beside a large other pool, along the sums."""
    most = max_workers - 1
    prefill = smallest(lambda num: load.keeps(num, most), most)
    if prefill is None:
        return None
    decode = smallest(lambda num: load.keeps(most, num), most)
    if decode is None:
        return None
    pairs = (
        (num, total - num)
        for total in range(prefill + decode, max_workers + 1)
        for num in range(prefill, total - decode + 1)
    )
    return next((pair for pair in pairs if load.keeps(*pair)), None)


def smallest(is_enough: Callable[[int], bool], most: int) -> int | None:
    """Finds the smallest number from 1 to `most` that is enough; numbers above it are, too. None if there is none."""
    low, high = 0, 1
    while high < most and not is_enough(high):
        low, high = high, min(2 * high, most)
    if not is_enough(high):
        return None
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if is_enough(middle) else (middle, high)
    return high
