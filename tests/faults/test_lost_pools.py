"""Whole pools that die, workers that come back from the dead, and requests that kill every worker they meet."""

import time

import pytest

from router.config import RouterSettings
from tests.faults.rest import at_rest
from tests.harness.answer import ask
from tests.harness.cluster import until
from tests.harness.faulty_cluster import FaultyCluster
from tests.harness.faulty_model import FaultyModel
from tests.harness.known_model import MODEL, expect, prompt_of
from tests.harness.local_cluster import Sizes
from wire.errors import AttemptsExhausted, DeadlineExceeded, Unavailable
from wire.pools import Role

SIZES = Sizes(num_blocks=64, num_slots=256)
POISON = MODEL.vocab_size


async def kill_all(cluster: FaultyCluster) -> None:
    for name in tuple(cluster.listed):
        cluster.crash(name)
    await until(lambda: not cluster.listed)


@pytest.mark.parametrize("num_tokens", [0, 1, 20])
async def test_both_pools_die_and_are_replaced_in_time(num_tokens: int) -> None:
    async with FaultyCluster.running(MODEL, 2, 2, SIZES) as cluster:
        readers = [cluster.open(ask(prompt_of(number))) for number in range(6)]
        for reader in readers:
            await reader.read_tokens(num_tokens)
        await kill_all(cluster)
        await cluster.add(Role.DECODE)
        await cluster.add(Role.PREFILL)
        for number, reader in enumerate(readers):
            await expect(reader, number)
        await at_rest(cluster)


async def test_without_replacements_requests_are_told_so() -> None:
    bounds = RouterSettings(max_worker_wait_s=0.2)
    async with FaultyCluster.running(MODEL, 1, 1, Sizes(settings=bounds)) as cluster:
        reader = cluster.open(ask(prompt_of(0), 3000))
        await reader.read_tokens(3)
        await kill_all(cluster)
        with pytest.raises(Unavailable):
            await reader.read_all()
        assert reader.choices[0].token_ids == MODEL.oracle(prompt_of(0), reader.num_tokens)
        await at_rest(cluster)


async def test_the_deadline_counts_while_waiting_for_a_worker() -> None:
    async with FaultyCluster.running(MODEL, 1, 0, SIZES) as cluster:
        reader = cluster.open(ask(prompt_of(0)), time_left_s=0.1)
        with pytest.raises(DeadlineExceeded):
            await reader.read_all()
        await at_rest(cluster)


@pytest.mark.parametrize("where", ["p0", "d0"])
async def test_a_worker_wakes_up_when_another_has_long_done_its_work(where: str) -> None:
    """It was stopped in a step, and writes on when it goes on: the same bytes under the same names, or nothing."""
    async with FaultyCluster.running(MODEL, 1, 1, SIZES) as cluster:
        model, engine = cluster.models[where], cluster.workers[where].engine
        model.on_step = lambda number: model.pause() if number == 1 else None
        reader = cluster.open(ask(prompt_of(0)))
        await until(lambda: model.num_steps == 1)
        cluster.disconnect(where)
        await cluster.add(Role.PREFILL)
        await cluster.add(Role.DECODE)
        await expect(reader, 0)
        model.go_on()
        await until(lambda: not engine.has_requests)
        await expect(cluster.open(ask(prompt_of(0))), 0)
        await at_rest(cluster)


async def test_a_request_that_kills_every_worker_is_given_up() -> None:
    async with FaultyCluster.running(MODEL, 1, 2, SIZES) as cluster:
        cluster.replace_dead = True
        cluster.poison(POISON)
        poisonous = ask((*prompt_of(0), POISON), 8)
        with pytest.raises(AttemptsExhausted):
            await cluster.answer(poisonous)
        await expect(cluster.open(ask(prompt_of(1))), 1)
        with pytest.raises(AttemptsExhausted):
            await cluster.answer(poisonous)
        assert len(cluster.dead) == 3, "the same prompt is not tried again"
        await at_rest(cluster)


async def test_a_request_that_kills_every_worker_is_given_up_alone() -> None:
    """Those that were with it on all of these workers go on."""
    async with FaultyCluster.running(MODEL, 1, 2, SIZES) as cluster:
        cluster.replace_dead = True
        mates = [cluster.open(ask(prompt_of(number), 200)) for number in range(8)]
        for mate in mates:
            await mate.read_tokens(5)
        cluster.poison(POISON)
        with pytest.raises(AttemptsExhausted):
            await cluster.answer(ask((*prompt_of(0), POISON), 8))
        for number, mate in enumerate(mates):
            await expect(mate, number, 200)
        await at_rest(cluster)


async def test_a_long_request_outlives_many_workers() -> None:
    """What limits attempts is that they lead nowhere."""
    model = FaultyModel(MODEL)
    model.on_step = lambda _: time.sleep(0.002)  # it must not be through before its workers can be lost
    async with FaultyCluster.running(model, 1, 2, SIZES) as cluster:
        cluster.replace_dead = True
        reader = cluster.open(ask(prompt_of(0), 400))
        for num_tokens in range(50, 400, 50):
            await reader.read_tokens(num_tokens)
            for name in await busy(cluster):
                cluster.crash(name)
        await expect(reader, 0, 400)
        assert len(cluster.dead) >= 4
        await at_rest(cluster)


async def busy(cluster: FaultyCluster) -> list[str]:
    return [name for name in cluster.listed if cluster.workers[name].engine.has_requests]
