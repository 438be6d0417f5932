"""The gateway's share of the time to the first token: the same request over gRPC and over HTTP, by turns, alone.

    python benchmarks/http_first_token.py --rounds 300

Before a router whose workers compute nothing. Both clients keep their connection.
"""

import argparse
import asyncio
import sys
import time
from contextlib import ExitStack
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from baton import AsyncClient
from benchmarks.http_servers import completion_request
from benchmarks.result_file import write_result
from benchmarks.server_process import server_process

_INTERVAL_S = 0.001
_NUM_TOKENS = 2


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=300)
    parser.add_argument("--out", default="http_first_token", help="name of the result in benchmarks/results")
    options = parser.parse_args()
    with ExitStack() as servers:
        workers = servers.enter_context(server_process("workers", str(_INTERVAL_S)))
        router = servers.enter_context(server_process("router", *workers.addresses))
        gateway = servers.enter_context(server_process("gateway", *router.addresses))
        ms = asyncio.run(_measure(router.addresses[0], gateway.addresses[0], options.rounds))
    added = ms["HTTP"] - ms["gRPC"]
    rows = [["door", "p50 ms", "p90 ms", "p99 ms"]]
    rows += [[name, *np.percentile(times, (50, 90, 99))] for name, times in ms.items()]
    figures = {"added p50 ms": float(np.median(added)), "rounds": options.rounds}
    write_result(options.out, figures, {name: times.tolist() for name, times in ms.items()}, rows)


async def _measure(router: str, gateway: str, num_rounds: int) -> dict[str, np.ndarray]:
    """Returns the milliseconds to the first token of each round after the first tenth, by door."""
    reader, writer = await asyncio.open_connection(*gateway.split(":"))
    rounds = []
    async with AsyncClient(router, api_key="") as client:
        for number in range(num_rounds + num_rounds // 10):
            doors = (_ask_grpc(client), _ask_http(reader, writer))
            first, second = (0, 1) if number % 2 else (1, 0)
            took_s = [0.0, 0.0]
            for door in (first, second):
                took_s[door] = await doors[door]
            rounds.append(took_s)
    writer.close()
    grpc_s, http_s = np.array(rounds[num_rounds // 10 :]).T
    return {"gRPC": grpc_s * 1000, "HTTP": http_s * 1000}


async def _ask_grpc(client: AsyncClient) -> float:
    began_s = time.perf_counter()
    async with client.stream("hello", max_tokens=_NUM_TOKENS, ignore_eos=True, temperature=0) as stream:
        chunks = aiter(stream)
        await anext(chunks)
        took_s = time.perf_counter() - began_s
        async for _ in chunks:
            pass
    return took_s


async def _ask_http(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> float:
    began_s = time.perf_counter()
    writer.write(completion_request(_NUM_TOKENS))
    await reader.readuntil(b"data: ")
    took_s = time.perf_counter() - began_s
    await reader.readuntil(b"\r\n0\r\n\r\n")
    return took_s


if __name__ == "__main__":
    main()
