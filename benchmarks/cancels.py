"""Many requests through a router in this process, some cancelled at any moment: what is left behind, and how it grows.

    python benchmarks/cancels.py --requests 20000 --cancelled 0.1

Workers are fakes that forget what they were asked. A first part of the requests, not counted, fills the router's
bounded memories (prefixes that were sent somewhere); memory is compared from then on.
"""

import argparse
import asyncio
import gc
import random
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import psutil

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.result_file import write_result
from tests.harness.fake_cluster import FakeCluster, running
from wire.errors import BatonError, Cancelled
from wire.pb import inference_pb2 as pb

_MAX_GROWTH_MB = 5.0
_PROMPT_LEN = 48
_MAX_TOKENS = 8


def main() -> None:
    options = _parse(sys.argv[1:])
    figures = asyncio.run(_measure(options))
    write_result(options.out, figures, {})
    sys.exit(1 if figures["problems"] or figures["memory_growth_mb"] > _MAX_GROWTH_MB else 0)


async def _measure(options: argparse.Namespace) -> dict[str, Any]:
    draw = random.Random(options.seed)
    async with running(num_prefill=2, num_decode=2) as cluster:
        load = _Load(cluster, draw, options.cancelled, options.at_a_time)
        await load.run(options.warm_up)
        before_mb = await _memory_at_rest_mb(cluster)
        load.endings.clear()
        await load.run(options.requests)
        after_mb = await _memory_at_rest_mb(cluster)
        problems = await cluster.problems()
    return {
        "requests": load.endings.total(),
        **dict(load.endings),
        "problems": problems,
        "memory_before_mb": before_mb,
        "memory_after_mb": after_mb,
        "memory_growth_mb": after_mb - before_mb,
    }


class _Load:
    """So many requests at a time; `endings` counts how they ended."""

    def __init__(self, cluster: FakeCluster, draw: random.Random, cancelled: float, at_a_time: int) -> None:
        self.endings: Counter[str] = Counter()
        self._cluster = cluster
        self._draw = draw
        self._cancelled = cancelled
        self._at_a_time = at_a_time

    async def run(self, number: int) -> None:
        await asyncio.gather(*(self._lane(number // self._at_a_time) for _ in range(self._at_a_time)))

    async def _lane(self, number: int) -> None:
        for _ in range(number):
            self.endings[await self._ask()] += 1
            for worker in self._cluster.workers.values():
                worker.prefills.clear()
                worker.decodes.clear()
                worker.released.clear()
                worker.renewed.clear()

    async def _ask(self) -> str:
        """Cancelled after any number of turns of the loop: queued, in prefill, in between, or in decode."""
        prompt = pb.TokenIds(ids=self._draw.choices(range(256), k=_PROMPT_LEN))
        sampling = pb.SamplingParams(max_tokens=_MAX_TOKENS, temperature=0)
        session = self._cluster.open(pb.GenerateRequest(token_ids=prompt, sampling_params=sampling))
        if self._draw.random() < self._cancelled:
            delay_s = self._draw.expovariate(1 / 0.02)
            asyncio.get_running_loop().call_later(delay_s, session.stop, Cancelled("the client went away"))
        try:
            async for _ in session.outbox:
                pass
        except BatonError as error:
            return type(error).__name__.lower()
        return "ended_well"


async def _memory_at_rest_mb(cluster: FakeCluster) -> float:
    await cluster.come_to_rest()
    gc.collect()
    return float(psutil.Process().memory_info().rss) / 1e6


def _parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=20_000)
    parser.add_argument("--warm-up", type=int, default=10_000, help="requests before memory is first looked at")
    parser.add_argument("--cancelled", type=float, default=0.1, help="share of requests")
    parser.add_argument("--at-a-time", type=int, default=50, help="open requests")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", default="cancels", help="name of the result in benchmarks/results")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
