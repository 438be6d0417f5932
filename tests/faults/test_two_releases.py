"""Two releases that share one Redis for a while: each finds its own blocks there, and only those."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import pytest
import redis

from engine.model.hash_model import HashModel
from kv_store import frame
from kv_store.tiers.redis_tier import RedisTier
from tests.faults.rest import at_rest
from tests.harness import assembled_worker, local_cluster
from tests.harness.answer import ask
from tests.harness.faulty_cluster import FaultyCluster
from tests.harness.local_cluster import Sizes
from tests.kv_store.names import MAC_KEY
from wire import block_names
from wire.convert import tiers_from_pb
from wire.layout import KVLayout

pytestmark = pytest.mark.redis
LAYOUT = KVLayout(num_layers=2, num_kv_heads=1, head_dim=8, block_size=16, dtype="float32")
OTHER_LAYOUT = KVLayout(num_layers=2, num_kv_heads=1, head_dim=8, block_size=32, dtype="float32")
PROMPT = tuple(range(100))
NUM_TOKENS = 20
AMPLE_S = 10.0


@dataclass(frozen=True)
class Release:
    """What is served under one name. Its model says other things if its seed is another. frames: their version."""

    fingerprint: bytes
    layout: KVLayout = LAYOUT
    seed: int = 0
    frames: int = block_names.FRAME_VERSION

    async def serve(self, redis_url: str) -> int:
        """Tokens of the prompt that came from Redis, to workers and an arena that were empty; all goes there."""
        model = HashModel(self.layout, vocab_size=300, seed=self.seed)
        async with self._running(model, redis_url) as cluster:
            reader = cluster.open(ask(PROMPT, NUM_TOKENS))
            [choice] = await reader.read_all()
            assert choice.token_ids == model.oracle(PROMPT, NUM_TOKENS)
            await at_rest(cluster)
            cluster.move_to_cold()
            assert reader.complete is not None
            return tiers_from_pb(reader.complete.usage.cached_tokens).get("redis", 0)

    @asynccontextmanager
    async def _running(self, model: HashModel, redis_url: str) -> AsyncIterator[FaultyCluster]:
        with pytest.MonkeyPatch.context() as patch:
            for module in (local_cluster, assembled_worker):
                patch.setattr(module, "FINGERPRINT", self.fingerprint)
            for module in (block_names, frame):
                patch.setattr(module, "FRAME_VERSION", self.frames)
            cluster = FaultyCluster(model, Sizes())
            cold = RedisTier(redis_url, self.layout, MAC_KEY, AMPLE_S)
            patch.setattr(cluster, "cold", cold)
            await cluster.start(1, 1)
            try:
                yield cluster
            finally:
                await cluster.stop()
                cold.close()


@pytest.mark.parametrize(
    "new",
    [Release(b"n" * 32, seed=1), Release(b"n" * 32), Release(b"o" * 32, OTHER_LAYOUT), Release(b"o" * 32, frames=2)],
    ids=["weights", "fingerprint", "block_size", "frames"],
)
async def test_no_block_of_one_is_taken_for_one_of_the_other(new: Release, redis_url: str) -> None:
    url, old = redis_url + "?db=9", Release(b"o" * 32)
    with redis.Redis.from_url(url) as client:
        client.flushdb()
    assert [await one.serve(url) for one in (old, new)] == [0, 0]
    for one in (new, old):
        assert await one.serve(url) == len(PROMPT) // one.layout.block_size * one.layout.block_size
