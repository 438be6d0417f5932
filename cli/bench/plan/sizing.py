"""The search for the fewest workers that keep limits on latency: each candidate serves the load, on virtual time.

A pool that grows never makes requests late, so that bisection finds a size; candidates that have missed the share of
good requests for certain end at once.
"""

import asyncio
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import pairwise

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


@dataclass
class PlannedLoad:
    """A load, the cluster that serves it, and its limits; remembers the candidates that have served it."""

    arrivals: Sequence[Arrival]
    settings: TwinSettings
    slo: Slo
    tell: Callable[[TriedSizes], object] = lambda _: None
    tried: dict[PoolSizes, TriedSizes] = field(default_factory=dict)

    def try_sizes(self, prefill: int, decode: int) -> bool:
        """Serves the load until its end, or until the share is missed, once; returns whether the limits were kept."""
        sizes = PoolSizes(prefill, decode)
        if sizes not in self.tried:
            self.tried[sizes] = self._serve(sizes, int((1.0 - self.slo.share) * len(self.arrivals) + 1e-9))
            self.tell(self.tried[sizes])
        return self.tried[sizes].share >= self.slo.share

    def served_whole_by(self, sizes: PoolSizes) -> TriedSizes:
        """Serves the load to its end, whatever is missed."""
        return self._serve(sizes, len(self.arrivals))

    def _serve(self, sizes: PoolSizes, most_missed: int) -> TriedSizes:
        return virtual_time.run(self._play(sizes, most_missed))

    async def _play(self, sizes: PoolSizes, most_missed: int) -> TriedSizes:
        records, num_missed = list[Record](), 0

        def take(record: Record) -> None:
            nonlocal num_missed
            records.append(record)
            num_missed += record.error is not None or not self.slo.holds_for(record)
            if num_missed > most_missed:
                playing.cancel()

        async with TwinCluster(self.settings, sizes) as cluster:
            playing = asyncio.ensure_future(cluster.run(self.arrivals, tell=take))
            with suppress(asyncio.CancelledError):
                await playing
            ended_s = asyncio.get_running_loop().time()
            busy = {role: cluster.busy_s(role) / ended_s for role in Role if sizes[role]}
        share = 1.0 - num_missed / len(self.arrivals)
        return TriedSizes(sizes, share, len(records) == len(self.arrivals), summarize([records], self.slo), busy)


def find_sizes(load: PlannedLoad, max_workers: int) -> list[TriedSizes]:
    """Tries sizes of one pool, then of two, until the fewest workers of each are known that keep the limits.

    Returns the sizes tried that the bound allows; if none of them keep the limits, also how sizes of `max_workers`
    serve the whole load: one pool, and two that are split at each quarter.
    """
    smallest(lambda decode: load.try_sizes(0, decode), max_workers)
    _try_pairs(load, max_workers)
    tried = [one for one in load.tried.values() if one.num_workers <= max_workers]
    if any(one.share >= load.slo.share for one in tried):
        return tried
    splits = sorted({0, *(max_workers * quarter // 4 for quarter in range(1, 4))})
    return [*tried, *(load.served_whole_by(PoolSizes(prefill, max_workers - prefill)) for prefill in splits)]


def _try_pairs(load: PlannedLoad, max_workers: int) -> None:
    """Tries two pools up to the least sum that keeps the limits: first the least of each beside a large other pool."""
    most = max_workers - 1
    prefill = smallest(lambda num: load.try_sizes(num, most), most)
    decode = None if prefill is None else smallest(lambda num: load.try_sizes(most, num), most)
    if prefill is not None and decode is not None:
        for total in range(prefill + decode, max_workers + 1):
            if any(load.try_sizes(num, total - num) for num in range(prefill, total - decode + 1)):
                return


def smallest(is_enough: Callable[[int], bool], most: int) -> int | None:
    """Finds the smallest number from 1 to `most` that is enough; numbers above it are, too. None if there is none."""
    steps = [0, *(1 << bit for bit in range(max(0, most - 1).bit_length())), most]
    found = next(((low, high) for low, high in pairwise(steps) if low < high and is_enough(high)), None)
    if found is None:
        return None
    between = range(found[0] + 1, found[1])
    return between.start + bisect_left(between, True, key=is_enough)
