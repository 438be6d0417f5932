"""Sees to it that a client which stops reading does not keep its stream for ever."""

import asyncio
import logging
from typing import Any

import grpc.aio
from grpc_status import rpc_status

from router.requests.events import Stopped
from router.requests.session import Session
from wire.errors import Overloaded
from wire.rpc_status import to_status

log = logging.getLogger(__name__)

_ABORT_TIMEOUT_S = 5.0


class ReaderWatch:
    """Ends the stream of one session, written by the current task, when a write has been stuck for `max_stall_s`.

    gRPC takes some megabytes before it makes a writer wait, so what a stream may hold in memory is that and the outbox.
    """

    def __init__(self, session: Session, context: grpc.aio.ServicerContext[Any, Any], max_stall_s: float) -> None:
        self._session = session
        self._context = context
        self._max_stall_s = max_stall_s
        self._writer = asyncio.current_task()
        self._task = asyncio.create_task(self._watch())

    def close(self) -> None:
        """The stream is over."""
        self._task.cancel()

    async def _watch(self) -> None:
        while (left_s := self._time_left_s()) > 0:  # noqa: ASYNC110
            await asyncio.sleep(left_s)
        request = {"request_id": self._session.request_id}
        log.warning("a client has not read for %s s, and its stream is ended", self._max_stall_s, extra=request)
        error = Overloaded("the client has stopped reading")
        self._session.on(Stopped(error))
        await self._abort(error)

    def _time_left_s(self) -> float:
        taken_at = self._session.outbox.taken_at
        if taken_at is None:
            return self._max_stall_s
        return taken_at + self._max_stall_s - asyncio.get_running_loop().time()

    async def _abort(self, error: Overloaded) -> None:
        """The status waits behind the unread messages; the writer, stuck in the midst of one, must not."""
        try:
            async with asyncio.timeout(_ABORT_TIMEOUT_S):
                await self._context.abort_with_status(rpc_status.to_status(to_status(error)))
        except (TimeoutError, grpc.aio.AbortError, grpc.aio.UsageError):
            if self._writer is not None:
                self._writer.cancel()
