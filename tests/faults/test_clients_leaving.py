"""Clients that go away, at every stage: what was done for them ends, and what was not begun never begins."""

import asyncio
import threading
import time
from collections.abc import Callable

import pytest

from tests.faults.rest import at_rest
from tests.harness.answer import ask
from tests.harness.cluster import until
from tests.harness.faulty_cluster import FaultyCluster
from tests.harness.known_model import LAYOUT, MODEL
from tests.harness.local_cluster import Sizes
from wire.errors import BatonError, Cancelled, DeadlineExceeded, StoreError
from wire.ids import RequestId
from wire.pb import inference_pb2 as pb
from wire.pools import Role
from worker.config import BatchSettings

PROMPT = tuple(range(100))
SIZES = Sizes(num_blocks=32, num_slots=128, batch=BatchSettings(max_step_tokens=16, max_running=4, max_chunk_tokens=12))


def named(request: pb.GenerateRequest) -> pb.GenerateRequest:
    request.request_id = "mine"
    return request


async def leave(cluster: FaultyCluster) -> None:
    await cluster.router.dispatcher.abort(RequestId("mine"))


async def ends_with(cluster: FaultyCluster, error: type[BatonError], time_left_s: float | None = 60.0) -> None:
    """Opens a request that would run for ever, and reads until its end."""
    with pytest.raises(error):
        await cluster.open(named(ask(PROMPT, 400)), time_left_s).read_all()


async def test_while_waiting_for_a_turn() -> None:
    """Hand-offs fill half of the arena: the next prompt waits in the router, and leaves it without a trace."""
    async with FaultyCluster.running(MODEL, 1, 1, Sizes(num_blocks=32, num_slots=10, batch=SIZES.batch)) as cluster:
        cluster.models["d0"].pause()
        others = [cluster.open(ask((0, *PROMPT), 8))]
        await until(lambda: cluster.models["d0"].num_steps)  # from here on it fetches nothing
        others += [cluster.open(ask((number, *PROMPT), 8)) for number in (1, 2)]
        budget = cluster.router.holds.budgets[""]
        num_computed = 2 * (len(PROMPT) + 1)
        prefill = cluster.workers["p0"].engine
        await until(lambda: budget.num_waiting == 1 and prefill.stats().computed_prompt_tokens == num_computed)
        waiting = asyncio.create_task(ends_with(cluster, Cancelled))
        await until(lambda: budget.num_waiting == 2)
        await leave(cluster)
        await waiting
        assert budget.num_waiting == 1
        cluster.models["d0"].go_on()
        for number, reader in enumerate(others):
            [choice] = await reader.read_all()
            assert choice.token_ids == MODEL.oracle((number, *PROMPT), 8)
        await at_rest(cluster)
        computed = prefill.stats().computed_prompt_tokens - num_computed
        assert computed == len(PROMPT) + 1, "of the other that waited, and nothing of the one that left"


async def test_while_queued_at_the_prefill_worker() -> None:
    async with FaultyCluster.running(MODEL, 1, 1, SIZES) as cluster:
        cluster.models["p0"].pause()
        other = cluster.open(ask((1, *PROMPT), 8))
        await until(lambda: len(cluster.workers["p0"].service.attempts))
        waiting = asyncio.create_task(ends_with(cluster, Cancelled))
        await until(lambda: len(cluster.workers["p0"].service.attempts) == 2)
        await leave(cluster)
        await waiting
        await until(lambda: len(cluster.workers["p0"].service.attempts) == 1)
        cluster.models["p0"].go_on()
        [choice] = await other.read_all()
        assert choice.token_ids == MODEL.oracle((1, *PROMPT), 8)
        await at_rest(cluster)
        assert cluster.workers["p0"].engine.stats().computed_prompt_tokens == len(PROMPT) + 1


@pytest.mark.parametrize("num_steps", range(1, 8))
async def test_during_prefill(num_steps: int) -> None:
    """A prompt of seven steps, left in each: no more than the step under way and one more are run."""
    async with FaultyCluster.running(MODEL, 1, 1, SIZES) as cluster:
        step = at_step(cluster, "p0", num_steps)
        waiting = asyncio.create_task(ends_with(cluster, Cancelled))
        await step
        await leave(cluster)
        await waiting
        await go_on_without_it(cluster, "p0")
        await at_rest(cluster)
        assert cluster.models["p0"].num_steps <= num_steps + 1
        assert cluster.models["d0"].num_steps == 0


async def test_between_hand_off_and_decode() -> None:
    """Prefill has answered, and no decode worker is there yet: the hold ends with the request."""
    async with FaultyCluster.running(MODEL, 1, 0, SIZES) as cluster:
        reader = cluster.open(named(ask(PROMPT, 400)))
        await reader.read_tokens(1)
        await until(lambda: cluster.directory.records.status().num_holds == 1)
        await leave(cluster)
        await until(lambda: cluster.directory.records.status().num_holds == 0)
        with pytest.raises(Cancelled):
            await reader.read_all()
        await at_rest(cluster)


async def test_release_lost_on_the_way_ends_with_the_hold() -> None:
    async with FaultyCluster.running(MODEL, 1, 0, SIZES) as cluster:
        reader = cluster.open(named(ask(PROMPT, 400)))
        await reader.read_tokens(1)
        lost: list[str] = []
        cluster.gates["p0"].before = lose("release_holds", lost)
        await leave(cluster)
        with pytest.raises(Cancelled):
            await reader.read_all()
        await until(lambda: lost)
        assert cluster.directory.records.status().num_holds == 1
        await at_rest(cluster)


async def test_while_blocks_are_fetched_for_it() -> None:
    """Nobody gets the pages that are still written to, though another one is held up for want of pages meanwhile."""
    async with FaultyCluster.running(MODEL, 0, 1, SIZES) as cluster:
        await cluster.answer(ask(PROMPT, 8))
        cluster.move_to_cold()
        name = await cluster.add(Role.DECODE)
        await cluster.drain("d0")
        counts = cluster.workers[name].engine.pool.ledger.counts
        cluster.models[name].on_step = lambda number: time.sleep(0.002)
        running = cluster.open(ask((1, 2, 3), 500))
        await running.read_tokens(5)
        answering = asyncio.create_task(running.read_all())
        fetching = threading.Event()
        cluster.colds[name].on_get = fetching.set
        cluster.colds[name].pause()
        leaving = asyncio.create_task(ends_with(cluster, Cancelled))
        await until(fetching.is_set)
        await leave(cluster)
        await leaving
        await until(lambda: counts().free + counts().cached == 0)
        assert counts().draining >= len(PROMPT) // LAYOUT.block_size
        cluster.colds[name].go_on()
        [choice] = await answering
        assert choice.token_ids == MODEL.oracle((1, 2, 3), 500)
        await at_rest(cluster)


@pytest.mark.parametrize("num_steps", [1, 2, 15, 16, 17, 40])
async def test_during_decode(num_steps: int) -> None:
    async with FaultyCluster.running(MODEL, 1, 1, SIZES) as cluster:
        step = at_step(cluster, "d0", num_steps)
        waiting = asyncio.create_task(ends_with(cluster, Cancelled))
        await step
        await leave(cluster)
        await waiting
        await go_on_without_it(cluster, "d0")
        await until(lambda: not cluster.workers["d0"].engine.pool.ledger.counts().published)
        assert cluster.models["d0"].num_steps <= num_steps + 1
        await at_rest(cluster)


@pytest.mark.parametrize("where", ["p0", "d0"])
async def test_the_deadline_ends_the_work_on_both_sides(where: str) -> None:
    async with FaultyCluster.running(MODEL, 1, 1, SIZES) as cluster:
        cluster.models[where].pause()
        await ends_with(cluster, DeadlineExceeded, time_left_s=0.2)
        await go_on_without_it(cluster, where)
        await at_rest(cluster)
        assert cluster.models[where].num_steps <= 2


async def test_a_request_that_left_disturbs_no_other() -> None:
    async with FaultyCluster.running(MODEL, 1, 1, SIZES) as cluster:
        others = [asyncio.create_task(cluster.answer(ask((number, *PROMPT), 60))) for number in range(3)]
        for num_tokens in (0, 1, 2, 17, 33):
            reader = cluster.open(named(ask((num_tokens + 5, *PROMPT), 400)))
            await reader.read_tokens(num_tokens)
            await leave(cluster)
            with pytest.raises(Cancelled):
                await reader.read_all()
        for number, other in enumerate(others):
            [choice] = await other
            assert choice.token_ids == MODEL.oracle((number, *PROMPT), 60)
        await at_rest(cluster)


async def go_on_without_it(cluster: FaultyCluster, name: str) -> None:
    """Lets the worker's model go on once its engine has been told that the request is over."""
    await until(lambda: not len(cluster.workers[name].service.attempts))
    cluster.models[name].go_on()


def at_step(cluster: FaultyCluster, name: str, number: int) -> asyncio.Future[None]:
    """Done when the worker is in its `number`-th step, from 1, in which it then stays."""
    loop = asyncio.get_running_loop()
    reached = loop.create_future()
    model = cluster.models[name]

    def on_step(num_steps: int) -> None:
        if num_steps == number:
            model.pause()
            loop.call_soon_threadsafe(reached.set_result, None)

    model.on_step = on_step
    return reached


def lose(call: str, lost: list[str]) -> Callable[[str, object], None]:
    """A hook by which these calls fail, and are noted."""

    def hook(called: str, _: object) -> None:
        if called == call:
            lost.append(called)
            raise StoreError("lost on the way")

    return hook
