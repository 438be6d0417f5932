"""The line to a worker whose process is stopped: the system takes what is sent to it, and nobody ever answers."""

import asyncio
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import aclosing

import pytest

from router.workers import grpc_worker_client
from router.workers.grpc_worker_client import GrpcWorkerClient
from tests.router.test_worker_clients import DECODE, TOKEN
from wire.errors import BatonError, Unavailable, WorkerLeaving
from wire.pb import worker_pb2
from wire.rpc import CHANNEL_OPTIONS

TIMEOUT_S = 30.0
HURRIED = {"grpc.keepalive_time_ms": 1_000, "grpc.keepalive_timeout_ms": 500, "grpc.http2.ping_timeout_ms": 500}


@pytest.fixture
def worker() -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", "tests.router.worker_server", TOKEN]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        yield process
        process.kill()


def test_silence_on_a_line_lasts_at_most_15_s() -> None:
    options = dict(CHANNEL_OPTIONS)
    assert options["grpc.keepalive_time_ms"] + options["grpc.keepalive_timeout_ms"] == 15_000
    assert options["grpc.http2.ping_timeout_ms"] == options["grpc.keepalive_timeout_ms"]
    assert options["grpc.keepalive_permit_without_calls"] == 1


async def test_a_call_ends_though_the_connection_does_not(
    worker: subprocess.Popen[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grpc_worker_client, "CHANNEL_OPTIONS", tuple({**dict(CHANNEL_OPTIONS), **HURRIED}.items()))
    assert worker.stdout is not None
    client = GrpcWorkerClient(worker.stdout.readline().strip(), TOKEN)
    async with aclosing(client.decode(DECODE, 2 * TIMEOUT_S)) as updates:
        await anext(updates)
        worker.send_signal(signal.SIGSTOP)
        async with asyncio.timeout(TIMEOUT_S):
            with pytest.raises(Unavailable):
                await anext(updates)
    worker.send_signal(signal.SIGCONT)
    assert await state_of(client) == "ready"
    await client.close(WorkerLeaving("it is not needed any more"))


async def state_of(client: GrpcWorkerClient) -> str:
    """As soon as the connection is made again."""
    async with asyncio.timeout(TIMEOUT_S):
        while True:
            try:
                return (await client.get_status(worker_pb2.GetWorkerStatusRequest(), 1.0)).state
            except BatonError:
                await asyncio.sleep(0.1)
