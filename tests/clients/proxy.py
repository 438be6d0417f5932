"""A proxy on loopback between a program and the gateway, which keeps what passes and forces one call of a tool."""

import copy
import json
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.client import HTTPConnection, HTTPResponse
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

TIMEOUT_S = 900
"""The longest answer: a real model's, on a busy machine."""
HOP_BY_HOP = {"connection", "keep-alive", "transfer-encoding", "content-length", "host"}
MESSAGES, RESPONSES, CHAT = "/v1/messages", "/v1/responses", "/v1/chat/completions"
SCHEMA_OF = {MESSAGES: "input_schema", RESPONSES: "parameters", CHAT: "parameters"}
"""Where each dialect has the schema of a tool."""


@dataclass
class Exchange:
    """A request as the program sent it, and what it was answered."""

    method: str
    path: str
    request: bytes
    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    answer: bytes = b""

    @property
    def route(self) -> str:
        """The path without its query."""
        return self.path.partition("?")[0]

    @property
    def body(self) -> dict[str, Any]:
        read: dict[str, Any] = json.loads(self.request)
        return read

    @property
    def events(self) -> dict[str, Any]:
        """What the last event of each name carries, of an answer that is a stream."""
        found = {}
        for block in self.answer.decode().split("\n\n"):
            name, _, data = block.partition("\ndata: ")
            if data:
                found[name.removeprefix("event: ")] = json.loads(data)
        return found

    def __str__(self) -> str:
        return f"{self.method} {self.path} {self.status} {self.answer[:600]!r}"


@dataclass(frozen=True)
class Forced:
    """The one call that the model must make: a tool of the program's, and its arguments."""

    tool: str
    arguments: dict[str, Any]

    def force(self, route: str, body: dict[str, Any]) -> dict[str, Any] | None:
        """Returns a request that leaves the model only this call; None where it does not declare the tool."""
        changed = copy.deepcopy(body)
        declared = [tool["function"] if route == CHAT else tool for tool in changed.get("tools") or []]
        named = [tool for tool in declared if tool.get("name") == self.tool]
        if route not in SCHEMA_OF or not named:
            return None
        properties = {name: {"const": value} for name, value in self.arguments.items()}
        schema = {"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False}
        named[0][SCHEMA_OF[route]] = schema
        chosen: dict[str, dict[str, Any]] = {
            MESSAGES: {"tool_choice": {"type": "tool", "name": self.tool, "disable_parallel_tool_use": True}},
            RESPONSES: {"tool_choice": {"type": "function", "name": self.tool}, "parallel_tool_calls": False},
            CHAT: {"tool_choice": {"type": "function", "function": {"name": self.tool}}, "parallel_tool_calls": False},
        }
        changed.update(chosen[route])
        return changed


@dataclass(frozen=True)
class Likeliest:
    """Leaves the model its choice of a tool, and draws nothing: it is the same at each run. Bounds all answers."""

    max_tokens: int

    def force(self, route: str, body: dict[str, Any]) -> dict[str, Any] | None:
        """Returns a request at temperature 0; None where it declares no tools."""
        bound = "max_output_tokens" if route == RESPONSES else "max_tokens"
        changes = {"temperature": 0, bound: self.max_tokens}
        return {**body, **changes} if route in SCHEMA_OF and body.get("tools") else None


class Proxy(ThreadingHTTPServer):
    """Keeps exchanges in the order in which they began.

    forced: changes the first request that declares its tool, or all with tools. comment: goes in front of a stream and
    behind its events.
    """

    daemon_threads = True

    def __init__(self, gateway: str, forced: Forced | Likeliest | None, comment: bytes) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.comment = comment
        self.exchanges: list[Exchange] = []
        self._gateway = gateway
        self._forced = forced
        self._lock = threading.Lock()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    @property
    def was_forced(self) -> bool:
        """Whether the call has been asked for, if there is one."""
        return self._forced is None

    def begin(self, exchange: Exchange) -> bytes:
        """Keeps a request; returns what to send in its place."""
        with self._lock:
            self.exchanges.append(exchange)
            if self._forced is None or not exchange.request:
                return exchange.request
            changed = self._forced.force(exchange.route, exchange.body)
            if changed is None:
                return exchange.request
            self._forced = self._forced if isinstance(self._forced, Likeliest) else None
            return json.dumps(changed).encode()

    def connect(self) -> HTTPConnection:
        return HTTPConnection(self._gateway, timeout=TIMEOUT_S)


class Handler(BaseHTTPRequestHandler):
    """A request of the program, sent on; its answer goes back as it comes."""

    protocol_version = "HTTP/1.1"
    server: Proxy

    def pass_on(self) -> None:
        length = int(self.headers.get("content-length") or 0)
        exchange = Exchange(self.command, self.path, self.rfile.read(length))
        body = self.server.begin(exchange)
        upstream = self.server.connect()
        try:
            upstream.request(self.command, self.path, body or None, dict(end_to_end(self.headers.items())))
            self.answer(exchange, upstream.getresponse())
        finally:
            upstream.close()

    def answer(self, exchange: Exchange, answered: HTTPResponse) -> None:
        self.send_response(answered.status)
        for name, value in end_to_end(answered.getheaders()):
            self.send_header(name, value)
        self.send_header("Connection", "close")
        self.end_headers()
        exchange.status, exchange.headers = answered.status, dict(answered.getheaders())
        comment = self.server.comment if answered.getheader("content-type") == "text/event-stream" else b""
        self.wfile.write(comment)
        while piece := answered.read1(65536):
            exchange.answer += piece
            self.wfile.write(piece.replace(b"\n\n", b"\n\n" + comment))

    do_GET = do_POST = do_HEAD = do_OPTIONS = pass_on  # noqa: N815

    def log_message(self, *_: Any) -> None:
        """Says nothing: exchanges are kept."""


@contextmanager
def proxy_before(gateway: str, forced: Forced | Likeliest | None = None, comment: bytes = b"") -> Iterator[Proxy]:
    """A proxy that listens until the end of the block."""
    with Proxy(gateway, forced, comment) as proxy:
        thread = threading.Thread(target=proxy.serve_forever)
        thread.start()
        try:
            yield proxy
        finally:
            proxy.shutdown()
            thread.join()


def end_to_end(headers: Iterable[tuple[str, str]]) -> list[tuple[str, str]]:
    """Returns headers that are not of one connection."""
    return [(name, value) for name, value in headers if name.lower() not in HOP_BY_HOP]
