"""One call that the worker serves, and all calls that it serves now. Belongs to one event loop."""

import asyncio
from collections.abc import Iterator

from wire.errors import BatonError, RequestExists
from wire.ids import RequestId
from worker.update import Update


class Call:
    """Carries updates from the engine to whoever waits for them.

    Whatever the reader's pace, at most one update waits: a later one joins it, so that it grows by tokens only.
    """

    def __init__(self, request_id: RequestId, attempt: int) -> None:
        self.request_id = request_id
        self.attempt = attempt
        self.closed = False
        self._update: Update | None = None
        self._error: BatonError | None = None
        self._changed = asyncio.Event()

    def send(self, update: Update) -> None:
        """Adds news. Does nothing once closed."""
        if not self.closed:
            self._update = update if self._update is None else self._update.followed_by(update)
            self._changed.set()

    def close(self, error: BatonError | None) -> None:
        """Ends the call, after what was sent. Does nothing once closed."""
        if not self.closed:
            self.closed = True
            self._error = error
            self._changed.set()

    async def take(self) -> Update | None:
        """Everything new, as soon as there is something; None once the call has ended well.

        Raises the error it was closed with. The service closes every call when its time is up, so this returns by then.
        """
        await self._changed.wait()
        update, self._update = self._update, None
        if not self.closed:
            self._changed.clear()
        if update is None and self._error is not None:
            raise self._error
        return update


class Calls:
    """The open calls, one for each request: the latest attempt at it."""

    def __init__(self) -> None:
        self._calls: dict[RequestId, Call] = {}
        self._none = asyncio.Event()
        self._none.set()

    def __iter__(self) -> Iterator[Call]:
        return iter(tuple(self._calls.values()))

    def __len__(self) -> int:
        return len(self._calls)

    def open(self, call: Call) -> Call | None:
        """Registers a call; returns the earlier attempt at its request that it displaces, if there is one.

        Raises RequestExists if this attempt, or a later one, is open.
        """
        earlier = self._calls.get(call.request_id)
        if earlier is not None and earlier.attempt >= call.attempt:
            raise RequestExists("this attempt at the request, or a later one, is running", request_id=call.request_id)
        self._calls[call.request_id] = call
        self._none.clear()
        return earlier

    def remove(self, call: Call) -> None:
        """Forgets a call, unless a later attempt has taken its place."""
        if self._calls.get(call.request_id) is call:
            del self._calls[call.request_id]
        if not self._calls:
            self._none.set()

    async def wait_until_none(self) -> None:
        """Returns once no call is open."""
        await self._none.wait()
