"""A cold tier whose calls and blocks take time on a clock that moves only with work."""

from collections.abc import Generator, Sequence

from kv_store.tiers.memory_tier import MemoryTier
from tests.harness.fake_clock import FakeClock
from wire.ids import BlockKey
from wire.layout import KVLayout


class PacedTier(MemoryTier):
    """A cold tier whose calls and bytes take time."""

    def __init__(self, layout: KVLayout, clock: FakeClock, latency_s: float, block_s: float) -> None:
        super().__init__(layout, max_blocks=1 << 20)
        self.latency_s, self.block_s = latency_s, block_s
        self._now = clock
        self.num_calls = 0

    def exists(self, keys: Sequence[BlockKey]) -> list[bool]:
        self.num_calls += 1
        self._now.now += self.latency_s
        return super().exists(keys)

    def _read(self, keys: Sequence[BlockKey], into: Sequence[memoryview]) -> Generator[bytes, None, None]:
        self._now.now += self.latency_s
        for front in super()._read(keys, into):
            self._now.now += self.block_s
            yield front
