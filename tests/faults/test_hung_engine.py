"""Engines that hang in a step, while everything else of their process goes on and still answers."""

import pytest

from engine.hash_model import HashModel
from router.members import WorkerState
from tests.faults.answer import ask
from tests.faults.faulty_cluster import faulty_cluster
from tests.faults.rest import at_rest, until
from tests.local_cluster.cluster import Sizes
from wire.ids import WorkerId
from wire.layout import KVLayout
from worker.config import MIN_SILENCE_S

LAYOUT = KVLayout(num_layers=2, num_kv_heads=1, head_dim=8, block_size=16, dtype="float32")
MODEL = HashModel(LAYOUT, vocab_size=300)
SIZES = Sizes(num_blocks=64, num_slots=256, max_silence_s=MIN_SILENCE_S)


def prompt_of(number: int) -> tuple[int, ...]:
    return tuple((number * 13 + position) % 200 for position in range(50))


@pytest.mark.parametrize(("where", "step"), [("p0", 1), ("d0", 5)])
async def test_its_requests_go_on_elsewhere_and_it_is_replaced(where: str, step: int) -> None:
    """All others have nothing to do meanwhile, and are not taken for workers that hang."""
    async with faulty_cluster(MODEL, 2, 2, SIZES) as cluster:
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
    async with faulty_cluster(MODEL, 1, 2, SIZES) as cluster:
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
        assert cluster.router.membership._members[WorkerId("d0")].state is WorkerState.LOST
        cluster.crash("d0")
        await at_rest(cluster)
