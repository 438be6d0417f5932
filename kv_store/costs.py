"""Costs of blocks: to read them from a tier or another node, or to compute them, in seconds, learned as both happen.

read n blocks of a source    ask + first + (n - 1) * rest      a latency, and payload / bandwidth
compute n blocks             n * tokens of a block * prefill
"""

import time
from collections.abc import Callable, Generator, Sequence
from contextlib import closing
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
        gain_s = num_blocks * compute_s - self.first.mean_s - (num_blocks - 1) * self.rest.mean_s
        return self.ask.mean_s - max(self.found, _MIN_FOUND) * gain_s


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

    def worth_asking(self, sources: Sequence[BlockSource], num_blocks: int) -> list[BlockSource]:
        """Lists the sources whose lookup is expected to pay, and sources due for a probe."""
        return [source for source in sources if num_blocks and self._is_worth_asking(self.of(source), num_blocks)]

    def _is_worth_asking(self, costs: SourceCosts, num_blocks: int) -> bool:
        pays = costs.lookup_s(num_blocks, self.compute_s) <= _SLACK_S
        costs.is_probed = not pays and self._clock() >= costs.due_s
        return pays or costs.is_probed

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
