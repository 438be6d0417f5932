"""The reader of a connection's requests, up to the first fault: httptools' parser, with bounds."""

import re
from collections import deque
from collections.abc import Collection, MutableMapping
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any

import httptools

from httpd.errors import HttpError
from wire.errors import reached

MAX_PIPELINED = 16
"""Bound on the requests of one connection that wait while another is answered."""
MAX_HEAD_BYTES = 16 << 10
"""Bound on a head, on trailers, and on each line between chunks."""
MAX_HEADERS = 100
_HOST = re.compile(rb"(\[[0-9a-fA-F:.]+\]|[A-Za-z0-9._-]+)(:[0-9]{0,5})?")

Scope = MutableMapping[str, Any]


@dataclass(kw_only=True)
class Incoming:
    """A request as it comes: ASGI's scope, and received bytes of its body that were not taken yet.

    is_last: the connection closes after its answer. is_wanted: its body is kept.
    """

    scope: Scope
    is_last: bool
    wants_continue: bool
    body: bytearray = field(default_factory=bytearray)
    is_whole: bool = False
    is_wanted: bool = True


class RequestReader:
    """A reader of requests. `waiting` has the requests that have not begun; `fault`: the error in the bytes after them.

    A request that the fault cuts off leaves `waiting`; if it has begun, it never becomes whole.
    """

    def __init__(self, hosts: Collection[str] | None) -> None:
        """hosts: names that a request may give, without ports and in lower case; None for any."""
        self.waiting: deque[Incoming] = deque()
        self.fault: HttpError | None = None
        self.is_in_head = False
        self.num_body_bytes = 0
        self._hosts = hosts
        self._incoming: Incoming | None = None
        self._is_over = False
        self._num_parsed_bytes = self._num_open_bytes = 0
        self._parser = httptools.HttpRequestParser(self)

    def feed(self, data: bytes) -> None:
        """Parses further bytes; skips bytes after a fault, and after the connection's last request."""
        if self.fault is not None or self._is_over:
            return
        self._num_open_bytes += len(data)
        try:
            self._parse(data)
        except httptools.HttpParserError as error:
            if not self._is_over:
                self._end(error.__context__ if isinstance(error.__context__, HttpError) else _fault(_BAD))
        if self._num_open_bytes > MAX_HEAD_BYTES:
            self._end(_too_long())

    def feed_eof(self) -> None:
        """Ends the bytes: an unfinished head or body is a fault."""
        if self.is_in_head or self._incoming is not None:
            self._end(_fault(_BAD))

    def close(self) -> None:
        """Drops the parser, which refers back: so connections leave no reference cycles to collect."""
        del self._parser

    def take_body(self, incoming: Incoming) -> bytes:
        """Returns the bytes of a body received since the last call."""
        body = bytes(incoming.body)
        incoming.body.clear()
        self.num_body_bytes -= len(body)
        return body

    def drop_body(self, incoming: Incoming) -> None:
        """Discards a body: received bytes and later ones."""
        self.take_body(incoming)
        incoming.is_wanted = False

    def _parse(self, data: bytes) -> None:
        """Parses bytes. A head that offers another protocol is parsed again without the offer."""
        while data:
            try:
                self._parser.feed_data(data)
                data = b""
            except httptools.HttpParserUpgrade as offer:
                data = self._plain_head() + data[offer.args[0] :]
                self._parser = httptools.HttpRequestParser(self)

    def _end(self, fault: HttpError) -> None:
        if self.fault is None:
            self.fault = fault
            if self.waiting and not self.waiting[-1].is_whole:
                self.drop_body(self.waiting.pop())

    def on_message_begin(self) -> None:
        self.is_in_head = True
        self._url = b""
        self._headers: list[tuple[bytes, bytes]] = []
        self._num_parsed_bytes = 0

    def on_url(self, url: bytes) -> None:
        self._url += url
        self._count(len(url))

    def on_header(self, name: bytes, value: bytes) -> None:
        """Takes a header or a trailer; both count against one bound."""
        self._headers.append((name.lower(), value))
        self._count(len(name) + len(value))

    def on_headers_complete(self) -> None:
        if self._parser.get_method() == b"CONNECT":
            raise _fault("this server is no proxy")
        if self._parser.should_upgrade():
            return
        headers, version = self._headers, self._parser.get_http_version()
        self._require_host(headers, version)
        if len(self.waiting) >= MAX_PIPELINED:
            raise _fault(reached(MAX_PIPELINED, "requests wait on this connection"), HTTPStatus.TOO_MANY_REQUESTS)
        scope = {
            "type": "http",
            "http_version": version,
            "method": self._parser.get_method().decode("ascii"),
            "raw_path": httptools.parse_url(self._url).path,
            "headers": headers.copy(),
        }
        is_last = version == "1.0" or not self._parser.should_keep_alive()
        wants_continue = version != "1.0" and any(
            name == b"expect" and value.lower() == b"100-continue" for name, value in headers
        )
        self._incoming = Incoming(scope=scope, is_last=is_last, wants_continue=wants_continue)
        self.waiting.append(self._incoming)
        self.is_in_head = False
        self._num_open_bytes = 0

    def on_chunk_header(self) -> None:
        self._num_open_bytes = 0

    def on_body(self, body: bytes) -> None:
        self._num_open_bytes = 0
        if self._incoming is not None and self._incoming.is_wanted:
            self._incoming.body += body
            self.num_body_bytes += len(body)

    def on_message_complete(self) -> None:
        if self._incoming is not None:
            self._incoming.is_whole, self._is_over = True, self._incoming.is_last
            self._incoming = None
            self._num_open_bytes = 0

    def _plain_head(self) -> bytes:
        """Writes the received head without the offer of another protocol."""
        lines = [b"%s %s HTTP/%s" % (self._parser.get_method(), self._url, self._parser.get_http_version().encode())]
        lines += [b"%s: %s" % header for header in self._headers if header[0] != b"upgrade"]
        return b"\r\n".join([*lines, b"", b""])

    def _require_host(self, headers: list[tuple[bytes, bytes]], version: str) -> None:
        """Refuses a request without a host, with several, or with an unknown host; HTTP/1.0 needs no host."""
        given = [value for name, value in headers if name == b"host"]
        if not given and version == "1.0":
            return
        found = _HOST.fullmatch(given[0]) if len(given) == 1 else None
        if found is None or (self._hosts is not None and found[1].decode().lower() not in self._hosts):
            raise _fault(_OTHER_HOST)

    def _count(self, num_bytes: int) -> None:
        self._num_parsed_bytes += num_bytes
        if len(self._headers) > MAX_HEADERS or self._num_parsed_bytes > MAX_HEAD_BYTES:
            raise _too_long()


def _fault(message: str, status: HTTPStatus = HTTPStatus.BAD_REQUEST) -> HttpError:
    """Makes a new error each time: an error raised repeatedly would collect tracebacks."""
    return HttpError(status, message)


def _too_long() -> HttpError:
    return _fault(
        f"the head of the request may have {MAX_HEAD_BYTES:,} bytes and {MAX_HEADERS} headers, the limits (fixed)",
        HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE,
    )


_BAD = "not a valid HTTP/1.1 request"
_OTHER_HOST = (
    "no host of this server: ask for 127.0.0.1 or localhost, or list it in http.host_names (--host-names of `baton up`)"
)
