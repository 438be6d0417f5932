"""How the router speaks to one worker. Twins: `GrpcWorkerClient` and `LocalWorkerClient`."""

from collections.abc import AsyncGenerator, Sequence
from typing import Protocol

from wire.errors import BatonError
from wire.ids import RequestId
from wire.pb import worker_pb2

DecodeUpdates = AsyncGenerator[worker_pb2.DecodeUpdate, None]


class WorkerClient(Protocol):
    """Every call ends within its `timeout_s`, with DeadlineExceeded if need be.

    A worker that cannot be reached or that went away in the middle of a call is Unavailable; what a worker itself
    raises arrives as it is. Cancelling a call's task, or closing its iterator, aborts the request on the worker.
    """

    async def get_info(self, timeout_s: float) -> worker_pb2.WorkerInfo: ...

    async def get_status(
        self, request: worker_pb2.GetWorkerStatusRequest, timeout_s: float
    ) -> worker_pb2.WorkerStatus: ...

    async def prefill(self, request: worker_pb2.PrefillRequest, timeout_s: float) -> worker_pb2.PrefillResponse: ...

    def decode(self, request: worker_pb2.DecodeRequest, timeout_s: float) -> DecodeUpdates:
        """Updates in order, until the worker ends the stream."""
        ...

    async def renew(self, request_ids: Sequence[RequestId], timeout_s: float) -> None: ...

    async def release(self, request_ids: Sequence[RequestId], timeout_s: float) -> None: ...

    async def start_drain(self, timeout_s: float) -> None: ...

    async def close(self, reason: BatonError) -> None:
        """Ends what is under way with this error."""
        ...
