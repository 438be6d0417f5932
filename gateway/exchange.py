"""A request and its answer over ASGI: the body comes in, bytes or events go out."""

import asyncio
import re
import secrets
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Iterator, Mapping, MutableMapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

from gateway import fields, unread
from httpd.errors import HttpError, envelope, headers
from wire.errors import BatonError, Cancelled, InvalidRequest
from wire.ids import REQUEST_ID
from wire.rpc import MAX_MESSAGE_BYTES
from wire.trust.key_ring import bearer
from wire.typed_reader import Read

MAX_COMMAS = 1 << 18
"""Bound on the commas of a body: more exceed any context, and parsing them would block the event loop."""
MAX_BODY_S = 10.0
"""Bound on the time in which a body arrives."""
SENT_BYTES = 64 << 10
"""Least size of a piece of an answer; other streams run between two pieces."""
MIN_SENT_BYTES_PER_S = 1 << 20
"""Lowest rate at which a client may read a whole answer, after GRACE_S."""
GRACE_S = 30.0
BEGIN_AFTER_S = 5.0
"""Time without an event after which a stream begins, once every prompt has a worker."""
COMMENT_EVERY_S = 10.0
"""Longest silence of a stream that has begun: proxies and clients close silent connections."""
COMMENT = b": ping\n\n"
"""A comment, which parsers of event streams skip."""
_JSON = re.compile(r"application/json\s*(;.*)?", re.IGNORECASE)
TIMEOUT = "request-timeout-ms"
"""The header with the milliseconds that an answer may take, as gRPC's `grpc-timeout`."""
_MILLISECONDS = re.compile(r"[1-9]\d{0,8}", re.ASCII)

KINDS = {
    "/metrics": b"text/plain; version=0.0.4",
    "/ui": b"text/html; charset=utf-8",
    "/ui/": b"text/html; charset=utf-8",
    "/ui/page.css": b"text/css; charset=utf-8",
    "/ui/page.js": b"text/javascript; charset=utf-8",
}
"""Content types by path; other answers are JSON."""
FENCES = (
    (
        b"content-security-policy",
        b"default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; "
        b"base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'",
    ),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-opener-policy", b"same-origin"),
)
"""Headers of a page: it runs and loads only its own files, and no other page frames it."""

ANY_ORIGIN = "*"
MAX_PREFLIGHT_AGE_S = 600
"""Time for which a browser need not ask again."""
CLOSED = ("/ui", "/metrics")
"""Prefixes of the operator's paths, closed to pages of other origins."""

Headers = list[tuple[bytes, bytes]]
Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
Events = AsyncGenerator[bytes, None]
Pieces = list[bytes]
"""A whole answer in pieces; a JSON value may span several."""


@dataclass(frozen=True)
class Streamed:
    """An answer as events.

    opening: waits until the stream may begin without an event, and writes its beginning, maybe "". failed: writes the
    event of a failure within a stream.
    """

    events: Events
    opening: Callable[[], Awaitable[bytes]] = lambda: asyncio.get_running_loop().create_future()
    failed: Callable[[BatonError], bytes] = lambda _: b""


class ClientGone(Cancelled):
    """The client has closed its connection."""


class Request:
    """A request: its head, and its body once it is asked for.

    held: units of limits, until the answer is sent. told: further headers of the answer or error. sent: the client's
    names of fields, by the router's. wants_timeline: as its body says, in an error too. left_out: fields of the body
    that are not read.
    """

    def __init__(self, scope: Scope, receive: Receive) -> None:
        self.method: str = scope["method"]
        self.path: str = scope["raw_path"].decode("latin-1")
        self._headers: Sequence[tuple[bytes, bytes]] = scope["headers"]
        self._receive = receive
        given = self.header("x-request-id") or secrets.token_hex(12)
        self._has_id = REQUEST_ID.fullmatch(given) is not None
        self.id = given if self._has_id else secrets.token_hex(12)
        self.is_read = self.header("content-length") in (None, "0") and self.header("transfer-encoding") is None
        self.num_bytes = 0
        self.body: dict[str, Any] = {}
        self._body = b""
        self.held = ExitStack()
        self.told: Headers = []
        self.sent: Mapping[str, str] = {}
        self.wants_timeline = False
        self.left_out = unread.LeftOut()

    def header(self, name: str) -> str | None:
        """Returns the first header with a name, None without."""
        return next(iter(self.headers(name)), None)

    def headers(self, name: str) -> list[str]:
        """Returns all headers with a name."""
        return [value.decode("latin-1") for key, value in self._headers if key == name.encode()]

    @property
    def credentials(self) -> list[str]:
        """Returns the `authorization` headers of the request; `x-api-key` counts as such."""
        return [*self.headers("authorization"), *(f"Bearer {key}" for key in self.headers("x-api-key"))]

    @property
    def key(self) -> str:
        """Returns the key that the request shows, valid or not; "" without a key."""
        return bearer(self.credentials)

    @property
    def timeout_s(self) -> float | None:
        """Returns the time that the whole answer may take; None without a bound. Raises InvalidRequest."""
        given = ", ".join(self.headers(TIMEOUT))
        if given and not _MILLISECONDS.fullmatch(given):
            raise InvalidRequest(TIMEOUT, "must be a whole number of milliseconds, from 1 to 999999999")
        return int(given) / 1000 if given else None

    @property
    def is_preflight(self) -> bool:
        """Tells whether this is a CORS preflight, which a browser sends without the key."""
        return (
            self.method == "OPTIONS"
            and self.header("access-control-request-method") is not None
            and not self.path.startswith(CLOSED)
        )

    async def read(self, admit_bytes: Callable[[int], None]) -> None:
        """Reads the body. Raises HttpError or InvalidRequest, and the errors of `admit_bytes`.

        admit_bytes: called with the size of each piece before `num_bytes` counts it.
        """
        if not self._has_id:
            raise InvalidRequest("x-request-id", "must be 1 to 64 characters of A-Z a-z 0-9 . _ -")
        if not _JSON.fullmatch(self.header("content-type") or ""):
            raise HttpError(HTTPStatus.UNSUPPORTED_MEDIA_TYPE, "content-type must be application/json")
        if (self.header("content-encoding") or "identity") != "identity":
            raise HttpError(HTTPStatus.UNSUPPORTED_MEDIA_TYPE, "content-encoding must be identity")
        try:
            async with asyncio.timeout(MAX_BODY_S):
                self._body = await self._read(admit_bytes)
        except TimeoutError as error:
            raise HttpError(
                HTTPStatus.REQUEST_TIMEOUT, f"the body has not come within {MAX_BODY_S:g} s, the limit (fixed)"
            ) from error
        self.is_read = True

    def parse(self) -> None:
        """Parses the body that was read. Raises HttpError or InvalidRequest."""
        if self._body.count(b",") > MAX_COMMAS:
            raise HttpError(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"the body may have at most {MAX_COMMAS} commas")
        self.body = fields.parse(self._body)
        self._body = b""

    def take(self, known: Mapping[str, Read], *required: str, sent: Mapping[str, str]) -> dict[str, Any]:
        """Reads the fields of the body. Raises InvalidRequest. sent: the client's names, for later errors."""
        unread.UNDER_WAY.set(self.left_out)
        taken = fields.take(self.body, known, *required)
        self.sent = sent
        return taken

    async def gone(self) -> None:
        """Waits until the client has disconnected. The body must have been read."""
        while (await self._receive())["type"] != "http.disconnect":
            pass

    async def _read(self, admit_bytes: Callable[[int], None]) -> bytes:
        self._require_short(int(self.header("content-length") or 0))
        pieces: list[bytes] = []
        more = True
        while more:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                raise ClientGone("the client went away")
            pieces.append(message["body"])
            admit_bytes(len(message["body"]))
            self.num_bytes += len(message["body"])
            self._require_short(self.num_bytes)
            more = message["more_body"]
        return b"".join(pieces)

    def _require_short(self, num_bytes: int) -> None:
        if num_bytes > MAX_MESSAGE_BYTES:
            raise HttpError(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"the body may have at most {MAX_MESSAGE_BYTES} bytes")


class Reply:
    """The answer to one request. `status` is 499 if its client has gone. write_error: the dialect's function."""

    def __init__(self, request: Request, send: Send, write_error: Callable[[BatonError], bytes] = envelope) -> None:
        self.status = 0
        self._write_error = write_error
        self._request = request
        self._send = send
        self._failed: Callable[[BatonError], bytes] = lambda _: b""
        self._writing = asyncio.Lock()
        self._clock = asyncio.get_running_loop().time
        self._said_s = 0.0

    async def whole(self, pieces: Pieces) -> None:
        """Sends a whole answer. Raises ClientGone if the client is gone or too slow."""
        kind = KINDS.get(self._request.path, b"application/json")
        max_s = GRACE_S + sum(map(len, pieces)) / MIN_SENT_BYTES_PER_S
        try:
            async with asyncio.timeout(max_s):
                await self._put(HTTPStatus.OK, kind, pieces, FENCES if b"html" in kind else ())
        except TimeoutError as error:
            raise ClientGone(f"the client has not taken its answer within {max_s:.0f} s") from error

    async def stream(self, answer: Streamed) -> None:
        """Sends events, and comments during silences. The first event or comment begins the answer."""
        self._failed = answer.failed
        filling = asyncio.create_task(self._fill(answer.opening))
        try:
            async for piece in answer.events:
                await self._say(piece)
        finally:
            try:
                await self._writing.acquire()  # what `filling` writes goes out whole; a send bounds its own time
                self._writing.release()
            finally:
                filling.cancel()
                await asyncio.wait([filling])
        await self._send({"type": "http.response.body", "body": b"", "more_body": False})

    async def fail(self, error: BatonError) -> None:
        """Sends an error; within a stream as the last event. Does nothing if the client has gone."""
        error = fields.in_words(error, self._request.sent)
        if not self._request.wants_timeline:
            error.timeline = None
        if isinstance(error, ClientGone):
            self.status = self.status or error.status.http
        elif self.status:
            await self._say(self._failed(error))
        else:
            more = headers(error)
            if not self._request.is_read:
                more.append((b"connection", b"close"))
            await self._put(error.status.http, b"application/json", [self._write_error(error)], more)

    async def _fill(self, opening: Callable[[], Awaitable[bytes]]) -> None:
        """Begins the stream after BEGIN_AFTER_S without an event, if allowed. Sends a comment in each long silence."""
        await asyncio.sleep(BEGIN_AFTER_S)
        begun = await opening()  # nothing is awaited between this and the bytes: an event can only come behind
        if not self.status:
            await self._say(begun or COMMENT)
        while True:
            await asyncio.sleep(self._said_s + COMMENT_EVERY_S - self._clock())
            if self._said_s + COMMENT_EVERY_S <= self._clock():
                await self._say(COMMENT)

    async def _say(self, piece: bytes) -> None:
        """Sends a piece of a stream; the next piece waits until it is sent."""
        async with self._writing:
            if not self.status:
                await self._begin(
                    HTTPStatus.OK, [(b"content-type", b"text/event-stream"), (b"cache-control", b"no-cache")]
                )
            await self._send({"type": "http.response.body", "body": piece, "more_body": True})
            self._said_s = self._clock()

    async def _put(self, status: int, kind: bytes, pieces: Pieces, more: Sequence[tuple[bytes, bytes]] = ()) -> None:
        num_bytes = sum(map(len, pieces))
        await self._begin(status, [(b"content-type", kind), (b"content-length", b"%d" % num_bytes), *more])
        for body in joined(pieces):
            await self._send({"type": "http.response.body", "body": body, "more_body": True})
            await asyncio.sleep(0)
        await self._send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _begin(self, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        self.status = int(status)
        headers += [
            *((name, self._request.id.encode()) for name in (b"x-request-id", b"request-id")),
            (b"x-content-type-options", b"nosniff"),
            *self._request.left_out.headers(self._request.sent),
            *self._request.told,
        ]
        await self._send({"type": "http.response.start", "status": self.status, "headers": headers})


def leave_to_read(request: Request, origins: Collection[str]) -> Headers:
    """Lists the CORS headers of an answer, by which a browser lets pages of these origins read it."""
    if not origins or request.path.startswith(CLOSED):
        return []
    origin = request.header("origin") or ""
    allowed = [(b"access-control-allow-origin", one.encode()) for one in (origin, ANY_ORIGIN) if one in origins]
    return [(b"vary", b"origin"), *allowed[:1], (b"access-control-expose-headers", b"*")]


def leave_to_send(request: Request, origins: Collection[str], methods: str) -> Headers:
    """Lists the CORS headers of a preflight's answer. Raises HttpError for an origin that is not listed."""
    if not {request.header("origin"), ANY_ORIGIN} & {*origins}:
        raise HttpError(
            HTTPStatus.METHOD_NOT_ALLOWED,
            f"this path wants {methods}; pages of another origin may call it where http.cors_origins lists theirs"
            " (`*` counts where calls need a key)",
            allow=methods,
        )
    return [
        (b"access-control-allow-methods", methods.encode()),
        (b"access-control-allow-headers", b"authorization, *"),
        (b"access-control-max-age", b"%d" % MAX_PREFLIGHT_AGE_S),
    ]


def joined(pieces: Pieces) -> Iterator[bytes]:
    """Joins pieces, up to the first that makes SENT_BYTES."""
    begun, num_bytes = Pieces(), 0
    for piece in pieces:
        begun.append(piece)
        num_bytes += len(piece)
        if num_bytes >= SENT_BYTES:
            yield b"".join(begun)
            begun, num_bytes = Pieces(), 0
    yield b"".join(begun)
