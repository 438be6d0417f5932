"""The line to a worker whose process is stopped: the system takes what is sent to it, and no answer ever comes."""

import asyncio
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from router.workers import grpc_transport
from router.workers.grpc_transport import GrpcTransport
from router.workers.line import Line
from tests.router.test_lines import LEFT, TOKEN, A, Heard, begin
from wire.errors import BatonError, Unavailable
from wire.rpc import CHANNEL_OPTIONS, LINE_OPTIONS

TIMEOUT_S = 30.0
HURRIED = {"grpc.keepalive_time_ms": 1_000, "grpc.keepalive_timeout_ms": 500, "grpc.http2.ping_timeout_ms": 500}


@pytest.fixture
def worker() -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", "tests.router.worker_server", TOKEN]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        yield process
        process.kill()


def test_silence_on_a_line_lasts_at_most_15_s() -> None:
    for options in (dict(CHANNEL_OPTIONS), dict(LINE_OPTIONS)):
        assert options["grpc.keepalive_time_ms"] + options["grpc.keepalive_timeout_ms"] == 15_000
        assert options["grpc.http2.ping_timeout_ms"] == options["grpc.keepalive_timeout_ms"]
        assert options["grpc.keepalive_permit_without_calls"] == 1


async def test_a_call_ends_though_the_connection_does_not(
    worker: subprocess.Popen[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grpc_transport, "LINE_OPTIONS", tuple({**dict(LINE_OPTIONS), **HURRIED}.items()))
    assert worker.stdout is not None
    address = worker.stdout.readline().strip()
    heard, line = Heard(), Line(GrpcTransport(address, TOKEN))
    call = asyncio.create_task(line.run(begin(A, time_left_s=2 * TIMEOUT_S), heard.take))
    async with asyncio.timeout(TIMEOUT_S):
        while not heard.updates:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        worker.send_signal(signal.SIGSTOP)
        with pytest.raises(Unavailable):
            await call
    assert not line.is_open
    await line.close(LEFT)
    worker.send_signal(signal.SIGCONT)
    assert await state_at(address) == "ready"


async def state_at(address: str) -> str:
    """The state of the worker there, as soon as a line to it stands."""
    async with asyncio.timeout(TIMEOUT_S):
        while True:
            line = Line(GrpcTransport(address, TOKEN))
            try:
                return (await line.questions.status(False, 1.0)).state
            except BatonError:
                await asyncio.sleep(0.1)
            finally:
                await line.close(LEFT)
