"""The contract of a worker's client, for the one over gRPC and for its twin."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass

import pytest

from router.workers.grpc_worker_client import GrpcWorkerClient
from router.workers.local_worker_client import Faults, LocalWorkerClient
from router.workers.worker_client import WorkerClient
from tests.router.fake_cluster import expected, until
from tests.router.fake_worker import FakeWorker
from tests.router.worker_server import served
from wire.errors import DeadlineExceeded, InvalidRequest, Unauthenticated, Unavailable, WorkerLeaving
from wire.ids import RequestId, WorkerId
from wire.pb import inference_pb2 as pb
from wire.pb import worker_pb2
from wire.pools import Role

TOKEN = "the cluster's token"
CLOSED = WorkerLeaving("it is not needed any more")
SAMPLING = pb.SamplingParams(seed=1, n=1, max_tokens=6)
PROMPT = pb.TokenIds(ids=list(b"hello, world"))
PREFILL = worker_pb2.PrefillRequest(request_id="a", attempt=1, prompt=PROMPT, sampling_params=SAMPLING)
DECODE = worker_pb2.DecodeRequest(
    request_id="a",
    attempt=1,
    prompt=PROMPT,
    sampling_params=SAMPLING,
    choices=[worker_pb2.ChoiceSoFar(index=0, output=pb.TokenIds(ids=expected(6)[:1]))],
)


@dataclass
class Line:
    """A worker and a client of it. `cut` makes the worker go away at once."""

    worker: FakeWorker
    client: WorkerClient
    cut: Callable[[], Awaitable[None]]


@pytest.fixture(params=["local", "grpc"])
async def line(request: pytest.FixtureRequest) -> AsyncIterator[Line]:
    worker = FakeWorker(WorkerId("w"), Role.DECODE)
    if request.param == "local":
        local = LocalWorkerClient(worker)

        async def kill() -> None:
            local.kill()

        yield Line(worker, local, kill)
        return
    async with served(worker, TOKEN) as (server, address):
        client = GrpcWorkerClient(address, TOKEN)
        yield Line(worker, client, lambda: server.stop(None))
        await client.close(CLOSED)


async def tokens_of(client: WorkerClient) -> list[int]:
    async with aclosing(client.decode(DECODE, 5.0)) as updates:
        return [token async for update in updates for choice in update.choices for token in choice.token_ids]


async def test_calls_arrive_and_are_answered(line: Line) -> None:
    assert (await line.client.get_info(5.0)).worker_id == "w"
    assert (await line.client.get_status(worker_pb2.GetWorkerStatusRequest(), 5.0)).state == "ready"
    assert list((await line.client.prefill(PREFILL, 5.0)).choices[0].token_ids) == expected(6)[:1]
    assert await tokens_of(line.client) == expected(6)[1:]
    await line.client.renew([RequestId("a")], 5.0)
    await line.client.release([RequestId("a"), RequestId("b")], 5.0)
    await line.client.start_drain(5.0)
    assert (line.worker.renewed, line.worker.released, line.worker.state) == ([["a"]], ["a", "b"], "draining")


async def test_what_a_worker_raises_arrives(line: Line) -> None:
    line.worker.refusal = InvalidRequest("prompt", "is poison")
    with pytest.raises(InvalidRequest, match="poison") as raised:
        await line.client.prefill(PREFILL, 5.0)
    assert raised.value.ids == {"param": "prompt"}
    with pytest.raises(InvalidRequest):
        await tokens_of(line.client)


async def test_calls_end_in_time(line: Line) -> None:
    line.worker.may_go.clear()
    with pytest.raises(DeadlineExceeded):
        await line.client.prefill(PREFILL, 0.05)
    with pytest.raises(DeadlineExceeded):
        async for _ in line.client.decode(DECODE, 0.05):
            pass
    await until(lambda: not line.worker.open_calls)


async def test_a_cancelled_prefill_is_aborted_on_the_worker(line: Line) -> None:
    line.worker.may_go.clear()
    call = asyncio.create_task(line.client.prefill(PREFILL, 5.0))
    await until(lambda: line.worker.open_calls)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    await until(lambda: not line.worker.open_calls)


async def test_a_cancelled_decode_is_aborted_on_the_worker(line: Line) -> None:
    line.worker.may_go.clear()
    call = asyncio.create_task(tokens_of(line.client))
    await until(lambda: line.worker.open_calls)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    await until(lambda: not line.worker.open_calls)


async def test_a_closed_iterator_is_aborted_on_the_worker(line: Line) -> None:
    async with aclosing(line.client.decode(DECODE, 5.0)) as updates:
        await anext(updates)
    await until(lambda: not line.worker.open_calls)


async def test_a_worker_that_goes_away_is_unavailable_to_those_who_wait(line: Line) -> None:
    line.worker.may_go.clear()
    calls = [asyncio.create_task(line.client.prefill(PREFILL, 5.0)), asyncio.create_task(tokens_of(line.client))]
    await until(lambda: line.worker.open_calls == 2)
    await line.cut()
    for call in calls:
        with pytest.raises(Unavailable):
            await call
    with pytest.raises(Unavailable):
        await line.client.get_info(5.0)


async def test_a_closed_client_tells_the_reason_to_those_who_wait(line: Line) -> None:
    line.worker.may_go.clear()
    calls = [asyncio.create_task(line.client.prefill(PREFILL, 5.0)), asyncio.create_task(tokens_of(line.client))]
    await until(lambda: line.worker.open_calls == 2)
    await line.client.close(CLOSED)
    for call in calls:
        with pytest.raises(WorkerLeaving):
            await call
    with pytest.raises(WorkerLeaving):
        await line.client.get_info(5.0)


async def test_nobody_at_the_address_is_unavailable() -> None:
    client = GrpcWorkerClient("127.0.0.1:1", TOKEN)
    with pytest.raises(Unavailable):
        await client.get_info(5.0)
    await client.close(CLOSED)


async def test_the_wrong_token_is_refused() -> None:
    async with served(FakeWorker(WorkerId("w"), Role.DECODE), TOKEN) as (_, address):
        client = GrpcWorkerClient(address, "another")
        with pytest.raises(Unauthenticated):
            await client.get_info(5.0)
        with pytest.raises(Unauthenticated):
            await tokens_of(client)
        await client.close(CLOSED)


async def test_a_worker_that_comes_back_is_reached_again() -> None:
    worker = FakeWorker(WorkerId("w"), Role.DECODE)
    async with served(worker, TOKEN) as (_, address):
        client = GrpcWorkerClient(address, TOKEN)
        await client.get_info(5.0)
    with pytest.raises(Unavailable):
        await client.get_info(5.0)
    async with served(worker, TOKEN, address):
        async with asyncio.timeout(5):
            while not await answers(client):  # noqa: ASYNC110
                await asyncio.sleep(0.05)
    await client.close(CLOSED)


async def answers(client: WorkerClient) -> bool:
    try:
        await client.get_info(1.0)
    except Unavailable:
        return False
    return True


@pytest.mark.parametrize("fail_after", [0, 1, 3])
async def test_a_fault_comes_after_so_many_updates(fail_after: int) -> None:
    client = LocalWorkerClient(FakeWorker(WorkerId("w"), Role.DECODE), Faults(fail_after=fail_after))
    seen = []

    async def read() -> None:
        async for update in client.decode(DECODE, 5.0):
            seen.append(update)

    with pytest.raises(Unavailable):
        await read()
    assert len(seen) == fail_after


async def test_dropped_updates_are_missing() -> None:
    client = LocalWorkerClient(FakeWorker(WorkerId("w"), Role.DECODE), Faults(drop=frozenset({2})))
    assert await tokens_of(client) == [expected(6)[1], *expected(6)[3:]]
