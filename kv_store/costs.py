"""Costs of blocks: to read them from a tier or another node, or to compute them, in seconds, learned as both happen.

read n blocks of a source    ask + first + (n - 1) * rest      a latency, and payload / bandwidth
compute n blocks             n * tokens of a block * prefill
split n blocks at m          max(compute m, read n - m), the front computed while the back is read
"""

import time
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import takewhile
from weakref import WeakKeyDictionary

from kv_store.tiers.cold_tier import BlockSource
from wire.ids import BlockKey
from wire.tier import Duration

_MIN_TOKENS = 64
_PREFILL_PRIOR_S = 0.0006
_READ_PRIOR_S = 0.001
_FOUND_WEIGHT = 0.2
_MIN_FOUND = 0.02
_SLACK_S = 0.01
_MIN_BUDGET_S = 0.25
_PROBED_BLOCKS = 2
_REST_PER_PROBE = 50
_MOST_OF_UNSPLIT = 0.9
_GROUP_S = 0.2
_FIRSTS_PER_GROUP = 4
_CHUNKS_PER_GROUP = 6


class SourceCosts:
    """The costs of one source, and the share of blocks that lookups found there.

    due_s: when a source that is not worth its time is tried again; then at most a fiftieth of all time goes there.
    """

    def __init__(self) -> None:
        self.ask, self.first, self.rest = (Duration(_READ_PRIOR_S) for _ in range(3))
        self.found = 1.0
        self.due_s = 0.0
        self.is_probed = False

    def note_lookup(self, took_s: float, num_found: int, num_asked: int) -> None:
        self.ask.learn(took_s)
        self.found += _FOUND_WEIGHT * (num_found / num_asked - self.found)

    def note_reads(self, took_s: Sequence[float]) -> None:
        """Learns from the times that successive blocks took."""
        if took_s:
            self.first.learn(took_s[0])
        if len(took_s) > 1:
            self.rest.learn(sum(took_s[1:]) / (len(took_s) - 1))

    def lookup_s(self, num_blocks: int, compute_s: float) -> float:
        """Returns the time that a lookup of blocks, and reading the found ones, is expected to lose."""
        return self._lost_s(num_blocks * compute_s - self._read_s(num_blocks))

    def split_lookup_s(self, num_blocks: int, compute_s: float) -> float:
        """Returns the time that a lookup is expected to lose where the found blocks may be split, if that pays."""
        all_s, read_s = num_blocks * compute_s, self._read_s(num_blocks)
        split_s = all_s * read_s / (all_s + read_s)
        return self._lost_s(all_s - min(read_s, split_s if split_s < _MOST_OF_UNSPLIT * all_s else all_s))

    def _read_s(self, num_blocks: int) -> float:
        return self.first.mean_s + (num_blocks - 1) * self.rest.mean_s

    def _lost_s(self, gain_s: float) -> float:
        return self.ask.mean_s - max(self.found, _MIN_FOUND) * gain_s


LookupS = Callable[[SourceCosts, int, float], float]
"""Returns the time that a lookup is expected to lose: of a source, by blocks and the seconds to compute one."""


@dataclass(frozen=True)
class Split:
    """Found blocks, divided: the first `num_first` are read at once, the blocks up to `stop` later, from the end."""

    num_first: int
    stop: int


class Costs:
    """The costs of all sources of one worker and of its prefill. One thread reads blocks, one computes them.

    clock: monotonic, in seconds.
    """

    def __init__(self, block_size: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._block_size = block_size
        self._clock = clock
        self._prefill = Duration(_PREFILL_PRIOR_S)
        self._sources = WeakKeyDictionary[BlockSource, SourceCosts]()

    def of(self, source: BlockSource) -> SourceCosts:
        if source not in self._sources:
            self._sources[source] = SourceCosts()
        return self._sources[source]

    def note_prefill(self, num_tokens: int, took_s: float) -> None:
        """Learns from a run of the model; not from one of few tokens, nor where no time is counted."""
        if num_tokens >= _MIN_TOKENS and took_s > 0:
            self._prefill.learn(took_s / num_tokens)

    @property
    def prefill_token_s(self) -> float | None:
        """Seconds of prefill a token; None before the first prompt."""
        return self._prefill.learned_s

    @property
    def compute_s(self) -> float:
        """Seconds to compute a block."""
        return self._block_size * self._prefill.mean_s

    def budget_s(self, num_blocks: int) -> float:
        """Returns the time after which a read of `num_blocks`, expected to be quicker, is given up."""
        return max(num_blocks * self.compute_s, _MIN_BUDGET_S)

    def worth_asking(
        self, sources: Sequence[BlockSource], num_blocks: int, lookup_s: LookupS = SourceCosts.lookup_s
    ) -> list[BlockSource]:
        """Lists the sources whose lookup is expected to pay, and sources due for a probe."""
        costs = {source: self.of(source) for source in sources if num_blocks}
        return [
            source
            for source, one in costs.items()
            if self._is_worth_asking(one, lookup_s(one, num_blocks, self.compute_s))
        ]

    def _is_worth_asking(self, costs: SourceCosts, lost_s: float) -> bool:
        costs.is_probed = lost_s > _SLACK_S and self._clock() >= costs.due_s
        return lost_s <= _SLACK_S or costs.is_probed

    def num_worth_reading(self, sources: Sequence[BlockSource | None]) -> int:
        """Returns how many blocks from the front are worth reading, as the rest is computed; None is the arena.

        The most blocks that lose at most 10 ms to the best split: computing holds up others, reading does not.
        """
        gains_s = [0.0]
        num_read = dict.fromkeys(sources, 0)
        for source in sources:
            gains_s.append(gains_s[-1] + self.compute_s - self._read_s(source, num_read[source]))
            num_read[source] += 1
        enough_s = max(gains_s) - _SLACK_S
        return max(place for place, gain_s in enumerate(gains_s) if gain_s >= enough_s)

    def whole(self, sources: Sequence[BlockSource | None]) -> Split:
        """Divides found blocks into a front that is worth reading, and a rest to compute."""
        num_first = self.num_worth_reading(sources)
        return Split(num_first, num_first)

    def _read_s(self, source: BlockSource | None, num_before: int) -> float:
        costs = None if source is None else self.of(source)
        if costs is None or (costs.is_probed and num_before < _PROBED_BLOCKS):
            return 0.0
        return costs.rest.mean_s if num_before else costs.first.mean_s

    def exists(self, source: BlockSource, keys: Sequence[BlockKey]) -> list[bool]:
        """Asks a source, and learns from it."""
        costs, began_s = self.of(source), self._clock()
        found = source.exists(keys)
        took_s = self._clock() - began_s
        costs.note_lookup(took_s, sum(found), len(keys))
        self._rest(costs, took_s)
        return found

    def timed(self, source: BlockSource, checksums: Generator[bytes, None, None]) -> Generator[bytes, None, None]:
        """Passes on the blocks of a source, and learns from the times that it took over them."""
        took_s: list[float] = []
        costs = self.of(source)
        try:
            with closing(checksums):
                checksum: bytes | None = b""
                while checksum is not None:
                    began_s = self._clock()
                    checksum = next(checksums, None)
                    took_s.append(self._clock() - began_s)
                    if checksum is not None:
                        yield checksum
        finally:
            costs.note_reads(took_s)
            self._rest(costs, sum(took_s))

    def _rest(self, costs: SourceCosts, took_s: float) -> None:
        costs.due_s = self._clock() + _REST_PER_PROBE * took_s


class SplitRule:
    """The rule by which a prefix is split: its back is read, in groups from its end, while its front is computed."""

    def __init__(self, costs: Costs) -> None:
        self._costs = costs

    def divide(self, sources: Sequence[BlockSource | None]) -> Split:
        """Leaves all but the first blocks of the arena for later, where that beats all else by 10 ms and a tenth."""
        num_here = next((place for place, source in enumerate(sources) if source is not None), len(sources))
        whole, num_split = self._costs.whole(sources), len(sources) - num_here
        read_s, back_s = ([0.0, *self._reads_s(some)] for some in (sources, reversed(sources[num_here:])))
        whole_s = read_s[whole.stop] + (len(sources) - whole.stop) * self._costs.compute_s
        split_s = min(max((num_split - num) * self._costs.compute_s, took_s) for num, took_s in enumerate(back_s))
        pays = split_s < min(whole_s - _SLACK_S, _MOST_OF_UNSPLIT * whole_s)
        return Split(num_here, len(sources)) if pays else whole

    def num_in_group(self, sources: Sequence[BlockSource | None], num_before: Sequence[int]) -> int:
        """Returns how many of these blocks, from the last one on, to read while the blocks before them are computed.

        num_before: for each block, the blocks to compute before it.
        """
        most_s, compute_s = self.group_s(sources), self._costs.compute_s
        reads = zip(self._reads_s(reversed(sources)), reversed(num_before), strict=True)
        return sum(1 for _ in takewhile(lambda read: read[0] <= min(most_s, read[1] * compute_s), reads))

    def num_in_chunk(self, sources: Sequence[BlockSource | None]) -> int:
        """Returns how many blocks to compute in one step beside these: a sixth of a group's time."""
        return max(1, int(self.group_s(sources) / _CHUNKS_PER_GROUP / self._costs.compute_s))

    def group_s(self, sources: Sequence[BlockSource | None]) -> float:
        """Returns the most seconds that a group may take: a fifth, or four latencies if they are longer."""
        firsts_s = (self._costs.of(source).first.mean_s for source in {*sources} if source is not None)
        return max(_GROUP_S, _FIRSTS_PER_GROUP * max(firsts_s, default=0.0))

    def group_budget_s(self, sources: Sequence[BlockSource | None]) -> float:
        """Returns the time after which the read of a group is given up."""
        return 2 * self.group_s(sources)

    def _reads_s(self, sources: Iterable[BlockSource | None]) -> Iterator[float]:
        """Yields for each block the seconds until it is read, in one call of each source."""
        read_s, begun = 0.0, set[BlockSource]()
        for source in sources:
            if source is not None:
                read_s += self._costs.of(source).rest.mean_s if source in begun else self._costs.of(source).first.mean_s
                begun.add(source)
            yield read_s
