"""Engines that hang in a step, while everything else of their process goes on and still answers."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from router.workers.members import LONG_STEP_S
from tests.faults.rest import at_rest
from tests.harness.answer import ask
from tests.harness.cluster import until
from tests.harness.faulty_cluster import FaultyCluster
from tests.harness.known_model import MODEL, prompt_of
from tests.harness.local_cluster import Sizes
from wire.ids import WorkerId
from wire.pools import WorkerState
from worker.config import MIN_SILENCE_S
from worker.loop import LOOK_EVERY_S

SIZES = Sizes(num_blocks=64, num_slots=256, max_silence_s=MIN_SILENCE_S)


@pytest.mark.parametrize(("where", "step"), [("p0", 1), ("d0", 5)])
async def test_its_requests_go_on_elsewhere_and_it_is_replaced(where: str, step: int) -> None:
    """All others have nothing to do meanwhile, and are not taken for workers that hang."""
    async with FaultyCluster.running(MODEL, 2, 2, SIZES) as cluster:
        cluster.replace_dead = True
        model = cluster.models[where]
        model.on_step = lambda number: model.pause() if number == step else None
        readers = [cluster.open(ask(prompt_of(number))) for number in range(6)]
        for number, reader in enumerate(readers):
            [choice] = await reader.read_all()
            assert choice.token_ids == MODEL.oracle(prompt_of(number), 40)
        assert model.num_steps >= step, "the worker had no work to hang in"
        assert cluster.dead == [where]
        await at_rest(cluster)
        assert len(cluster.listed) == 4


async def test_a_worker_whose_process_does_not_end_is_not_chosen_again() -> None:
    async with FaultyCluster.running(MODEL, 1, 2, SIZES) as cluster:
        cluster.broken_ones_linger = True
        model = cluster.models["d0"]
        model.on_step = lambda number: model.pause() if number == 5 else None
        readers = [cluster.open(ask(prompt_of(number))) for number in range(6)]
        for number, reader in enumerate(readers):
            [choice] = await reader.read_all()
            assert choice.token_ids == MODEL.oracle(prompt_of(number), 40)
        await until(lambda: WorkerId("d0") in cluster.port.lost)
        model.go_on()
        await until(lambda: not cluster.workers["d0"].engine.has_requests)
        assert cluster.router.members[WorkerId("d0")].state is WorkerState.LOST
        cluster.crash("d0")
        await at_rest(cluster)


@pytest.mark.parametrize(("where", "other"), [("p0", "p1"), ("d0", "d1")])
async def test_new_requests_go_to_others_until_it_turns_again(where: str, other: str) -> None:
    """Long before it is given up, which it is not here."""
    async with FaultyCluster.running(MODEL, 2, 2, Sizes(num_blocks=64, num_slots=256)) as cluster:
        model = cluster.models[where]
        with much_to_do(cluster, other):
            model.pause()
            stuck = cluster.open(ask(prompt_of(0)))
            await until(lambda: model.num_steps)
            await look_on(cluster, where, LONG_STEP_S)
            assert other in await workers_of_a_new_one(cluster, 1)
            model.go_on()
            [choice] = await stuck.read_all()
            assert choice.token_ids == MODEL.oracle(prompt_of(0), 40)
            await look_on(cluster, where, 0.0)
            assert where in await workers_of_a_new_one(cluster, 2)
        assert cluster.dead == []
        await at_rest(cluster)


async def test_decode_prefills_new_requests_while_the_only_prefill_engine_hangs() -> None:
    """Its first token says that it goes on: the next status, which may take two seconds, is not waited for."""
    async with FaultyCluster.running(MODEL, 1, 1, Sizes(num_blocks=64, num_slots=256)) as cluster:
        model = cluster.models["p0"]
        model.pause()
        stuck = cluster.open(ask(prompt_of(0)))
        await until(lambda: model.num_steps)
        await look_on(cluster, "p0", LONG_STEP_S)
        assert await workers_of_a_new_one(cluster, 1) == {"", "d0"}
        model.go_on()
        [choice] = await stuck.read_all()
        assert choice.token_ids == MODEL.oracle(prompt_of(0), 40)
        assert await workers_of_a_new_one(cluster, 2) == {"p0", "d0"}
        assert cluster.dead == []
        await at_rest(cluster)


@contextmanager
def much_to_do(cluster: FaultyCluster, name: str) -> Iterator[None]:
    """So much that nothing more is sent there if there is another to send it to."""
    with cluster.router.members[WorkerId(name)].assigned(num_choices=100, num_tokens=10_000):
        yield


async def look_on(cluster: FaultyCluster, name: str, duration_s: float) -> None:
    """A worker looks after its engine, then as often again as it does in so much time, and tells the router."""
    for _ in range(1 + round(duration_s / LOOK_EVERY_S)):
        cluster.workers[name].service.watch.look()
    await cluster.router.watch.read()


async def workers_of_a_new_one(cluster: FaultyCluster, number: int) -> set[str]:
    """Of a request that is sent now, and ends in time."""
    reader = cluster.open(ask(prompt_of(number)), time_left_s=8.0)
    [choice] = await reader.read_all()
    assert choice.token_ids == MODEL.oracle(prompt_of(number), 40)
    assert reader.complete is not None
    return {reader.complete.timeline.prefill_worker, reader.complete.timeline.decode_worker}
