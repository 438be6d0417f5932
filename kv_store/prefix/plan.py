"""The plan of a prefix: from found blocks, their sources and costs to steps. Pure.

    whole    Read 0:k   then k:n is computed
    split    Read 0:h   then h:n is computed, beside a Read h:n in groups, from its end on

h: the number of first blocks in the arena. k: the blocks from the front that are worth reading. A block that was read
before computing reaches it is not computed.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile

from kv_store.prefix.costs import MOST_OF_UNSPLIT, SLACK_S, Costs
from kv_store.tiers.cold_tier import BlockSource
from wire.block_names import BlockName

_PROBED_BLOCKS = 2
_GROUP_S = 0.2
_FIRSTS_PER_GROUP = 4
_CHUNKS_PER_GROUP = 6


@dataclass(frozen=True)
class Needs:
    """The blocks that each block needs to be of use; they are read, too. By default all before it.

    starts: for each block the place of the first block that it needs, ascending; None: all before it. num_sinks: with
    `starts`, the first blocks, which all others need. splits: whether earlier blocks may be computed while a block is
    read.
    """

    starts: Sequence[int] | None = None
    num_sinks: int = 0
    splits: bool = False

    def places(self, end: int) -> list[int]:
        """Lists the blocks to read so that the first `end` can be used."""
        start = self.starts[end - 1] if self.starts and end else 0
        return [*range(min(self.num_sinks, start)), *range(start, end)]

    def usable_end(self, from_the_end: Iterable[tuple[int, bool]]) -> int:
        """Finds the most blocks that are usable. from_the_end: places, and whether the block there was found."""
        assert self.starts is not None
        starts = self.starts
        return usable_end(len(starts), lambda end: starts[end - 1], from_the_end)


FRONT = Needs()


def usable_end(end: int, first_needed: Callable[[int], int], from_the_end: Iterable[tuple[int, bool]]) -> int:
    """Finds the most usable blocks, going from hole to hole: blocks before a hole are usable without it.

    end: the number of blocks. first_needed: finds the first place that this many blocks need.
    """
    start = first_needed(end) if end else 0
    for place, is_found in from_the_end:
        if place < start:
            break
        if not is_found:
            end, start = place, first_needed(place) if place else 0
    return end


@dataclass(frozen=True)
class Read:
    """A step that reads blocks in order, each from its source: None is the node's arena. costs: the sources' costs."""

    names: Sequence[BlockName]
    sources: Sequence[BlockSource | None]
    costs: Costs

    def at(self, places: Iterable[int]) -> "Read":
        """Returns the step for the blocks at these places alone."""
        found = [(self.names[place], self.sources[place]) for place in places]
        return replace(self, names=[name for name, _ in found], sources=[source for _, source in found])

    def part(self, start: int, stop: int) -> "Read":
        return self.at(range(start, stop))

    @property
    def num_here(self) -> int:
        """The number of arena blocks before the first block from elsewhere."""
        return sum(1 for _ in takewhile(lambda source: source is None, self.sources))

    def num_worth_reading(self, probes: Collection[BlockSource] = ()) -> int:
        """Returns how many blocks from the front are worth reading, the rest being computed.

        It is the most blocks within 10 ms of the best division, for computing delays other requests and reading does
        not. probes: sources from which two blocks are read at any cost.
        """
        gains_s = [0.0]
        num_read = dict.fromkeys(self.sources, 0)
        for source in self.sources:
            is_free = source is None or (source in probes and num_read[source] < _PROBED_BLOCKS)
            read_s = 0.0 if is_free else self._read_s(source, num_read[source] > 0)
            gains_s.append(gains_s[-1] + self.costs.compute_s - read_s)
            num_read[source] += 1
        enough_s = max(gains_s) - SLACK_S
        return max(place for place, gain_s in enumerate(gains_s) if gain_s >= enough_s)

    def num_in_group(self, num_before: Sequence[int]) -> int:
        """Returns how many of these blocks, counted from the last, to read while the blocks before them are computed.

        num_before: for each block, the blocks to compute before it.
        """
        reads = zip(self.reads_s(reversed(self.sources)), reversed(num_before), strict=True)
        most_s, compute_s = self.group_s, self.costs.compute_s
        return sum(1 for _ in takewhile(lambda read: read[0] <= min(most_s, read[1] * compute_s), reads))

    @property
    def num_in_chunk(self) -> int:
        """The blocks to compute in a step while these are read: a sixth of a group's time."""
        return max(1, int(self.group_s / _CHUNKS_PER_GROUP / self.costs.compute_s))

    @property
    def group_s(self) -> float:
        """The most seconds of a group: a fifth of a second, or four latencies if longer."""
        firsts_s = (self._read_s(source, False) for source in {*self.sources})
        return max(_GROUP_S, _FIRSTS_PER_GROUP * max(firsts_s, default=0.0))

    def reads_s(self, sources: Iterable[BlockSource | None]) -> Iterator[float]:
        """Yields for each block the seconds until it is read, with one call of each source."""
        read_s, begun = 0.0, set[BlockSource | None]()
        for source in sources:
            read_s += self._read_s(source, source in begun)
            begun.add(source)
            yield read_s

    def _read_s(self, source: BlockSource | None, has_begun: bool) -> float:
        if source is None:
            return 0.0
        costs = self.costs.of(source)
        return costs.rest.mean_s if has_begun else costs.first.mean_s


Plan = tuple[Read, Read | None]
"""The blocks to read first, and the blocks to read while all others are computed."""


def plan_whole(found: Read, probes: Collection[BlockSource]) -> Plan:
    """Plans to read the front that is worth it, and to compute the rest."""
    return found.part(0, found.num_worth_reading(probes)), None


def plan_split(found: Read, probes: Collection[BlockSource]) -> Plan:
    """Plans to read the first arena blocks, then the last blocks while the front is computed; always computes a tail.

    Plans the whole unless this is better than any other plan by 10 ms and a tenth.
    """
    num_blocks, num_here, compute_s = len(found.names), found.num_here, found.costs.compute_s
    whole, _ = plan_whole(found, probes)
    num_read = len(whole.names)
    whole_s = [0.0, *found.reads_s(found.sources)][num_read] + (num_blocks - num_read) * compute_s
    back_s = [0.0, *found.reads_s(reversed(found.sources[num_here:]))]
    split_s = min(max((num_blocks - num_here - num) * compute_s, took_s) for num, took_s in enumerate(back_s))
    if split_s >= min(whole_s - SLACK_S, MOST_OF_UNSPLIT * whole_s):
        return whole, None
    back = found.part(num_here, num_blocks - found.names[-1].is_tail)
    return found.part(0, num_here), back if back.names else None
