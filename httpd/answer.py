"""The answer to one request, from ASGI's messages, in the framing of the request's version."""

import asyncio
import time
from collections.abc import Awaitable, Callable, MutableMapping, Sequence
from email.utils import formatdate
from functools import lru_cache
from http import HTTPStatus
from typing import Any

from httpd.request_reader import Incoming, RequestReader

Message = MutableMapping[str, Any]
CLIENT_CLOSED = 499
"""The status of a request that its client or an operator has ended: HTTP has no number for it."""
CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
_CLOSE = (b"connection", b"close")


class Response:
    """A request under way. `is_last`: the connection closes after it.

    write: sends bytes, and waits for a slow client. read_on: called when a part of the body was taken.
    """

    def __init__(
        self,
        incoming: Incoming,
        reader: RequestReader,
        write: Callable[[bytes], Awaitable[None]],
        read_on: Callable[[], None],
    ) -> None:
        self.incoming = incoming
        self.is_last = incoming.is_last
        self.has_begun = self.is_complete = self.is_lost = False
        self._reader = reader
        self._write = write
        self._read_on = read_on
        self._news = asyncio.Event()
        self._has_all = self._is_chunked = False
        self._head = b""

    def wake(self) -> None:
        """Wakes `receive`: bytes have come, or no more will."""
        self._news.set()

    def lose(self) -> None:
        """Notes that the client has gone: nothing is sent any more."""
        self.is_lost = True
        self._news.set()

    async def receive(self) -> Message:
        """Waits for more of the body, then for the end of the answer. Raises HttpError for a malformed body."""
        if self.incoming.wants_continue and not self.has_begun:
            self.incoming.wants_continue = False
            await self._write(CONTINUE)
        while not (self.is_lost or self.is_complete):
            if self.incoming.body or (self.incoming.is_whole and not self._has_all):
                self._has_all = self.incoming.is_whole
                body = self._reader.take_body(self.incoming)
                self._read_on()
                return {"type": "http.request", "body": body, "more_body": not self._has_all}
            if self._reader.fault is not None and not self.incoming.is_whole:
                raise self._reader.fault
            self._news.clear()
            await self._news.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Message) -> None:
        """Sends ASGI's message; the head goes with the first piece of the body."""
        if self.is_lost:
            return
        if message["type"] == "http.response.start":
            self._begin(message["status"], message["headers"])
            return
        more = message["more_body"]
        head, self._head = self._head, b""
        await self._write(head + self._framed(message["body"], more))
        if not more:
            self.is_complete = True
            self._news.set()

    def _begin(self, status: int, headers: Sequence[tuple[bytes, bytes]]) -> None:
        """Writes the head. The connection closes if the request is not whole."""
        self.has_begun = True
        lines = [one for one in headers if one != _CLOSE]
        self.is_last = self.is_last or not self.incoming.is_whole or len(lines) < len(headers)
        has_len = any(name == b"content-length" for name, _ in headers)
        self._is_chunked = not has_len and self.incoming.scope["http_version"] != "1.0"
        if self._is_chunked:
            lines.append((b"transfer-encoding", b"chunked"))
        if self.is_last:
            lines.append(_CLOSE)
        self._head = head_of(status, lines)

    def _framed(self, body: bytes, more: bool) -> bytes:
        if self.incoming.scope["method"] == "HEAD":
            return b""
        if not self._is_chunked:
            return body
        framed = b"%x\r\n%b\r\n" % (len(body), body) if body else b""
        return framed if more else framed + b"0\r\n\r\n"


def head_of(status: int, headers: Sequence[tuple[bytes, bytes]]) -> bytes:
    """Writes the head of an answer, with the date."""
    phrase = "Client Closed Request" if status == CLIENT_CLOSED else HTTPStatus(status).phrase
    first = b"HTTP/1.1 %d %b\r\ndate: %b\r\n" % (status, phrase.encode(), _date(int(time.time())))
    return b"".join([first, *(b"%b: %b\r\n" % one for one in headers), b"\r\n"])


@lru_cache(1)
def _date(now_s: int) -> bytes:
    return formatdate(now_s, usegmt=True).encode()
