"""A worker in another process, spoken to over gRPC."""

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from copy import copy

import grpc
import grpc.aio

from router.workers.worker_client import DecodeUpdates
from wire.errors import BatonError
from wire.ids import RequestId
from wire.pb import worker_pb2
from wire.pb.worker_pb2_grpc import WorkerStub
from wire.rpc import CHANNEL_OPTIONS, TOKEN_METADATA
from wire.rpc_status import from_rpc_error

_RECONNECT_OPTIONS = (
    ("grpc.initial_reconnect_backoff_ms", 200),
    ("grpc.min_reconnect_backoff_ms", 200),
    ("grpc.max_reconnect_backoff_ms", 1_000),
)


class GrpcWorkerClient:
    """One connection, over which all calls go; it is made again when it breaks. Belongs to the running event loop."""

    def __init__(self, address: str, token: str) -> None:
        self._channel = grpc.aio.insecure_channel(address, options=[*CHANNEL_OPTIONS, *_RECONNECT_OPTIONS])
        self._stub = WorkerStub(self._channel)
        self._metadata = ((TOKEN_METADATA, token),)
        self._closed_for: BatonError | None = None

    async def get_info(self, timeout_s: float) -> worker_pb2.WorkerInfo:
        request = worker_pb2.GetInfoRequest()
        with self._errors():
            info: worker_pb2.WorkerInfo = await self._stub.GetInfo(request, timeout=timeout_s, metadata=self._metadata)
        return info

    async def get_status(self, request: worker_pb2.GetWorkerStatusRequest, timeout_s: float) -> worker_pb2.WorkerStatus:
        with self._errors():
            call = self._stub.GetStatus(request, timeout=timeout_s, metadata=self._metadata)
            status: worker_pb2.WorkerStatus = await call
        return status

    async def prefill(self, request: worker_pb2.PrefillRequest, timeout_s: float) -> worker_pb2.PrefillResponse:
        with self._errors():
            call = self._stub.Prefill(request, timeout=timeout_s, metadata=self._metadata)
            response: worker_pb2.PrefillResponse = await call
        return response

    async def decode(self, request: worker_pb2.DecodeRequest, timeout_s: float) -> DecodeUpdates:
        with self._errors():
            call = self._stub.Decode(request, timeout=timeout_s, metadata=self._metadata)
            try:
                async for update in call:
                    yield update
            finally:
                call.cancel()

    async def renew(self, request_ids: Sequence[RequestId], timeout_s: float) -> None:
        request = worker_pb2.RenewRequest(request_ids=request_ids)
        with self._errors():
            await self._stub.Renew(request, timeout=timeout_s, metadata=self._metadata)

    async def release(self, request_ids: Sequence[RequestId], timeout_s: float) -> None:
        request = worker_pb2.ReleaseRequest(request_ids=request_ids)
        with self._errors():
            await self._stub.Release(request, timeout=timeout_s, metadata=self._metadata)

    async def start_drain(self, timeout_s: float) -> None:
        request = worker_pb2.StartDrainRequest()
        with self._errors():
            await self._stub.StartDrain(request, timeout=timeout_s, metadata=self._metadata)

    async def close(self, reason: BatonError) -> None:
        self._closed_for = reason
        await self._channel.close()

    @contextmanager
    def _errors(self) -> Iterator[None]:
        self._require_open()
        try:
            yield
        except grpc.aio.AioRpcError as failure:
            self._require_open()
            raise from_rpc_error(failure) from failure
        except asyncio.CancelledError:
            # Closing the channel cancels its calls, which looks to their callers as if they themselves were cancelled.
            self._require_open()
            raise

    def _require_open(self) -> None:
        if self._closed_for is not None:
            raise copy(self._closed_for) from None
