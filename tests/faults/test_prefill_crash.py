"""A prefill worker dies at every block: what it had published is used, and nothing of what it had not."""

from functools import partial
from typing import Any

import pytest

from tests.faults.rest import at_rest
from tests.harness.answer import ask
from tests.harness.faulty_cluster import FaultyCluster
from tests.harness.known_model import MODEL
from tests.harness.local_cluster import Sizes
from wire.convert import tiers_from_pb
from wire.pb import inference_pb2 as pb
from wire.pools import Role
from worker.config import BatchSettings

ONE_BLOCK_A_STEP = BatchSettings(max_step_tokens=16, max_running=4, max_chunk_tokens=12)
SIZES = Sizes(num_blocks=24, num_slots=128, batch=ONE_BLOCK_A_STEP)
NUM_BLOCKS = 6
"""Five full ones and a tail. Full ones are published one by one, the tail with the hand-off."""


def prompt_of(number: int) -> tuple[int, ...]:
    return tuple((number * 11 + position) % 300 for position in range(16 * NUM_BLOCKS - 7))


def arm(cluster: FaultyCluster, call: str, number: int) -> None:
    """The first prefill worker that is about to say this to the directory for the `number`-th time, from 0, dies."""
    num_calls = 0

    def die(name: str, called: str, _: tuple[Any, ...]) -> None:
        nonlocal num_calls
        if called == call:
            num_calls += 1  # first: once it is dead another may get here before this thread goes on
            if num_calls == number + 1:
                cluster.crash(name)

    for name in cluster.listed:
        if name.startswith("p"):
            cluster.gates[name].before = partial(die, name)


async def serve_one(cluster: FaultyCluster, number: int) -> pb.Complete:
    output = await cluster.generate(ask(prompt_of(number), 8))
    assert output.token_ids[0] == MODEL.oracle(prompt_of(number), 8)
    return output.complete


@pytest.mark.parametrize("call", ["reserve", "commit"])
async def test_another_goes_on_with_what_was_published(call: str) -> None:
    """Death comes before it asks for a slot, and when the slot is filled but not yet committed."""
    async with FaultyCluster.running(MODEL, 2, 1, SIZES) as cluster:
        cluster.replace_dead = True
        for number in range(NUM_BLOCKS):
            arm(cluster, call, number)
            complete = await serve_one(cluster, number)
            assert len(cluster.dead) == number + 1
            assert complete.timeline.prefill_worker not in cluster.dead
            assert tiers_from_pb(complete.usage.cached_tokens).get("host", 0) == 16 * number
            await cluster.settle()
        await at_rest(cluster)


async def test_dies_after_its_answer() -> None:
    """What a dead worker has left in the arena is as good as ever."""
    async with FaultyCluster.running(MODEL, 1, 1, SIZES) as cluster:
        cluster.models["d0"].pause()
        reader = cluster.open(ask(prompt_of(0), 8))
        await reader.read_tokens(1)
        cluster.crash("p0")
        await cluster.someone_died.wait()
        cluster.models["d0"].go_on()
        [choice] = await reader.read_all()
        assert choice.token_ids == MODEL.oracle(prompt_of(0), 8)
        assert cluster.workers["d0"].engine.stats().computed_prompt_tokens == 0
        await at_rest(cluster)


async def test_decode_prefills_while_no_prefill_worker_is_left() -> None:
    async with FaultyCluster.running(MODEL, 1, 1, SIZES) as cluster:
        arm(cluster, "commit", 2)
        complete = await serve_one(cluster, 0)
        assert complete.timeline.prefill_worker == ""
        cached = tiers_from_pb(complete.usage.cached_tokens)  # decode may have read them ahead, into its pages
        assert cached.get("host", 0) + cached.get("device", 0) == 16 * 2
        assert (await serve_one(cluster, 1)).timeline.prefill_worker == ""
        replacement = await cluster.add(Role.PREFILL)
        assert (await serve_one(cluster, 2)).timeline.prefill_worker == replacement
        await at_rest(cluster)
