"""The cost of a Redis that hangs under load, against a service without Redis; and the time until it is used again.

    python benchmarks/redis_fault.py --rate 4 --duration 100

Two services stand side by side, with arenas too small for the prompts that come again and again, so that one of them
finds these in Redis. Then its Redis is stopped (SIGSTOP), and both get the same load at the same time, so that whatever
else the machine does hits both alike.
"""

import argparse
import asyncio
import itertools
import os
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.baton_service import BatonService
from benchmarks.result_file import write_result
from cli.bench.latency import Record
from cli.bench.open_loop import LoadClient
from cli.bench.schedule import Arrival, poisson
from tests.harness.checkpoints import make_checkpoint

_POLL_S = 0.1
_MAX_WAIT_S = 15.0
_WARM_UP_S = 15.0
_SMALL = ["--arena-bytes", "4MiB", "--pool-bytes", "4MiB"]


def main() -> None:
    options = _parse(sys.argv[1:])
    with tempfile.TemporaryDirectory() as folder:
        model = str(make_checkpoint("llama-gqa", Path(folder) / "random", max_position_embeddings=2048))
        with (
            BatonService("stopped", model, 1, 1, _SMALL) as stopped,
            BatonService("without", model, 1, 1, [*_SMALL, "--redis-url", "off"]) as without,
        ):
            write_result(options.out, asyncio.run(_measure(stopped, without, options)), {})


async def _measure(stopped: BatonService, without: BatonService, options: argparse.Namespace) -> dict[str, object]:
    records: dict[str, list[Record]] = {"stopped": [], "without": []}
    returns_s: list[float] = []
    async with (
        LoadClient(stopped.address, options.timeout) as one,
        LoadClient(without.address, options.timeout) as other,
    ):
        for seed in range(options.rounds):
            load = _again_and_again(options, seed, options.duration)
            short = _again_and_again(options, seed, _WARM_UP_S)
            await asyncio.gather(one.run(short), other.run(short))  # both know the prompts, and Redis has them
            os.kill(stopped.redis_pid, signal.SIGSTOP)
            try:
                of_one, of_other = await asyncio.gather(one.run(load), other.run(load))
            finally:
                os.kill(stopped.redis_pid, signal.SIGCONT)
            records["stopped"] += of_one
            records["without"] += of_other
            returns_s.append(await _until_hit(stopped, one, short))
    status = await asyncio.to_thread(stopped.status)
    return _figures(records) | {"hits_again_after_s": max(returns_s), "redis": status["tiers"]["redis"]}


def _again_and_again(options: argparse.Namespace, seed: int, duration_s: float) -> list[Arrival]:
    """A Poisson schedule with few prompts, in turns."""
    prompts = [one.prompt for one in poisson(100.0, 10.0, options.input_len, 1, options.seed)][: options.prompts]
    arrivals = poisson(options.rate, duration_s, 1, options.output_len, seed)
    return [replace(one, prompt=prompt) for one, prompt in zip(arrivals, itertools.cycle(prompts), strict=False)]


async def _until_hit(service: BatonService, client: LoadClient, load: Sequence[Arrival]) -> float:
    """Seconds until Redis has a hit again, while the load goes on."""
    start = time.perf_counter()
    before = (await asyncio.to_thread(service.status))["tiers"]["redis"]["hits"]
    running = asyncio.create_task(client.run(load))
    try:
        while time.perf_counter() - start < _MAX_WAIT_S:
            status = await asyncio.to_thread(service.status)
            if status["tiers"]["redis"]["hits"] > before:
                break
            await asyncio.sleep(_POLL_S)
        return time.perf_counter() - start
    finally:
        await running


def _figures(records: dict[str, list[Record]]) -> dict[str, object]:
    ttft_ms = {name: [one.ttft_s * 1000 for one in of if one.chunks] for name, of in records.items()}
    p99 = {name: float(np.percentile(values, 99)) for name, values in ttft_ms.items()}
    return {
        "ttft_p99_ratio": p99["stopped"] / p99["without"],
        "waited_for_redis": sum(value > 1.1 * p99["without"] for value in ttft_ms["stopped"]),
        **{f"ttft_p50_ms_{name}": float(np.median(values)) for name, values in ttft_ms.items()},
        **{f"ttft_p99_ms_{name}": value for name, value in p99.items()},
        **{f"requests_{name}": len(of) for name, of in records.items()},
        "errors": dict(Counter(one.error for of in records.values() for one in of if one.error is not None)),
    }


def _parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rate", type=float, default=4.0, help="requests a second to each")
    parser.add_argument("--duration", type=float, default=100.0, help="seconds of each round")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--prompts", type=int, default=40, help="different ones")
    parser.add_argument("--input-len", type=int, default=512)
    parser.add_argument("--output-len", type=int, default=8)
    parser.add_argument("--timeout", type=float, default=60.0, help="seconds that a request may take")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", default="redis_fault", help="name of the result in benchmarks/results")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
