"""Streams through a gateway: events held, the gaps between them, its processor time a token and memory a stream.

    python benchmarks/gateway_streams.py --streams 300 --interval 0.5 --tokens 20

Behind it are a router, and workers that give every choice a token at each beat of one clock.
"""

import argparse
import asyncio
import json
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
import psutil

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.result_file import write_result

_SERVERS = Path(__file__).with_name("stream_server.py")
_END_TIMEOUT_S = 60.0


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


@dataclass(frozen=True)
class ServerProcess:
    """A running server of stream_server.py."""

    pid: int
    addresses: tuple[str, ...]


def main() -> None:
    options = _parse(sys.argv[1:])
    request = completion_request(options.tokens)
    with ExitStack() as servers:
        workers = servers.enter_context(server_process("workers", str(options.interval)))
        router = servers.enter_context(server_process("router", *workers.addresses))
        gateway = servers.enter_context(server_process("gateway", *router.addresses))
        port = int(gateway.addresses[0].rpartition(":")[2])
        figures = asyncio.run(_round(port, psutil.Process(gateway.pid), request, options))
    rows: list[list[object]] = [["server", "streams held", "gap p50 ms", "gap p99 ms", "us a token", "KiB a stream"]]
    write_result(options.out, {}, {"gateway": figures}, [*rows, ["gateway", *figures.values()]])


def completion_request(num_tokens: int) -> bytes:
    """Writes a request for a stream of so many tokens."""
    fields = {"prompt": "hello", "max_tokens": num_tokens, "stream": True, "ignore_eos": True, "temperature": 0}
    sent = json.dumps(fields).encode()
    head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(sent)}\r\n\r\n".encode() + sent


@contextmanager
def server_process(*arguments: str) -> Iterator[ServerProcess]:
    """Runs stream_server.py with these arguments. Raises RuntimeError if the server does not start."""
    command = [sys.executable, str(_SERVERS), *arguments]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            addresses = tuple(process.stdout.readline().split())
            if not addresses:
                raise RuntimeError(f"{_SERVERS.name} {' '.join(arguments)} did not start")
            yield ServerProcess(process.pid, addresses)
        finally:
            process.stdin.close()
            _wait_or_kill(process)


def _wait_or_kill(process: subprocess.Popen[str]) -> None:
    try:
        process.wait(_END_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()


def gaps_while_all_open(arrivals: Sequence[Sequence[float]]) -> list[float]:
    """Lists the gaps of all streams, from when each had two messages until one of them had its last.

    arrivals: the times of each stream's messages. So the time in which many streams open does not count.
    """
    opened = max(stream[1] for stream in arrivals)
    ended = min(stream[-1] for stream in arrivals)
    return [
        after - before
        for stream in arrivals
        for before, after in pairwise(stream)
        if opened <= before and after <= ended
    ]


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
    parser.add_argument("--streams", type=int, default=300, help="open at a time")
    parser.add_argument("--interval", type=float, default=0.5, help="seconds between the events of a stream")
    parser.add_argument("--tokens", type=int, default=20, help="events of each stream")
    parser.add_argument("--out", default="gateway_streams", help="name of the result in benchmarks/results")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
