"""A fake worker behind a real gRPC server, as the workers' own skin would serve it.

`python -m tests.router.worker_server TOKEN` serves one in a process of its own.
"""

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc.aio

from tests.router.fake_worker import FakeWorker
from wire.ids import WorkerId
from wire.interceptors import ErrorInterceptor, TokenInterceptor
from wire.pb.worker_pb2_grpc import WorkerServicer, add_WorkerServicer_to_server
from wire.pools import Role
from wire.rpc import SERVER_OPTIONS


class Skin(WorkerServicer):
    def __init__(self, worker: FakeWorker) -> None:
        self._worker = worker

    async def GetInfo(self, request: Any, context: Any) -> Any:  # noqa: N802
        return await self._worker.get_info(request)

    async def GetStatus(self, request: Any, context: Any) -> Any:  # noqa: N802
        return await self._worker.get_status(request)

    async def Prefill(self, request: Any, context: Any) -> Any:  # noqa: N802
        return await self._worker.prefill(request)

    async def Decode(self, request: Any, context: Any) -> AsyncIterator[Any]:  # noqa: N802
        async for update in self._worker.decode(request):
            yield update

    async def Renew(self, request: Any, context: Any) -> Any:  # noqa: N802
        return await self._worker.renew(request)

    async def Release(self, request: Any, context: Any) -> Any:  # noqa: N802
        return await self._worker.release(request)

    async def StartDrain(self, request: Any, context: Any) -> Any:  # noqa: N802
        return await self._worker.start_drain(request)


@asynccontextmanager
async def served(
    worker: FakeWorker, token: str, address: str = "127.0.0.1:0"
) -> AsyncIterator[tuple[grpc.aio.Server, str]]:
    """The server and its address."""
    server = grpc.aio.server(interceptors=[TokenInterceptor(token), ErrorInterceptor()], options=SERVER_OPTIONS)
    add_WorkerServicer_to_server(Skin(worker), server)
    port = server.add_insecure_port(address)
    await server.start()
    try:
        yield server, f"127.0.0.1:{port}"
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
