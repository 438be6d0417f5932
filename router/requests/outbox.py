"""Messages that are ready for a client and not yet taken by its stream."""

import asyncio
from collections import deque

from wire.pb import inference_pb2 as pb


class Outbox:
    """A bounded queue for one reader, ended by one last message or one error.

    `max_events` bounds what waits here. What gRPC took and the client did not read is seen by `writing_since`: the
    loop's time when the reader last took a message, which it may still be writing; None while it waits for one.
    """

    def __init__(self, max_events: int) -> None:
        self.writing_since: float | None = None
        self._max_events = max_events
        self._events: deque[pb.GenerateResponse] = deque()
        self._error: Exception | None = None
        self._closed = False
        self._reader: asyncio.Future[None] | None = None

    def put(self, event: pb.GenerateResponse) -> bool:
        """False if there is no room: the reader is too slow, and the event is not taken."""
        if len(self._events) >= self._max_events:
            return False
        self._events.append(event)
        self._wake()
        return True

    def complete(self, last: pb.GenerateResponse) -> None:
        """For the last message there is always room."""
        self._events.append(last)
        self._close()

    def fail(self, error: Exception) -> None:
        """The reader gets the messages that are there already, and then this error."""
        self._error = error
        self._close()

    def _close(self) -> None:
        self._closed = True
        self._wake()

    def _wake(self) -> None:
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)

    def __aiter__(self) -> "Outbox":
        return self

    async def __anext__(self) -> pb.GenerateResponse:
        loop = asyncio.get_running_loop()
        self.writing_since = None
        while not self._events and not self._closed:
            self._reader = loop.create_future()
            await self._reader
        self.writing_since = loop.time()
        if self._events:
            return self._events.popleft()
        if self._error is not None:
            raise self._error
        raise StopAsyncIteration
