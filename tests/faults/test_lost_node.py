"""A node that loses its power: every worker and all of its arena are gone; Redis is not."""

import pytest

from tests.faults.rest import at_rest
from tests.harness.answer import ask
from tests.harness.cluster import until
from tests.harness.faulty_cluster import FaultyCluster
from tests.harness.known_model import LAYOUT, MODEL, prompt_of
from tests.harness.local_cluster import Sizes
from wire.convert import tiers_from_pb
from wire.pools import Role

SIZES = Sizes(num_blocks=64, num_slots=256)
NUM_REQUESTS = 6
NUM_FULL = 3


async def lose_power(cluster: FaultyCluster) -> None:
    for name in tuple(cluster.listed):
        cluster.crash(name)
    await until(lambda: not cluster.listed)
    await cluster.settle()
    cluster.clock.now += 100.0
    cluster.empty_arena()
    assert cluster.blocks() == []


@pytest.mark.parametrize("num_tokens", [0, 1, 20])
async def test_its_requests_go_on_with_the_next_one(num_tokens: int) -> None:
    async with FaultyCluster.running(MODEL, 1, 1, SIZES) as cluster:
        readers = [cluster.open(ask(prompt_of(number))) for number in range(NUM_REQUESTS)]
        for reader in readers:
            await reader.read_tokens(num_tokens)
        await lose_power(cluster)
        await cluster.add(Role.DECODE)
        await cluster.add(Role.PREFILL)
        for number, reader in enumerate(readers):
            [choice] = await reader.read_all()
            assert choice.token_ids == MODEL.oracle(prompt_of(number), 40)
        await at_rest(cluster)


async def test_what_was_in_redis_is_hit_afterwards() -> None:
    async with FaultyCluster.running(MODEL, 1, 1, SIZES) as cluster:
        await cluster.answer(ask(prompt_of(0)))
        cluster.move_to_cold()
        await lose_power(cluster)
        await cluster.add(Role.PREFILL)
        await cluster.add(Role.DECODE)
        reader = cluster.open(ask(prompt_of(0)))
        [choice] = await reader.read_all()
        assert choice.token_ids == MODEL.oracle(prompt_of(0), 40)
        assert reader.complete is not None
        assert tiers_from_pb(reader.complete.usage.cached_tokens).get("redis", 0) == NUM_FULL * LAYOUT.block_size
        await at_rest(cluster)
