"""More requests than can be served, readers that do not read, clients that change their minds."""

import asyncio
import gc
import random
import time
from collections import Counter
from contextlib import suppress

import pytest

from router.config import RouterSettings
from router.observe import recent_requests
from tests.faults.rest import at_rest
from tests.harness.answer import Reader, ask
from tests.harness.cluster import until
from tests.harness.faulty_cluster import FaultyCluster
from tests.harness.known_model import MODEL
from tests.harness.local_cluster import Sizes
from wire.errors import Cancelled, DeadlineExceeded, Overloaded, RequestNotFound
from wire.ids import RequestId


def prompt_of(number: int) -> tuple[int, ...]:
    return tuple((number * 23 + position) % 300 for position in range(20 + number % 30))


async def expect(reader: Reader, number: int, num_tokens: int) -> None:
    [choice] = await reader.read_all()
    assert choice.token_ids == MODEL.oracle(prompt_of(number), num_tokens)


async def test_beyond_its_bound_the_queue_refuses_at_once() -> None:
    """And those that were let in are served before their deadline."""
    async with FaultyCluster.running(MODEL, 1, 1, Sizes(settings=RouterSettings(max_queued_requests=32))) as cluster:
        cluster.models["p0"].pause()
        admitted: list[tuple[int, Reader]] = []
        delays_s: list[float] = []
        advice: set[float | None] = set()
        for number in range(320):
            started_s = time.perf_counter()
            try:
                admitted.append((number, cluster.open(ask(prompt_of(number), 12), time_left_s=30.0)))
            except Overloaded as refusal:
                delays_s.append(time.perf_counter() - started_s)
                advice.add(refusal.retry_after_s)
            assert cluster.router.dispatcher.num_queued <= 32
            await asyncio.sleep(0)
        cluster.models["p0"].go_on()
        assert len(delays_s) > 100
        assert advice == {1.0}
        assert sorted(delays_s)[int(len(delays_s) * 0.99)] < 0.05
        await asyncio.gather(*(expect(reader, number, 12) for number, reader in admitted))
        await at_rest(cluster)


async def test_queued_bytes_are_bounded_too() -> None:
    async with FaultyCluster.running(MODEL, 1, 1, Sizes(settings=RouterSettings(max_queued_bytes=5000))) as cluster:
        cluster.models["p0"].pause()
        request = ask((5,) * 400, 4)
        readers = [cluster.open(request) for _ in range(5000 // request.ByteSize())]
        with pytest.raises(Overloaded, match="bytes"):
            cluster.open(request)
        cluster.models["p0"].go_on()
        for reader in readers:
            await reader.read_all()
        await at_rest(cluster)


async def test_deadlines_that_cannot_be_met_cost_no_more_than_they_have_to() -> None:
    """Of many requests some run out of time; the others are whole, and nothing is left of either."""
    async with FaultyCluster.running(MODEL, 1, 1, Sizes(num_blocks=32)) as cluster:
        draw = random.Random(1)

        async def serve(number: int) -> bool:
            reader = cluster.open(ask(prompt_of(number), 30), time_left_s=draw.choice([0.02, 0.1, 0.3, 30.0]))
            try:
                await expect(reader, number, 30)
            except DeadlineExceeded:
                assert reader.choices == [] or is_beginning(reader, number)
                return False
            return True

        served = await asyncio.gather(*(serve(number) for number in range(100)))
        assert 10 < sum(served) < 90
        await at_rest(cluster)


def is_beginning(reader: Reader, number: int) -> bool:
    return reader.choices[0].token_ids == MODEL.oracle(prompt_of(number), reader.num_tokens)


async def test_a_reader_that_never_reads_is_let_go_and_others_do_not_notice() -> None:
    bounds = RouterSettings(max_buffered_tokens=16)
    async with FaultyCluster.running(MODEL, 1, 1, Sizes(settings=bounds)) as cluster:
        idle = cluster.open(ask(prompt_of(0), 3000))
        others = [asyncio.create_task(expect(cluster.open(ask(prompt_of(n), 100)), n, 100)) for n in range(1, 5)]
        await asyncio.gather(*others)
        await until(lambda: not cluster.router.dispatcher.num_running)
        assert cluster.workers["d0"].engine.stats().generated_tokens < 3000
        with pytest.raises(Overloaded):
            await idle.read_all()
        assert is_beginning(idle, 0)
        await at_rest(cluster)


async def test_a_slow_reader_gets_everything_in_larger_pieces() -> None:
    """As long as it reads at all; what waits is bounded."""
    async with FaultyCluster.running(MODEL, 1, 1, Sizes(settings=RouterSettings(max_buffered_tokens=64))) as cluster:
        reader = cluster.open(ask(prompt_of(0), 300))
        for num_tokens in range(1, 300, 7):
            await reader.read_tokens(num_tokens)
            await asyncio.sleep(0.002)
        await expect(reader, 0, 300)
        await at_rest(cluster)


async def test_two_thousand_requests_of_which_some_are_cancelled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Exact at rest, and nothing has grown: of whatever kind, there are as many objects as after the first few."""
    monkeypatch.setattr(
        recent_requests, "MAX_KEPT", 100
    )  # fewer than the first few: the list of last requests is full by then
    async with FaultyCluster.running(MODEL, 1, 2, Sizes(num_blocks=128, num_slots=256)) as cluster:
        await ask_many(cluster, 0, 200)
        await at_rest(cluster)
        before = num_objects()
        await ask_many(cluster, 200, 2000)
        await at_rest(cluster)
        grown = num_objects() - before
    assert grown.total() < 400, grown.most_common(8)


def num_objects() -> Counter[str]:
    gc.collect()
    return Counter(type(one).__qualname__ for one in gc.get_objects())


async def ask_many(cluster: FaultyCluster, first: int, number: int, at_once: int = 64) -> None:
    """Every tenth client cancels, at a moment drawn for it."""
    draw = random.Random(first)
    places = asyncio.Semaphore(at_once)

    async def serve(number: int) -> None:
        cancel_at = draw.randrange(6) if draw.random() < 0.1 else None
        async with places:
            if cancel_at is None:
                await expect(cluster.open(ask(prompt_of(number % 50), 4)), number % 50, 4)
            else:
                await cancel(cluster, number, cancel_at)

    await asyncio.gather(*(serve(number) for number in range(first, first + number)))


async def cancel(cluster: FaultyCluster, number: int, after: int) -> None:
    """A request that is cancelled after so many tokens, or is over by then."""
    request = ask(prompt_of(number % 50), 4)
    request.request_id = f"request-{number}"
    reader = cluster.open(request)
    with suppress(Cancelled, RequestNotFound):
        await reader.read_tokens(after)
        await cluster.router.dispatcher.abort(RequestId(request.request_id))
        await reader.read_all()
    assert reader.choices == [] or is_beginning(reader, number % 50)
