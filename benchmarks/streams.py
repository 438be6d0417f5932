"""The router's share of the gaps between messages of many open streams, against a bare grpc.aio server.

    python benchmarks/streams.py --streams 500 --interval 0.2 --tokens 50 --rounds 3

Workers are fakes that give every stream a token at each beat. Rounds alternate between the router and a bare server
that sends the same messages at the same beats; all are processes of their own.
"""

import argparse
import asyncio
import sys
import time
from contextlib import ExitStack
from pathlib import Path

import grpc.aio
import numpy as np
import psutil

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.result_file import write_result
from benchmarks.server_process import server_process
from benchmarks.stream_gaps import gaps_while_all_open
from wire.pb import inference_pb2 as pb
from wire.pb import inference_pb2_grpc as pb_grpc

_TIMEOUT_S = 300.0


def main() -> None:
    options = _parse(sys.argv[1:])
    gaps_s: dict[str, list[float]] = {"router": [], "bare": []}
    cpu_s = dict.fromkeys(gaps_s, 0.0)
    with ExitStack() as servers:
        interval = str(options.interval)
        workers = servers.enter_context(server_process("workers", interval))
        targets = {
            "router": servers.enter_context(server_process("router", *workers.addresses)),
            "bare": servers.enter_context(server_process("bare", interval)),
        }
        for _ in range(options.rounds):
            for name, server in targets.items():
                before_s = _cpu_s(server.pid)
                gaps_s[name] += asyncio.run(_round(server.addresses[0], options.streams, options.tokens))
                cpu_s[name] += _cpu_s(server.pid) - before_s
    write_result(options.out, _figures(gaps_s, cpu_s, options), {})


def _figures(gaps_s: dict[str, list[float]], cpu_s: dict[str, float], options: argparse.Namespace) -> dict[str, float]:
    p99 = {name: float(np.percentile(gaps, 99)) for name, gaps in gaps_s.items()}
    tokens = options.rounds * options.streams * options.tokens
    return {
        "gap_p99_ratio": p99["router"] / p99["bare"],
        **{f"gap_p50_ms_{name}": float(np.median(gaps)) * 1000 for name, gaps in gaps_s.items()},
        **{f"gap_p99_ms_{name}": value * 1000 for name, value in p99.items()},
        **{f"messages_{name}": len(gaps) for name, gaps in gaps_s.items()},
        **{f"cpu_us_per_token_{name}": value / tokens * 1e6 for name, value in cpu_s.items()},
    }


async def _round(address: str, num_streams: int, num_tokens: int) -> list[float]:
    async with grpc.aio.insecure_channel(address) as channel:
        stub = pb_grpc.InferenceStub(channel)
        streams = await asyncio.gather(*(_stream(stub, num_tokens) for _ in range(num_streams)))
    return gaps_while_all_open(streams)


async def _stream(stub: pb_grpc.InferenceStub, num_tokens: int) -> list[float]:
    """When messages came."""
    sampling = pb.SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
    request = pb.GenerateRequest(text="hello", sampling_params=sampling)
    return [
        time.perf_counter()
        async for response in stub.Generate(request, timeout=_TIMEOUT_S)
        if response.WhichOneof("event") == "chunk"
    ]


def _cpu_s(pid: int) -> float:
    times = psutil.Process(pid).cpu_times()
    return times.user + times.system


def _parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=500, help="open at a time")
    parser.add_argument("--interval", type=float, default=0.2, help="seconds between the tokens of a stream")
    parser.add_argument("--tokens", type=int, default=50, help="of each stream")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", default="streams", help="name of the result in benchmarks/results")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
