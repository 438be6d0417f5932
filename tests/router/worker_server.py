"""A fake worker behind a real gRPC server, as the workers' own skin would serve it.

`python -m tests.router.worker_server TOKEN` serves one in a process of its own.
"""

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc.aio

from tests.harness.fake_worker import FakeWorker
from wire.ids import WorkerId
from wire.pb.worker_pb2_grpc import add_WorkerServicer_to_server
from wire.pools import Role
from wire.rpc import WORKER_SERVER_OPTIONS, ProofInterceptor, listen
from worker.server import WorkerApi


@asynccontextmanager
async def served(
    worker: FakeWorker, token: str, address: str = "127.0.0.1:0"
) -> AsyncIterator[tuple[grpc.aio.Server, str]]:
    """The server and its address."""
    server = grpc.aio.server(interceptors=[ProofInterceptor(token)], options=WORKER_SERVER_OPTIONS)
    add_WorkerServicer_to_server(WorkerApi(worker.connect), server)
    host, _, port = address.rpartition(":")
    bound = listen(server, host, int(port))
    await server.start()
    try:
        yield server, bound
    finally:
        await server.stop(None)


async def serve_alone(token: str) -> None:
    """For good, and tells its address; a decode that it serves gets no token."""
    worker = FakeWorker(WorkerId("w"), Role.DECODE)
    worker.may_go.clear()
    async with served(worker, token) as (_, address):
        print(address, flush=True)  # noqa: T201
        await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(serve_alone(sys.argv[1]))
