"""A connection to a worker in another process, over gRPC."""

import asyncio
import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc.aio

from wire.errors import Unauthenticated, Unavailable
from wire.pb import worker_pb2
from wire.pb.worker_pb2_grpc import WorkerStub
from wire.rpc import LINE_OPTIONS, NONCE_METADATA, first_of_line, from_rpc_error, open_channel
from wire.trust.identity import NONCE_BYTES, Identity

_OWN_CONNECTION = ("grpc.use_local_subchannel_pool", 1)
"""A channel option: else gRPC would share a connection, and its back-off, with ended lines."""


class GrpcTransport:
    """A Transport: a channel with one call, until `close`. Both ends first prove the token."""

    def __init__(self, address: str, token: str, identity: Identity | None = None) -> None:
        nonce = secrets.token_bytes(NONCE_BYTES)
        self._channel = open_channel(address, (*LINE_OPTIONS, _OWN_CONNECTION), identity)
        self._call = WorkerStub(self._channel).Connect(metadata=((NONCE_METADATA, nonce),))
        self._proving = asyncio.create_task(self._prove(token, nonce))

    async def write(self, request: worker_pb2.ConnectRequest) -> None:
        async with self._breaks():
            await asyncio.shield(self._proving)
            await self._call.write(request)

    async def read(self) -> worker_pb2.ConnectResponse | None:
        async with self._breaks():
            await asyncio.shield(self._proving)
            response = await self._call.read()
        return None if response is grpc.aio.EOF else response

    async def close(self) -> None:
        self._call.cancel()
        self._proving.cancel()
        await asyncio.gather(self._proving, return_exceptions=True)
        await self._channel.close()

    async def _prove(self, token: str, nonce: bytes) -> None:
        await self._call.write(await first_of_line(self._call, token, nonce))

    @asynccontextmanager
    async def _breaks(self) -> AsyncIterator[None]:
        """Raises Unavailable for any error that ends a call."""
        try:
            yield
        except grpc.aio.AioRpcError as failure:
            raise Unavailable(from_rpc_error(failure).message) from failure
        except Unauthenticated as failure:
            raise Unavailable(failure.message) from failure
        except asyncio.InvalidStateError as failure:  # a write to a call that is over, whose status is there already
            raise Unavailable(await self._call.details() or "the line has ended") from failure
