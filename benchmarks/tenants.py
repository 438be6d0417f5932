"""The time of a request whose prompt another tenant has cached, beside one that no tenant has: they must not differ.

    python benchmarks/tenants.py --pairs 1000

A cluster in one process with keys of two tenants. For each pair `acme` sends a prompt; then `beta` sends that prompt
and a fresh one, in drawn order. Mann and Whitney's test compares the times to the first token, at 1 %, two-sided;
the same test must tell `acme` sending it again from a fresh prompt, or it proves nothing.
"""

import argparse
import asyncio
import math
import random
import sys
import time
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.result_file import write_result
from engine.model.hash_model import HashModel
from router.requests.dispatch import OpenRequest
from tests.harness.local_cluster import LocalCluster, Sizes
from wire.layout import KVLayout
from wire.pb import inference_pb2 as pb
from wire.trust.key_ring import Allowance, Key, Scope, make_key

LAYOUT = KVLayout(num_layers=2, num_kv_heads=1, head_dim=8, block_size=16, dtype="float32")
SIZES = Sizes(num_blocks=1024, num_slots=4096)
ACME, BETA = (make_key(name, [Scope.GENERATE], Allowance())[0] for name in ("acme", "beta"))
PROMPT_LEN = 512
LIMIT = 2.576
"""Of the standard normal distribution, 1 % lies beyond it on both sides together."""
WARM_UP = 20


def rank_z(first: Sequence[float], second: Sequence[float]) -> float:
    """Returns Mann and Whitney's statistic as a standard normal value: above 0 where the first are larger."""
    ranked = sorted((value, place) for place, values in enumerate((first, second)) for value in values)
    rank_sum = sum(rank for rank, (_, place) in enumerate(ranked, 1) if place == 0)
    num, other = len(first), len(second)
    return (rank_sum - num * (num + other + 1) / 2) / math.sqrt(num * other * (num + other + 1) / 12)


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--pairs", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", default="tenants")
    args = parser.parse_args()
    draw = random.Random(args.seed)
    times: dict[str, list[float]] = {"other": [], "fresh": [], "own": []}
    num_hits = 0
    async with LocalCluster.running(HashModel(LAYOUT, vocab_size=300), 0, 1, SIZES) as cluster:
        for number in range(-WARM_UP, args.pairs):
            cached, fresh = ([draw.randrange(300) for _ in range(PROMPT_LEN)] for _ in range(2))
            await ttft_s(cluster, ACME, cached)
            asked = [("other", BETA, cached), ("fresh", BETA, fresh)]
            draw.shuffle(asked)
            for kind, caller, prompt in [*asked, ("own", ACME, cached)]:
                took_s, cached_tokens = await ttft_s(cluster, caller, prompt)
                num_hits += cached_tokens if kind != "own" else 0
                times[kind] += [took_s] if number >= 0 else []
    z, control = rank_z(times["other"], times["fresh"]), rank_z(times["own"], times["fresh"])
    medians = {kind: sorted(values)[len(values) // 2] * 1e3 for kind, values in times.items()}
    rows = {
        "median TTFT, ms: cached by another tenant, by none": f"{medians['other']:.3f}, {medians['fresh']:.3f}",
        "z of the two; beyond 2.576 they differ at 1 %": f"{z:.2f}: {'differ' if abs(z) > LIMIT else 'do not differ'}",
        "tokens hit across tenants": str(num_hits),
        "control, cached by itself: median TTFT, ms; z": f"{medians['own']:.3f}; {control:.2f}",
    }
    write_result(args.out, rows, {"times_s": times, "z": z, "control_z": control})
    sys.exit(num_hits > 0 or abs(z) > LIMIT or abs(control) < LIMIT)


async def ttft_s(cluster: LocalCluster, caller: Key, prompt: Sequence[int]) -> tuple[float, int]:
    """Returns the time to the first token, and the cached tokens of the prompt."""
    sampling = pb.SamplingParams(temperature=0.0, max_tokens=1)
    request = pb.GenerateRequest(token_ids=pb.TokenIds(ids=prompt), sampling_params=sampling)
    began_s = time.perf_counter()
    opened: OpenRequest = cluster.router.dispatcher.open(request, 60.0, caller)
    first_s = 0.0
    async for response in opened.outbox:
        first_s = first_s or time.perf_counter() - began_s
        usage = response.complete.usage
    return first_s, sum(one.tokens for one in usage.cached_tokens)


if __name__ == "__main__":
    asyncio.run(main())
