"""Tiers that lose, spoil and withhold blocks: what is not there, or not right, is computed again."""

import asyncio
import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from kv_store.node_store import NodeStore
from tests.faults.load import Load, under_load
from tests.faults.rest import at_rest
from tests.harness.answer import ask
from tests.harness.cluster import until
from tests.harness.faulty_cluster import FaultyCluster
from tests.harness.known_model import LAYOUT, MODEL
from tests.harness.local_cluster import Sizes
from wire.convert import tiers_from_pb
from wire.pb import inference_pb2 as pb
from wire.pools import Role

SIZES = Sizes(num_blocks=64, num_slots=128)
PROMPT = tuple(range(100))
NUM_FULL = len(PROMPT) // 16


async def serve(cluster: FaultyCluster, prompt: tuple[int, ...] = PROMPT) -> pb.Complete:
    reader = cluster.open(ask(prompt, 20))
    [choice] = await reader.read_all()
    assert choice.token_ids == MODEL.oracle(prompt, 20)
    assert reader.complete is not None
    return reader.complete


async def fresh_workers(cluster: FaultyCluster) -> None:
    """Workers that have nothing on their devices."""
    listed = tuple(cluster.listed)
    await cluster.add(Role.PREFILL)
    await cluster.add(Role.DECODE)
    for name in listed:
        await cluster.drain(name)


async def test_all_comes_back_from_the_cold_tier() -> None:
    async with FaultyCluster.running(MODEL, 1, 1, SIZES) as cluster:
        await serve(cluster)
        cluster.move_to_cold()
        await fresh_workers(cluster)
        assert tiers_from_pb((await serve(cluster)).usage.cached_tokens).get("redis", 0) == 16 * NUM_FULL
        await at_rest(cluster)


@pytest.mark.parametrize("number", range(NUM_FULL))
async def test_a_block_is_evicted_between_two_questions(number: int) -> None:
    """The cold tier said that it had it."""
    async with FaultyCluster.running(MODEL, 1, 1, SIZES) as cluster:
        await serve(cluster)
        cluster.move_to_cold()
        await fresh_workers(cluster)
        cluster.colds["p1"].missing = {cluster.names_of(PROMPT)[number].key}
        assert tiers_from_pb((await serve(cluster)).usage.cached_tokens).get("redis", 0) == 16 * number
        await at_rest(cluster)


def flip(cluster: FaultyCluster) -> None:
    """One bit of every block, in the arena and in the cold tier."""

    def flip_each(slots: Sequence[memoryview]) -> None:
        for slot in slots:
            slot[random.randrange(LAYOUT.payload_bytes)] ^= 4

    cluster.spoil_arena(flip_each)
    for key, frame in cluster.cold.frames.items():
        place = random.randrange(len(frame))
        cluster.cold.frames[key] = frame[:place] + bytes([frame[place] ^ 4]) + frame[place + 1 :]


def shuffle(cluster: FaultyCluster) -> None:
    """Every block is under another one's name, checksums and all."""
    keys, frames = list(cluster.cold.frames), list(cluster.cold.frames.values())
    cluster.cold.frames.update(zip(keys, frames[1:] + frames[:1], strict=True))

    def rotate(slots: Sequence[memoryview]) -> None:
        contents = [bytes(slot) for slot in slots]
        for slot, content in zip(slots, contents[1:] + contents[:1], strict=True):
            slot[:] = content

    cluster.spoil_arena(rotate)


def lose(cluster: FaultyCluster) -> None:
    """Everything, as after a FLUSHALL and in an arena that was needed for something else."""
    cluster.cold.frames.clear()
    cluster.empty_arena()


@pytest.mark.parametrize("spoil", [flip, shuffle, lose])
@pytest.mark.parametrize("where", ["arena", "cold"])
async def test_spoilt_blocks_are_never_used(spoil: Callable[[FaultyCluster], None], where: str) -> None:
    async with FaultyCluster.running(MODEL, 1, 1, SIZES) as cluster:
        await serve(cluster)
        if where == "cold":
            cluster.move_to_cold()
        await fresh_workers(cluster)
        spoil(cluster)
        assert not (await serve(cluster)).usage.cached_tokens
        assert tiers_from_pb((await serve(cluster)).usage.cached_tokens)["device"] == 16 * NUM_FULL
        await at_rest(cluster)


async def test_blocks_are_spoilt_all_the_time() -> None:
    async with FaultyCluster.running(MODEL, 2, 2, SIZES) as cluster:
        async with under_load(Load(cluster, MODEL, num_clients=6)) as load:
            for spoil in (flip, lose, shuffle) * 8:
                spoil(cluster)
                await load.goes_on(2)
        await at_rest(cluster)


@pytest.mark.parametrize("where", ["p1", "d1"])
@pytest.mark.parametrize("is_given_away", [False, True])
async def test_a_lease_runs_out_while_it_is_read_under(where: str, is_given_away: bool) -> None:
    """What was read counts for nothing, be it right or wrong: the slots may have become another's."""
    async with FaultyCluster.running(MODEL, 1, 1, SIZES) as cluster:
        await serve(cluster)
        await fresh_workers(cluster)

        def run_out() -> None:
            cluster.clock.now += 1000.0
            if is_given_away:
                cluster.hold_all_slots()

        cluster.gates[where].after = after_first("lease", run_out)
        complete = await serve(cluster)
        computed = cluster.workers[where].engine.stats().computed_prompt_tokens
        assert computed == len(PROMPT)
        assert tiers_from_pb(complete.usage.cached_tokens).get("host", 0) == (0 if where == "p1" else 16 * NUM_FULL)
        await at_rest(cluster)


async def test_a_slow_cold_tier_delays_no_running_request() -> None:
    """One request waits for a block; those in the batch go on to their end."""
    async with FaultyCluster.running(MODEL, 0, 1, SIZES) as cluster:
        await serve(cluster)
        cluster.move_to_cold()
        await cluster.add(Role.DECODE)
        await cluster.drain("d0")
        model, worker = cluster.models["d1"], cluster.workers["d1"]
        model.pause()
        mates = [asyncio.create_task(serve(cluster, (number, *PROMPT))) for number in range(4)]
        await until(lambda: len(worker.service.attempts) == 4)
        model.on_step = lambda _: model.pause() if worker.engine.stats().num_running == 4 else None
        model.go_on()
        await until(lambda: worker.engine.stats().num_running == 4)
        cluster.colds["d1"].pause()
        waiting = asyncio.create_task(serve(cluster))
        await until(lambda: len(worker.service.attempts) == 5)
        model.on_step = lambda _: None
        model.go_on()
        await asyncio.gather(*mates)
        assert not waiting.done()
        cluster.colds["d1"].go_on()
        assert tiers_from_pb((await waiting).usage.cached_tokens).get("redis", 0) == 16 * NUM_FULL
        await at_rest(cluster)


async def test_a_cold_tier_that_is_too_slow_is_given_up_for_this_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0

    def be_slow() -> None:
        nonlocal now
        now += 0.3

    def on_our_clock(*parts: Any) -> NodeStore:
        layout, arena, directory, cold, pool, _, *rest = parts
        return NodeStore(layout, arena, directory, cold, pool, lambda: now, *rest)

    async with FaultyCluster.running(MODEL, 1, 1, SIZES) as cluster:
        await serve(cluster)
        cluster.move_to_cold()
        monkeypatch.setattr("worker.assembly.NodeStore", on_our_clock)
        await fresh_workers(cluster)
        cluster.colds["p1"].on_get = be_slow
        assert tiers_from_pb((await serve(cluster)).usage.cached_tokens).get("redis", 0) == 16, (
            "after 0.3 seconds it is computed"
        )
        await at_rest(cluster)


def after_first(call: str, action: Callable[[], None]) -> Callable[[str, object], None]:
    """A hook that acts once, after the first such call."""
    done = False

    def hook(called: str, _: object) -> None:
        nonlocal done
        if called == call and not done:
            done = True
            action()

    return hook
