"""Rough clients of the HTTP door, one kind after another: what streams of others and the gateway's memory make of it.

    python benchmarks/http_hostile.py --streams 100 --interval 0.1

Good streams are open before workers that give tokens at beats. Before each kind comes a quiet time, whose gaps stand
beside the gaps under it; rough clients are a process of their own.
"""

import argparse
import asyncio
import json
import socket
import struct
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import psutil

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.http_servers import Stream, completion_request
from benchmarks.result_file import write_result
from benchmarks.server_process import server_process

_NUM_AT_ONCE = 8
_NUM_SLOW = 500
_NUM_IDLE = 10_000
_NUM_PIPELINED = 2000
_SETTLE_S = 1.0
_SAMPLE_S = 0.1
_PIECE = b"10000\r\n" + b" " * 65536 + b"\r\n"
_GET = b"GET /version HTTP/1.1\r\nHost: localhost\r\n\r\n"
_POST = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"


class Attacker:
    """Rough clients of a port, until a time; counts how each was answered."""

    def __init__(self, port: int, seconds: float) -> None:
        self.answers: Counter[str] = Counter()
        self._port = port
        self._until_s = time.monotonic() + seconds

    @property
    def goes_on(self) -> bool:
        return time.monotonic() < self._until_s

    async def repeat(self, sent: bytes, more: bytes = b"") -> None:
        """Sends bytes on new connections, a few at a time, and reads the answer; `more` again and again until then."""
        await asyncio.gather(*(self._repeat(sent, more) for _ in range(_NUM_AT_ONCE)))

    async def trickle(self, sent: bytes) -> None:
        """Opens many connections, and sends a byte a second on each."""
        await asyncio.gather(*(self._trickle(sent) for _ in range(_NUM_SLOW)))

    async def hold(self, number: int, sent: bytes = b"") -> None:
        """Opens connections, and reads nothing."""
        opened = [await self._open() for _ in range(number)]
        for _, writer in opened:
            writer.write(sent)
        await asyncio.sleep(self._until_s - time.monotonic())
        for reader, writer in opened:
            with suppress(TimeoutError, OSError):
                async with asyncio.timeout(0.001):
                    self.answers[_status(await reader.read(1 << 16))] += 1
            writer.transport.abort()

    async def ask(self, body: Mapping[str, object]) -> None:
        """Sends a request, and reads its whole answer, again and again."""
        while self.goes_on:
            reader, writer = await self._open()
            content = json.dumps(body).encode()
            writer.write(_POST + b"Connection: close\r\nContent-Length: %d\r\n\r\n" % len(content) + content)
            num_bytes, status = 0, ""
            while piece := await reader.read(1 << 20):
                status = status or _status(piece)
                num_bytes += len(piece)
            self.answers[f"{status} of {num_bytes / 1e6:.0f} MB"] += 1
            writer.close()

    async def vanish(self, sent: bytes) -> None:
        """Sends requests, and resets each connection."""
        while self.goes_on:
            _, writer = await self._open()
            writer.write(sent)
            await asyncio.sleep(0.01)
            peer = writer.get_extra_info("socket")
            peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            writer.transport.abort()
            self.answers["left"] += 1

    async def _open(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_connection("127.0.0.1", self._port)

    async def _repeat(self, sent: bytes, more: bytes) -> None:
        while self.goes_on:
            reader, writer = await self._open()
            answer = asyncio.create_task(reader.read(1 << 16))
            with suppress(OSError):
                writer.write(sent)
                while more and self.goes_on and not answer.done():
                    writer.write(more)
                    await writer.drain()
            with suppress(OSError):
                self.answers[_status(await answer)] += 1
            writer.transport.abort()

    async def _trickle(self, sent: bytes) -> None:
        reader, writer = await self._open()
        writer.write(sent)
        answer = asyncio.create_task(reader.read(1 << 16))
        while self.goes_on and not answer.done():
            await asyncio.sleep(1.0)
            writer.write(b"a")
        self.answers[_status(answer.result()) if answer.done() else "waits"] += 1
        answer.cancel()
        writer.transport.abort()


def _status(answer: bytes) -> str:
    return answer.split()[1].decode() if answer else "closed"


def _body(content: bytes, headers: bytes = b"") -> bytes:
    return _POST + headers + b"Content-Length: %d\r\n\r\n" % len(content) + content


_PROMPTS = [list(range(32, 127)) * 20] * 16
KINDS: dict[str, Callable[[Attacker], Awaitable[None]]] = {
    "heads that do not come": lambda attacker: attacker.trickle(b"GET / HTTP/1.1\r\nA: "),
    "bodies that do not come": lambda attacker: attacker.trickle(_POST + b"Content-Length: 4000000\r\n\r\n{"),
    "bodies that never end": lambda attacker: attacker.repeat(_POST + b"Transfer-Encoding: chunked\r\n\r\n", _PIECE),
    "readers that do not read": lambda attacker: attacker.hold(_NUM_SLOW, _GET * _NUM_PIPELINED),
    "idle connections": lambda attacker: attacker.hold(_NUM_IDLE),
    "clients that vanish": lambda attacker: attacker.vanish(_body(b'{"prompt": "a", "stream": true}')),
    "heads of 17 KiB": lambda attacker: attacker.repeat(b"GET / HTTP/1.1\r\nA: " + b"a" * (17 << 10) + b"\r\n\r\n"),
    "two lengths": lambda attacker: attacker.repeat(_POST + b"Content-Length: 1\r\nContent-Length: 2\r\n\r\nab"),
    "a length and chunks": lambda attacker: attacker.repeat(_body(b"0\r\n\r\n", b"Transfer-Encoding: chunked\r\n")),
    "another host": lambda attacker: attacker.repeat(_GET.replace(b"localhost", b"evil.example")),
    "compressed bodies": lambda attacker: attacker.repeat(_body(bytes(1 << 20), b"Content-Encoding: gzip\r\n")),
    "keys twice": lambda attacker: attacker.repeat(_body(b'{"prompt": "a", "prompt": "b"}')),
    "4 MB of brackets": lambda attacker: attacker.repeat(_body(b"[" * 4_000_000)),
    "4 MB of numbers": lambda attacker: attacker.repeat(_body(b'{"prompt": [%s1]}' % (b"1," * 2_000_000))),
    "16 echoes of 16 choices": lambda attacker: attacker.ask(
        {"prompt": _PROMPTS, "n": 16, "max_tokens": 1, "echo": True, "logprobs": 5}
    ),
    "4 prompts of 16 choices": lambda attacker: attacker.ask(
        {"prompt": _PROMPTS[:4], "n": 16, "max_tokens": 400, "logprobs": 20}
    ),
    "4 MB of keys": lambda attacker: attacker.repeat(
        _body(json.dumps({f"k{number}": 0 for number in range(300_000)}).encode())
    ),
}


def main() -> None:
    options = _parse(sys.argv[1:])
    if options.attack is not None:
        asyncio.run(_attack(*options.attack))
        return
    with ExitStack() as servers:
        workers = servers.enter_context(server_process("workers", str(options.interval)))
        router = servers.enter_context(server_process("router", *workers.addresses))
        gateway = servers.enter_context(server_process("gateway", *router.addresses))
        port = int(gateway.addresses[0].rpartition(":")[2])
        rows = asyncio.run(_measure(port, psutil.Process(gateway.pid), options))
    worst = max(rows, key=lambda row: float(row["gap p99 over quiet"]))
    figures = {
        "worst gap p99 over quiet": f"{worst['gap p99 over quiet']:.2f}, {worst['kind']}",
        "most memory gained, MB": max(row["gained MB"] for row in rows),
        "good streams lost": sum(row["lost"] for row in rows),
    }
    table = [list(rows[0]), *(list(row.values()) for row in rows)]
    write_result(options.out, figures, {"kinds": rows}, table)


async def _attack(kind: str, port: str, seconds: str) -> None:
    attacker = Attacker(int(port), float(seconds))
    with suppress(OSError):
        await KINDS[kind](attacker)
    print(json.dumps(attacker.answers))


async def _measure(port: int, gateway: psutil.Process, options: argparse.Namespace) -> list[dict[str, Any]]:
    rows = []
    for name in options.kinds.split(",") if options.kinds else KINDS:
        rows.append(await _measure_kind(name, port, gateway, options))
        print(*rows[-1].values(), sep=" | ", file=sys.stderr)
    return rows


async def _measure_kind(name: str, port: int, gateway: psutil.Process, options: argparse.Namespace) -> dict[str, Any]:
    streams = await _open_streams(port, options.streams)
    await asyncio.sleep(_SETTLE_S)
    quiet_ms = _p99(_gaps_ms(streams, await _wait(options.seconds)))
    before = gateway.memory_info().rss
    command = [sys.executable, __file__, "--attack", name, str(port), str(options.seconds)]
    process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    ending = asyncio.create_task(process.communicate())
    peak, began_s = before, time.perf_counter()
    while not ending.done():
        await asyncio.wait([ending], timeout=_SAMPLE_S)
        peak = max(peak, gateway.memory_info().rss)
    gaps_ms = _gaps_ms(streams, (began_s, time.perf_counter()))
    num_lost = sum(stream.ended.done() for stream in streams)
    for stream in streams:
        stream.close()
    return {
        "kind": name,
        "answers": ", ".join(f"{got} ({number})" for got, number in json.loads(ending.result()[0]).items()),
        "quiet gap p99 ms": quiet_ms,
        "gap p99 ms": _p99(gaps_ms),
        "longest gap ms": max(gaps_ms, default=float("inf")),
        "gap p99 over quiet": _p99(gaps_ms) / quiet_ms,
        "gained MB": (peak - before) / 1e6,
        "lost": num_lost,
    }


async def _open_streams(port: int, number: int) -> list[Stream]:
    request, loop = completion_request(90_000), asyncio.get_running_loop()
    connect = partial(loop.create_connection, lambda: Stream(request), "127.0.0.1", port)
    return [(await connect())[1] for _ in range(number)]


async def _wait(seconds: float) -> tuple[float, float]:
    began_s = time.perf_counter()
    await asyncio.sleep(seconds)
    return began_s, time.perf_counter()


def _gaps_ms(streams: Sequence[Stream], between: tuple[float, float]) -> list[float]:
    """Returns the gaps of all streams between two moments."""
    return [
        (after - before) * 1000
        for stream in streams
        for before, after in pairwise(stream.arrivals)
        if between[0] <= before and after <= between[1]
    ]


def _p99(gaps_ms: Sequence[float]) -> float:
    """Returns infinity where no stream gained a token."""
    return float(np.percentile(gaps_ms, 99)) if gaps_ms else float("inf")


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=100, help="good ones")
    parser.add_argument("--interval", type=float, default=0.1, help="seconds between the tokens of a stream")
    parser.add_argument("--seconds", type=float, default=5.0, help="of each kind, and of the quiet before it")
    parser.add_argument("--kinds", help="some of them, joined by commas")
    parser.add_argument("--attack", nargs=3, metavar=("KIND", "PORT", "SECONDS"), help="be the rough clients")
    parser.add_argument("--out", default="http_hostile", help="name of the result in benchmarks/results")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
