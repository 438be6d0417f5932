"""Too little memory everywhere: everything ends, in its turn, and right."""

import asyncio

import pytest

from engine.core import EngineCore
from engine.request import EngineRequest
from kv_store.tiers.cold_writer import ColdWriter
from tests.faults.rest import at_rest
from tests.harness.answer import ask
from tests.harness.cluster import until
from tests.harness.faulty_cluster import FaultyCluster
from tests.harness.known_model import MODEL
from tests.harness.local_cluster import Sizes
from wire.errors import InvalidRequest


def prompt_of(number: int) -> tuple[int, ...]:
    return tuple((number * 19 + position) % 300 for position in range(10 + number % 40))


async def serve_all(cluster: FaultyCluster, num_requests: int, num_tokens: int = 50) -> list[int]:
    """Asks everything at once; the order in which the answers, all of them right, are complete."""
    order: list[int] = []

    async def serve(number: int) -> None:
        request = ask(prompt_of(number), num_tokens)
        request.request_id = str(number)
        [choice] = await cluster.answer(request)
        assert choice.token_ids == MODEL.oracle(prompt_of(number), num_tokens)
        order.append(number)

    await asyncio.gather(*(serve(number) for number in range(num_requests)))
    return order


def arrivals(engine: EngineCore, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The order in which requests come to an engine from now on."""
    order: list[int] = []
    add = engine.add

    def note(request: EngineRequest) -> None:
        order.append(int(request.attempt_id.partition("/")[0]))
        add(request)

    monkeypatch.setattr(engine, "add", note)
    return order


@pytest.mark.parametrize("num_prefill", [0, 1])
async def test_a_pool_of_eight_pages_and_fifty_requests(num_prefill: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each takes up to five of them. Nobody starves: no more overtake anyone than there are pages."""
    async with FaultyCluster.running(MODEL, num_prefill, 1, Sizes(num_blocks=8, num_slots=64)) as cluster:
        engine = cluster.workers["d0"].engine
        came = arrivals(engine, monkeypatch)
        went = await serve_all(cluster, 50, 30)
        assert engine.stats().num_preemptions > 0
        await at_rest(cluster)
    assert max(went.index(number) - came.index(number) for number in came) <= 8


async def test_choices_that_fill_the_pool() -> None:
    async with FaultyCluster.running(MODEL, 1, 1, Sizes(num_blocks=8, num_slots=64)) as cluster:
        many = await cluster.answer(ask(prompt_of(39), 60, n=6, temperature=1.0))
    async with FaultyCluster.running(MODEL, 0, 1, Sizes(num_blocks=128, num_slots=64)) as cluster:
        assert await cluster.answer(ask(prompt_of(39), 60, n=6, temperature=1.0)) == many


@pytest.mark.parametrize("num_slots", [1, 2, 3, 5, 9])
async def test_an_arena_that_holds_next_to_nothing(num_slots: int) -> None:
    """What finds no room there is computed again."""
    async with FaultyCluster.running(MODEL, 2, 2, Sizes(num_blocks=24, num_slots=num_slots)) as cluster:
        await serve_all(cluster, 24, 20)
        await at_rest(cluster)


async def test_an_arena_full_of_holds_that_are_never_released() -> None:
    """Their requests are over, but word of it was lost; publishing goes on without room, and prefill with it."""
    async with FaultyCluster.running(MODEL, 1, 1, Sizes(num_blocks=24, num_slots=8)) as cluster:
        cluster.hold_all_slots()
        assert cluster.directory.records.status().counts.published == 8
        await serve_all(cluster, 8, 20)
        await at_rest(cluster)


async def test_prefill_does_not_wait_for_decode_where_held_blocks_can_move_to_a_cold_tier() -> None:
    """Hand-offs fill half of the arena while decode stands still: the next prompts are prefilled all the same."""
    prompts = [(number, *range(100)) for number in range(6)]
    async with FaultyCluster.running(MODEL, 1, 1, Sizes(num_blocks=64, num_slots=10)) as cluster:
        writer = ColdWriter(MODEL.layout, cluster.arena, cluster.directory, cluster.cold, interval_s=0.01)
        writer.start()
        cluster.models["d0"].pause()
        first = cluster.open(ask(prompt_of(0), 8))
        await until(lambda: cluster.models["d0"].num_steps)  # from here on it fetches nothing
        readers = [cluster.open(ask(prompt, 8)) for prompt in prompts]
        prefill = cluster.workers["p0"].engine
        await until(lambda: prefill.stats().generated_tokens == len(prompts) + 1)
        cluster.models["d0"].go_on()
        await first.read_all()
        for prompt, reader in zip(prompts, readers, strict=True):
            [choice] = await reader.read_all()
            assert choice.token_ids == MODEL.oracle(prompt, 8)
        await at_rest(cluster)
        writer.stop()


async def test_what_never_fits_is_refused_and_what_just_fits_is_served() -> None:
    async with FaultyCluster.running(MODEL, 1, 1, Sizes(num_blocks=4, num_slots=64)) as cluster:
        with pytest.raises(InvalidRequest):
            await cluster.answer(ask(range(44), 21))
        [choice] = await cluster.answer(ask(range(44), 20))
        assert choice.token_ids == MODEL.oracle(range(44), 20)
        await at_rest(cluster)
