"""Servers of HTTP beside one another: streams of events held, the gaps between events, processor time a token.

    pip install uvicorn starlette granian uvloop
    python benchmarks/http_servers.py --streams 500 --interval 0.5 --tokens 20

Each server runs an application that does nothing but wait and send.
"""

import argparse
import asyncio
import json
import os
import random
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import psutil

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.result_file import write_result
from benchmarks.server_process import server_process
from benchmarks.stream_gaps import gaps_while_all_open

_MODULE = "benchmarks.http_servers"
_UVICORN = "uvicorn --log-level critical --no-access-log --http httptools --port {port}"
SERVERS = {
    "uvicorn, bare": f"{_UVICORN} --loop asyncio {_MODULE}:bare",
    "uvicorn with uvloop, bare": f"{_UVICORN} --loop uvloop {_MODULE}:bare",
    "uvicorn, Starlette": f"{_UVICORN} --loop asyncio --factory {_MODULE}:starlette",
    "granian, bare": f"granian --interface asgi --no-ws --no-log --loop asyncio --port {{port}} {_MODULE}:bare",
}
EVENT = b'data: {"id":"cmpl-0123456789","object":"text_completion","created":1700000000,"model":"demo","choices":' + (
    b'[{"index":0,"text":" word","logprobs":null,"finish_reason":null}]}\n\n'
)
START_TIMEOUT_S = 30.0
Send = Callable[[dict[str, Any]], Awaitable[None]]


async def bare(scope: Mapping[str, Any], _receive: object, send: Send) -> None:
    """Answers a request with as many events as its query says, `tokens&interval`, from a random moment on."""
    if scope["type"] != "http":
        return
    await send(
        {"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/event-stream")]},
    )
    async for event in _events(scope["query_string"].decode()):
        await send({"type": "http.response.body", "body": event, "more_body": True})
    await send({"type": "http.response.body", "body": b"data: [DONE]\n\n", "more_body": False})


def starlette() -> Any:
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import StreamingResponse
    from starlette.routing import Route

    async def answer(request: Request) -> StreamingResponse:
        return StreamingResponse(_events(str(request.url.query)), media_type="text/event-stream")

    return Starlette(routes=[Route("/v1/completions", answer)])


async def _events(query: str) -> AsyncIterator[bytes]:
    tokens, _, interval = query.partition("&")
    interval_s = float(interval)
    await asyncio.sleep(random.random() * interval_s)
    for _ in range(int(tokens)):
        yield EVENT
        await asyncio.sleep(interval_s)


class Stream(asyncio.Protocol):
    """A client's connection, which notes when data came. `ended` is set once the last event has come."""

    def __init__(self, request: bytes) -> None:
        self.arrivals: list[float] = []
        self.ended = asyncio.get_running_loop().create_future()
        self._request = request

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        self.arrivals.append(time.perf_counter())
        if b"[DONE]" in data:
            self._transport.close()

    def close(self) -> None:
        self._transport.abort()

    def connection_lost(self, _reason: Exception | None) -> None:
        if not self.ended.done():
            self.ended.set_result(None)


def main() -> None:
    options = _parse(sys.argv[1:])
    rows: list[list[object]] = [["server", "streams held", "gap p50 ms", "gap p99 ms", "us a token", "KiB a stream"]]
    details: dict[str, Any] = {}
    for name, command in SERVERS.items():
        if options.only not in (None, name):
            continue
        with _served(command) as (port, process):
            request = f"GET /v1/completions?{options.tokens}&{options.interval} HTTP/1.1\r\nHost: x\r\n\r\n".encode()
            details[name] = asyncio.run(_round(port, process, request, options))
    if options.gateway:
        details |= _measure_gateway(options)
    rows += [[name, *figures.values()] for name, figures in details.items()]
    write_result(options.out, {}, details, rows)


def _measure_gateway(options: argparse.Namespace) -> dict[str, Any]:
    """Measures a gateway, and the router behind it by its processor time, before workers that give tokens at beats."""
    request = completion_request(options.tokens)
    with ExitStack() as servers:
        workers = servers.enter_context(server_process("workers", str(options.interval)))
        router = servers.enter_context(server_process("router", *workers.addresses))
        gateway = servers.enter_context(server_process("gateway", *router.addresses))
        port = int(gateway.addresses[0].rpartition(":")[2])
        return {"gateway": asyncio.run(_round(port, psutil.Process(gateway.pid), request, options))}


def completion_request(num_tokens: int) -> bytes:
    """Writes a request for a stream of so many tokens."""
    fields = {"prompt": "hello", "max_tokens": num_tokens, "stream": True, "ignore_eos": True, "temperature": 0}
    sent = json.dumps(fields).encode()
    head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(sent)}\r\n\r\n".encode() + sent


@contextmanager
def _served(command: str) -> Iterator[tuple[int, psutil.Process]]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    program, *arguments = command.format(port=port).split()
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    process = subprocess.Popen([sys.executable, "-m", program, *arguments], cwd=ROOT, env=environment)
    try:
        deadline_s = time.monotonic() + START_TIMEOUT_S
        while not _answers(port):
            if process.poll() is not None or time.monotonic() > deadline_s:
                raise RuntimeError(f"{program} did not start")
            time.sleep(0.05)
        yield port, psutil.Process(process.pid)
    finally:
        process.terminate()
        process.wait(START_TIMEOUT_S)


def _answers(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


async def _round(
    port: int, process: psutil.Process, request: bytes, options: argparse.Namespace
) -> dict[str, float | int]:
    """Opens all streams, some at a time, and reads them to their end."""
    before_s, before_bytes = _cost(process)
    loop = asyncio.get_running_loop()
    streams: list[Stream] = []
    for _ in range(options.streams):
        _, stream = await loop.create_connection(lambda: Stream(request), "127.0.0.1", port)
        streams.append(stream)
        await asyncio.sleep(options.interval / options.streams)
    _, held_bytes = _cost(process)
    await asyncio.wait_for(asyncio.gather(*(stream.ended for stream in streams)), 240)
    after_s, _ = _cost(process)
    whole = [stream.arrivals for stream in streams if len(stream.arrivals) >= options.tokens]
    gaps_s = gaps_while_all_open(whole)
    return {
        "held": len(whole),
        "gap_p50_ms": float(np.percentile(gaps_s, 50)) * 1000,
        "gap_p99_ms": float(np.percentile(gaps_s, 99)) * 1000,
        "cpu_us_per_token": (after_s - before_s) / (options.streams * options.tokens) * 1e6,
        "kib_per_stream": (held_bytes - before_bytes) / options.streams / 1024,
    }


def _cost(process: psutil.Process) -> tuple[float, int]:
    """Returns the processor time and the memory of a server, its children included."""
    family = [process, *process.children(recursive=True)]
    times = [one.cpu_times() for one in family]
    return sum(one.user + one.system for one in times), sum(one.memory_info().rss for one in family)


def _parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=500, help="open at a time")
    parser.add_argument("--interval", type=float, default=0.5, help="seconds between the events of a stream")
    parser.add_argument("--tokens", type=int, default=20, help="events of each stream")
    parser.add_argument(
        "--gateway", action="store_true", help="measure a gateway, before a router and paced workers, too"
    )
    parser.add_argument("--only", help="one of the servers, by its name")
    parser.add_argument("--out", default="http_servers", help="name of the result in benchmarks/results")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
