"""Costs of reading blocks from a tier or another node, and of computing them: seconds, learned from both.

read n blocks of a source    ask + first + (n - 1) * rest      a latency, and payload / bandwidth
compute n blocks             n * tokens of a block * prefill
split n blocks at m          max(compute m, read n - m), the front computed while the back is read

`kv_store.prefix.plan` chooses by them.
"""

import time
from collections.abc import Callable, Generator, Sequence
from contextlib import closing
from weakref import WeakKeyDictionary

from kv_store.tiers.cold_tier import BlockSource
from wire.ids import BlockKey
from wire.tier import Duration

MIN_TOKENS = 64
"""Least tokens of a run that tells what a token costs."""
_PREFILL_PRIOR_S = 0.0006
_READ_PRIOR_S = 0.001
_FOUND_WEIGHT = 0.2
_MIN_FOUND = 0.02
SLACK_S = 0.01
_MIN_BUDGET_S = 0.25
_REST_PER_PROBE = 50
MOST_OF_UNSPLIT = 0.9


class SourceCosts:
    """The costs of one source, and the share of blocks that lookups found there.

    due_s: time of the next probe of a source that does not pay; probes take at most a fiftieth of all time.
    """

    def __init__(self) -> None:
        self.ask, self.first, self.rest = (Duration(_READ_PRIOR_S) for _ in range(3))
        self.found = 1.0
        self.due_s = 0.0

    def note_lookup(self, took_s: float, num_found: int, num_asked: int) -> None:
        self.ask.learn(took_s)
        self.found += _FOUND_WEIGHT * (num_found / num_asked - self.found)

    def note_reads(self, took_s: Sequence[float]) -> None:
        """Learns from the durations of successive blocks."""
        self.first.learn(took_s[0])
        if len(took_s) > 1:
            self.rest.learn(sum(took_s[1:]) / (len(took_s) - 1))

    def lookup_s(self, num_blocks: int, compute_s: float) -> float:
        """Returns the time that a lookup of blocks, and reading found blocks, is expected to lose."""
        return self._lost_s(num_blocks * compute_s - self._read_s(num_blocks))

    def split_lookup_s(self, num_blocks: int, compute_s: float) -> float:
        """Returns the time that a lookup is expected to lose if found blocks may be split where that pays."""
        all_s, read_s = num_blocks * compute_s, self._read_s(num_blocks)
        split_s = all_s * read_s / (all_s + read_s)
        return self._lost_s(all_s - min(read_s, split_s if split_s < MOST_OF_UNSPLIT * all_s else all_s))

    def _read_s(self, num_blocks: int) -> float:
        return self.first.mean_s + (num_blocks - 1) * self.rest.mean_s

    def _lost_s(self, gain_s: float) -> float:
        return self.ask.mean_s - max(self.found, _MIN_FOUND) * gain_s


LookupS = Callable[[SourceCosts, int, float], float]
"""The time that a source's lookup is expected to lose, by number of blocks and seconds to compute a block."""


class Costs:
    """The costs of a worker's sources and of its prefill. One thread reads blocks, another computes them.

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
        """Learns from a run of the model, unless it has few tokens or no time."""
        if num_tokens >= MIN_TOKENS and took_s > 0:
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
        """Returns the time after which a read of `num_blocks` is abandoned as slower than computing."""
        return max(num_blocks * self.compute_s, _MIN_BUDGET_S)

    def worth_asking(
        self, sources: Sequence[BlockSource], num_blocks: int, lookup_s: LookupS = SourceCosts.lookup_s
    ) -> dict[BlockSource, bool]:
        """Lists the sources to ask, and whether each is a probe: a due lookup that is not expected to pay."""
        asked: dict[BlockSource, bool] = {}
        for source in sources if num_blocks else ():
            costs = self.of(source)
            is_dear = lookup_s(costs, num_blocks, self.compute_s) > SLACK_S
            if not is_dear or self._clock() >= costs.due_s:
                asked[source] = is_dear
        return asked

    def exists(self, source: BlockSource, keys: Sequence[BlockKey]) -> list[bool]:
        """Asks a source which blocks it has, and learns from the answer."""
        costs, began_s = self.of(source), self._clock()
        found = source.exists(keys)
        took_s = self._clock() - began_s
        costs.note_lookup(took_s, sum(found), len(keys))
        self._rest(costs, took_s)
        return found

    def timed(
        self, source: BlockSource, checksums: Generator[bytes, None, None], is_late: Callable[[], bool]
    ) -> Generator[bytes, None, None]:
        """Yields the source's checksums until it is late, and records the time of each block."""
        took_s: list[float] = []
        costs = self.of(source)
        try:
            with closing(checksums):
                checksum: bytes | None = b""
                while checksum is not None and not is_late():
                    began_s = self._clock()
                    checksum = next(checksums, None)
                    took_s.append(self._clock() - began_s)
                    if checksum is not None:
                        yield checksum
        finally:
            if took_s:
                costs.note_reads(took_s)
                self._rest(costs, sum(took_s))

    def _rest(self, costs: SourceCosts, took_s: float) -> None:
        costs.due_s = self._clock() + _REST_PER_PROBE * took_s
