"""A client's connection: requests in, answers out one after another, and a bound on each wait."""

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from functools import partial
from http import HTTPStatus
from typing import TYPE_CHECKING, cast

from httpd.answer import CONTINUE, Response, head_of
from httpd.errors import HttpError, envelope, headers
from httpd.request_reader import Incoming, RequestReader

if TYPE_CHECKING:
    from httpd.server import Port

MAX_HEAD_S = 10.0
"""Bound on the time in which the head of a request arrives, the wait for the first one included."""
MAX_IDLE_S = 30.0
"""Bound on the idle time after an answer."""
MAX_STALL_S = 30.0
"""Bound on the time that a client takes to read a piece of an answer."""
PROBE_EVERY_S = 1.0
"""Interval of probes while nothing is read: only they show then that the client is gone."""
PIECE_BYTES = 64 << 10
"""Size of a write."""
MAX_HEADS_AN_ITERATION = 4
"""Bound on requests that begin in one iteration of the event loop, so that a burst does not stop streams."""
MAX_BODY_BYTES = 64 << 10
"""Bound on buffered bodies; further bytes wait in the kernel."""

log = logging.getLogger(__name__)


class HeadBudget:
    """The requests that may begin in each iteration of a port's event loop."""

    def __init__(self) -> None:
        self._num_left = MAX_HEADS_AN_ITERATION
        self._waiting: deque[Callable[[], None]] = deque()

    def take(self) -> bool:
        """Takes a place in this iteration; False if none is free."""
        if not self._num_left:
            return False
        if self._num_left == MAX_HEADS_AN_ITERATION:
            asyncio.get_running_loop().call_soon(self._begin)
        self._num_left -= 1
        return True

    def wait(self, work: Callable[[], None]) -> None:
        """Queues work for a later iteration, after `take` returned False."""
        self._waiting.append(work)

    def _begin(self) -> None:
        self._num_left = MAX_HEADS_AN_ITERATION
        while self._waiting and self.take():
            self._waiting.popleft()()


class Connection(asyncio.BufferedProtocol):
    """A connection of a port. Without a request under way it ends at its deadline, even if bytes arrive.

    Only the beginning of a head moves the deadline. Later requests wait in the reader while one is under way.
    """

    def __init__(self, port: "Port") -> None:
        self._port = port
        self._reader = RequestReader(port.hosts)
        self._answer: Response | None = None
        self._deadline: asyncio.TimerHandle | None = None
        self._is_delayed = self._has_eof = self._has_ended = False
        self._writable = asyncio.Event()
        self._writable.set()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's, on which Ray may run actors, is no subclass
        self._address = str((transport.get_extra_info("peername") or [""])[0])
        try:
            self._port.admit(self, self._address)
            self._end_after(MAX_HEAD_S, self._end_late)
        except HttpError as refusal:
            self._say(refusal)
            self._has_ended = True
            self._close()

    def connection_lost(self, exc: Exception | None) -> None:
        self._clear_deadline()
        self._has_ended = True
        self._reader.close()
        self._port.discard(self, self._address)
        self._writable.set()
        if self._answer is not None:
            self._answer.lose()

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._port.buffer

    def buffer_updated(self, nbytes: int) -> None:
        """Reads bytes. A new request waits for a place in an iteration; bytes after it wait in the kernel."""
        data = bytes(self._port.buffer[:nbytes])
        if self._answer is not None or self._has_ended or self._port.heads.take():
            self._read(data)
        else:
            self._is_delayed = True
            self._port.heads.wait(partial(self._read_later, data))
        self._set_reading()

    def eof_received(self) -> bool:
        """Answers the requests that arrived whole: the client may still read. TLS knows no half-closed connection."""
        if self._has_ended or not self._transport.can_write_eof():
            return False
        self._has_eof = True
        self._reader.feed_eof()
        if self._answer is None:
            self._go_on()
        else:
            self._answer.wake()
            self._probe()
        return True

    def pause_writing(self) -> None:
        self._writable.clear()
        self._end_after(MAX_STALL_S, self._transport.abort)

    def resume_writing(self) -> None:
        self._writable.set()
        if self._answer is not None:
            self._clear_deadline()
            self._probe()

    def shut_down(self) -> None:
        """Closes at once, or after the answer that is under way."""
        if self._answer is None:
            self._has_ended = True
            self._close()
        else:
            self._answer.is_last = True

    def abort(self) -> None:
        """Closes at once, and drops unsent bytes."""
        self._transport.abort()

    def _read_later(self, data: bytes) -> None:
        self._is_delayed = False
        self._read(data)
        self._set_reading()

    def _read(self, data: bytes) -> None:
        if self._has_ended:
            return
        was_in_head = self._reader.is_in_head
        self._reader.feed(data)
        if self._answer is not None:
            self._answer.wake()
        elif self._reader.waiting or self._reader.fault is not None:
            self._go_on()
        elif self._reader.is_in_head and not was_in_head:
            self._end_after(MAX_HEAD_S, self._end_late)

    def _set_reading(self) -> None:
        if self._is_delayed or self._reader.num_body_bytes > MAX_BODY_BYTES:
            self._transport.pause_reading()
            if self._answer is not None and self._writable.is_set():
                self._end_after(PROBE_EVERY_S, self._probe)
        elif not self._has_eof:
            self._transport.resume_reading()

    def _go_on(self) -> None:
        """Begins the next request; if there is none, answers with the fault of the bytes after the last, or waits."""
        if self._reader.waiting:
            self._begin(self._reader.waiting.popleft())
        elif self._reader.fault is not None:
            self._refuse(self._reader.fault)
        elif self._has_eof:
            self._end()
        else:
            self._end_after(MAX_HEAD_S if self._reader.is_in_head else MAX_IDLE_S, self._end_late)

    def _begin(self, incoming: Incoming) -> None:
        self._clear_deadline()
        self._answer = Response(incoming, self._reader, self._write, self._set_reading)
        self._port.spawn(self._serve(self._answer))
        if self._has_eof:
            self._probe()

    async def _serve(self, answer: Response) -> None:
        try:
            await self._port.app(answer.incoming.scope, answer.receive, answer.send)
        except HttpError as error:
            log.debug("a body has a fault: %s", error.message)
        except Exception:
            log.exception("the application failed")
        self._answer = None
        self._reader.drop_body(answer.incoming)
        if self._has_ended:
            return
        if answer.is_complete and not answer.is_last:
            self._go_on()
        elif self._reader.fault is not None and not answer.has_begun:
            self._refuse(self._reader.fault)
        else:
            self._end()
        self._set_reading()

    async def _write(self, data: bytes) -> None:
        """Sends in pieces, each when the transport's buffer has room."""
        for start in range(0, len(data), PIECE_BYTES):
            if self._has_ended:
                return
            self._transport.write(data[start : start + PIECE_BYTES])
            await self._writable.wait()

    def _probe(self) -> None:
        """Sends a response that clients skip, while nothing is read: a lost client's kernel answers with a reset."""
        is_deaf = self._has_eof or self._reader.num_body_bytes > MAX_BODY_BYTES
        if self._answer is not None and self._writable.is_set() and is_deaf:
            if not self._answer.has_begun and self._answer.incoming.scope["http_version"] != "1.0":
                self._transport.write(CONTINUE)
            self._end_after(PROBE_EVERY_S, self._probe)

    def _end_late(self) -> None:
        if self._reader.is_in_head:
            self._refuse(
                HttpError(
                    HTTPStatus.REQUEST_TIMEOUT,
                    f"the head of the request has not come within {MAX_HEAD_S:g} s, the limit (fixed)",
                )
            )
        else:
            self._transport.abort()

    def _refuse(self, error: HttpError) -> None:
        self._say(error)
        self._end()

    def _say(self, error: HttpError) -> None:
        """Sends an answer without calling the application."""
        body = envelope(error)
        lines = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body)), *headers(error)]
        self._transport.write(head_of(error.status.http, [*lines, (b"connection", b"close")]) + body)

    def _end(self) -> None:
        """Closes the writing half, and discards input until the client closes, lest it lose the last answer."""
        self._has_ended = True
        if self._has_eof or not self._transport.can_write_eof():
            self._close()
            return
        self._end_after(MAX_STALL_S, self._transport.abort)
        try:
            self._transport.write_eof()
        except OSError:  # the client has gone, unread
            self._transport.abort()

    def _close(self) -> None:
        if not self._transport.is_closing():  # asyncio's TLS transport that is closed twice can no longer be aborted
            self._transport.close()
        self._end_after(MAX_STALL_S, self._transport.abort)

    def _end_after(self, seconds: float, end: Callable[[], None]) -> None:
        self._clear_deadline()
        self._deadline = asyncio.get_running_loop().call_later(seconds, end)

    def _clear_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
