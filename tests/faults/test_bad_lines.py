"""Lines that are slow, break and lose bytes: between router and workers, and between a worker and Redis."""

import asyncio
import random
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from kv_store.tiers.redis_tier import RedisTier
from router.workers import grpc_transport
from tests.faults.remote_cluster import RemoteCluster
from tests.faults.rest import at_rest
from tests.faults.toxic_proxy import Line, toxic_proxy
from tests.harness.answer import Reader, ask
from tests.harness.cluster import until
from tests.harness.known_model import MODEL, prompt_of
from tests.harness.redis_process import RedisProcess
from tests.kv_store.names import LAYOUT as REDIS_LAYOUT
from tests.kv_store.names import MAC_KEY, got_one, names_of, put_one
from tests.router.test_stopped_worker import HURRIED
from wire.ids import WorkerId
from wire.pools import WorkerState
from wire.rpc import LINE_OPTIONS

NUM_REQUESTS = 6
NUM_TOKENS = 24
AMPLE_S = 10.0
[NAME] = names_of(4)


async def expect_answers(readers: list[Reader], num_tokens: int = NUM_TOKENS) -> None:
    for number, reader in enumerate(readers):
        [choice] = await reader.read_all()
        assert choice.token_ids == MODEL.oracle(prompt_of(number), num_tokens)


def calls_of(reader: Reader) -> list[str]:
    """What became of each call to a worker: "queue" where it is answered, "call" where the worker was lost."""
    assert reader.complete is not None
    kinds = ("prefill.queue", "decode.queue", "prefill.call", "decode.call")
    return [span.name for span in reader.complete.timeline.spans if span.name in kinds]


@pytest.mark.parametrize(
    "change",
    [
        {"delay_s": (0.05, 0.05)},
        {"delay_s": (0.0, 0.1)},
        {"delay_s": (0.5, 0.5)},
        {"bytes_per_s": 20_000.0},
        {"max_piece_bytes": 1},
        {"max_piece_bytes": 7, "delay_s": (0.0, 0.001)},
    ],
    ids=lambda change: "-".join(change),
)
async def test_a_slow_line_costs_time_only(change: dict[str, object]) -> None:
    async with RemoteCluster.running(MODEL, 1, 1) as cluster:
        vars(cluster.line).update(change)
        readers = [cluster.open(ask(prompt_of(number), NUM_TOKENS)) for number in range(NUM_REQUESTS)]
        await expect_answers(readers)
        for reader in readers:
            assert calls_of(reader) == ["prefill.queue", "decode.queue"], "nothing was done twice"
        vars(cluster.line).update(vars(Line()))
        await at_rest(cluster)


@pytest.mark.parametrize("seed", range(5))
async def test_a_line_that_breaks_in_the_midst_of_a_message(seed: int) -> None:
    """Twice, wherever that is: nobody gets a token twice, or misses one."""
    draw = random.Random(seed)
    async with RemoteCluster.running(MODEL, 2, 2) as cluster:
        readers = [cluster.open(ask(prompt_of(number), 200)) for number in range(NUM_REQUESTS)]
        answering = asyncio.create_task(expect_answers(readers, 200))
        for _ in range(2):
            cluster.line.bytes_to_reset = draw.randrange(2000)
            await until(lambda: not cluster.line.will_break or answering.done())
        cluster.line.bytes_to_reset = None
        await answering
        await at_rest(cluster)


async def test_a_line_that_loses_what_workers_say(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls on it end with the keepalive's patience; those lines are not used any more, and come back."""
    monkeypatch.setattr(grpc_transport, "LINE_OPTIONS", tuple({**dict(LINE_OPTIONS), **HURRIED}.items()))
    async with RemoteCluster.running(MODEL, 1, 1) as cluster:
        reader = cluster.open(ask(prompt_of(0), 1000))
        await reader.read_tokens(20)
        cluster.line.loses_answers = True
        cluster.models["d0"].pause()
        await until(lambda: cluster.router.members[WorkerId("d0")].state is WorkerState.LOST)
        cluster.models["d0"].go_on()
        cluster.line.loses_answers = False
        await expect_answers([reader], 1000)
        assert "decode.call" in calls_of(reader)
        await at_rest(cluster)


@pytest.fixture
def redis_path(tmp_path: Path) -> Iterator[str]:
    server = RedisProcess(tmp_path)
    server.start()
    yield str(tmp_path / "redis.sock")
    server.kill()


@asynccontextmanager
async def tier_behind(line: Line, redis_path: str, timeout_s: float = AMPLE_S) -> AsyncIterator[RedisTier]:
    async with toxic_proxy(redis_path, line) as address:
        tier = await asyncio.to_thread(RedisTier, f"redis://{address}", REDIS_LAYOUT, MAC_KEY, timeout_s)
        yield tier
        await asyncio.to_thread(tier.close)


async def put(tier: RedisTier) -> bool:
    return await asyncio.to_thread(put_one, tier, NAME)


async def got(tier: RedisTier) -> bool:
    return await asyncio.to_thread(got_one, tier, NAME)


@pytest.mark.redis
@pytest.mark.parametrize("line", [Line(max_piece_bytes=1), Line(delay_s=(0.0, 0.05)), Line(bytes_per_s=20_000.0)])
async def test_redis_on_a_slow_line_costs_time_only(line: Line, redis_path: str) -> None:
    async with tier_behind(line, redis_path) as tier:
        assert await put(tier)
        assert await got(tier)
        assert (await asyncio.to_thread(tier.status)).errors == 0


@pytest.mark.redis
async def test_redis_on_a_line_that_breaks_in_the_midst_of_a_block(redis_path: str) -> None:
    """A miss each time, and at most that; the next caller has a line of its own."""
    line = Line()
    async with tier_behind(line, redis_path) as tier:
        assert await put(tier)
        for num_bytes in (0, 1, 50, 90, 200, REDIS_LAYOUT.payload_bytes):
            line.bytes_to_reset = num_bytes
            assert not await got(tier)
            assert not line.will_break
            async with asyncio.timeout(AMPLE_S):
                while not await got(tier):
                    pass


@pytest.mark.redis
async def test_redis_on_a_line_that_is_too_slow_costs_one_timeout(redis_path: str) -> None:
    async with tier_behind(Line(), redis_path) as patient:
        assert await put(patient)
    line = Line()
    async with tier_behind(line, redis_path, timeout_s=0.05) as tier:
        line.bytes_per_s = 200.0
        assert not await got(tier)
        before = asyncio.get_running_loop().time()
        assert not any([await got(tier) for _ in range(1000)])
        assert asyncio.get_running_loop().time() - before < 1000 * 0.05 / 2, "nobody waits any more"
