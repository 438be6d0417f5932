"""A connection to a worker in another process, over gRPC."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc.aio

from wire.errors import Unavailable
from wire.pb import worker_pb2
from wire.pb.worker_pb2_grpc import WorkerStub
from wire.rpc import LINE_OPTIONS, TOKEN_METADATA
from wire.rpc_status import from_rpc_error

_OWN_CONNECTION = ("grpc.use_local_subchannel_pool", 1)
"""Else gRPC shares a connection, and the growing time between two tries at it, with lines that have ended."""


class GrpcTransport:
    """A Transport: one channel with one call on it, until `close`."""

    def __init__(self, address: str, token: str) -> None:
        self._channel = grpc.aio.insecure_channel(address, options=(*LINE_OPTIONS, _OWN_CONNECTION))
        self._call = WorkerStub(self._channel).Connect(metadata=((TOKEN_METADATA, token),))

    async def write(self, request: worker_pb2.ConnectRequest) -> None:
        async with self._breaks():
            await self._call.write(request)

    async def read(self) -> worker_pb2.ConnectResponse | None:
        async with self._breaks():
            response = await self._call.read()
        return None if response is grpc.aio.EOF else response

    async def close(self) -> None:
        self._call.cancel()
        await self._channel.close()

    @asynccontextmanager
    async def _breaks(self) -> AsyncIterator[None]:
        """Raises Unavailable for whatever may end a call: its line is of no use any more."""
        try:
            yield
        except grpc.aio.AioRpcError as failure:
            raise Unavailable(from_rpc_error(failure).message) from failure
        except asyncio.InvalidStateError as failure:  # a write to a call that is over, whose status is there already
            raise Unavailable(await self._call.details() or "the line has ended") from failure
