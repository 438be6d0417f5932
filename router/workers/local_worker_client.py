"""A worker in this process, with faults to order: the in-memory twin of a worker over gRPC."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager
from copy import copy
from dataclasses import dataclass, field
from typing import Protocol

from router.workers.worker_client import DecodeUpdates
from wire.errors import BatonError, DeadlineExceeded, Unavailable
from wire.ids import RequestId
from wire.pb import worker_pb2


class WorkerMethods(Protocol):
    """What a worker's service offers under its gRPC skin."""

    async def get_info(self, request: worker_pb2.GetInfoRequest) -> worker_pb2.WorkerInfo: ...

    async def get_status(self, request: worker_pb2.GetWorkerStatusRequest) -> worker_pb2.WorkerStatus: ...

    async def prefill(self, request: worker_pb2.PrefillRequest) -> worker_pb2.PrefillResponse: ...

    def decode(self, request: worker_pb2.DecodeRequest) -> DecodeUpdates: ...

    async def renew(self, request: worker_pb2.RenewRequest) -> worker_pb2.RenewResponse: ...

    async def release(self, request: worker_pb2.ReleaseRequest) -> worker_pb2.ReleaseResponse: ...

    async def start_drain(self, request: worker_pb2.StartDrainRequest) -> worker_pb2.StartDrainResponse: ...


@dataclass
class Faults:
    """What goes wrong from now on.

    delay_s: before each answer and each update.
    fail_after: the worker dies instead of giving its so-many-and-first next answer or update; None, never.
    drop: updates that never arrive, by their number in the stream, from 0.
    """

    delay_s: float = 0.0
    fail_after: int | None = None
    drop: frozenset[int] = field(default_factory=frozenset)


class LocalWorkerClient:
    """Calls a worker's service directly, on the running event loop."""

    def __init__(self, service: WorkerMethods, faults: Faults | None = None) -> None:
        self.faults = faults or Faults()
        self._service = service
        self._death: BatonError | None = None
        self._callers: set[asyncio.Task[object]] = set()

    def kill(self) -> None:
        """The worker dies: calls under way end, and no more are answered."""
        self._end(Unavailable("the worker died"))

    def _end(self, reason: BatonError) -> None:
        self._death = self._death or reason
        for caller in self._callers - {asyncio.current_task()}:
            caller.cancel()

    async def get_info(self, timeout_s: float) -> worker_pb2.WorkerInfo:
        async with self._call(timeout_s):
            return await self._service.get_info(worker_pb2.GetInfoRequest())

    async def get_status(self, request: worker_pb2.GetWorkerStatusRequest, timeout_s: float) -> worker_pb2.WorkerStatus:
        async with self._call(timeout_s):
            return await self._service.get_status(request)

    async def prefill(self, request: worker_pb2.PrefillRequest, timeout_s: float) -> worker_pb2.PrefillResponse:
        async with self._call(timeout_s):
            response = await self._service.prefill(request)
            await self._suffer()
            return response

    async def decode(self, request: worker_pb2.DecodeRequest, timeout_s: float) -> DecodeUpdates:
        async with self._call(timeout_s), aclosing(self._service.decode(request)) as updates:
            number = 0
            async for update in updates:
                await self._suffer()
                if number not in self.faults.drop:
                    yield update
                number += 1

    async def renew(self, request_ids: Sequence[RequestId], timeout_s: float) -> None:
        async with self._call(timeout_s):
            await self._service.renew(worker_pb2.RenewRequest(request_ids=request_ids))

    async def release(self, request_ids: Sequence[RequestId], timeout_s: float) -> None:
        async with self._call(timeout_s):
            await self._service.release(worker_pb2.ReleaseRequest(request_ids=request_ids))

    async def start_drain(self, timeout_s: float) -> None:
        async with self._call(timeout_s):
            await self._service.start_drain(worker_pb2.StartDrainRequest())

    async def close(self, reason: BatonError) -> None:
        self._end(reason)

    async def _suffer(self) -> None:
        await asyncio.sleep(self.faults.delay_s)
        if self.faults.fail_after == 0:
            self.kill()
            raise Unavailable("the worker died")
        if self.faults.fail_after is not None:
            self.faults.fail_after -= 1

    def _require_alive(self) -> None:
        if self._death is not None:
            raise copy(self._death) from None

    @asynccontextmanager
    async def _call(self, timeout_s: float) -> AsyncIterator[None]:
        self._require_alive()
        caller = _current_task()
        self._callers.add(caller)
        try:
            async with asyncio.timeout(timeout_s):
                yield
        except TimeoutError as error:
            raise DeadlineExceeded("the worker did not answer in time") from error
        except asyncio.CancelledError:
            if self._death is not None:
                caller.uncancel()
            self._require_alive()
            raise
        finally:
            self._callers.discard(caller)


def _current_task() -> asyncio.Task[object]:
    task = asyncio.current_task()
    assert task is not None, "called outside of a task"
    return task
