"""Fair shares of tenants, and deadlines, on a clock that moves only with modelled work.

    python benchmarks/fairness.py

The cluster of benchmarks/conditional.py: real router, workers, engines and store, whose model computes nothing and
takes modelled time. A step of a prefill worker has at most 256 tokens.

- *Light beside heavy*: a tenant that uses a part of its share, alone, and beside a tenant with ten times its share.
- *Prefix-heavy*: two tenants with long common prefixes and short questions, both with a backlog, under fairness, and as
  one tenant, which is the order without fairness.
- *Deadlines*: a tenant that sends twice as much as the cluster can serve, each request with a deadline.
"""

import argparse
import asyncio
import random
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.conditional import (
    LAYOUT,
    MAX_CONTEXT_LEN,
    NUM_DECODE,
    NUM_PAGES,
    NUM_PREFILL,
    NUM_SLOTS,
    TOKEN_S,
    VOCAB_SIZE,
    PacedCluster,
)
from benchmarks.result_file import write_result
from cli.bench.plan.paced_worker import ANSWER, PacedRecords
from engine.model.hash_model import HashModel
from router.config import RouterSettings
from tests.harness.answer import ask
from tests.harness.local_cluster import Sizes
from tests.simulator import virtual_time
from wire.errors import DeadlineExceeded, Overloaded
from wire.trust.key_ring import ANYONE, Key, Scope
from worker.config import BatchSettings

BATCH = BatchSettings(max_step_tokens=256, max_running=64, max_chunk_tokens=128)
SHARE = 0.5
"""Each of two tenants' share of the prefill worker's time."""
LIGHT_LOAD, HEAVY_LOAD = 0.3 * SHARE, 10 * SHARE
PROMPT_LENS, OUTPUT_LENS = (200, 3000), (20, 150)
NUM_PREFIXES, PREFIX_LEN, QUESTION_LENS = 4, 2048, (50, 200)
CROWD_LOAD = 2.0
DEADLINES_S = (4.0, 16.0)
MAX_QUEUED = 2048
NUM_QUESTIONS = 60


@dataclass(frozen=True)
class Asked:
    """A request of a tenant, when it is due. deadline_s: from then on; None without a deadline."""

    tenant: str
    at_s: float
    prompt: tuple[int, ...]
    output_len: int
    deadline_s: float | None = None


@dataclass(frozen=True)
class Answered:
    """An answer as its client saw it. ttft_s, took_s: count from when it was due; None without a token, or an end.

    reason: names the error that ended it, "" if it ended well. num_tokens: counts prompt and answer.
    """

    asked: Asked
    ttft_s: float | None
    took_s: float | None
    reason: str
    num_tokens: int
    ended_s: float


def key_of(tenant: str) -> Key:
    return Key(id="", digest="", tenant=tenant, scopes=(Scope.GENERATE,)) if tenant else ANYONE


def tokens(rng: random.Random, num: int) -> tuple[int, ...]:
    return tuple(rng.choices([one for one in range(VOCAB_SIZE) if one != ANSWER], k=num))


def arrivals(rng: random.Random, tenant: str, load: float, duration_s: float) -> list[Asked]:
    """Draws a tenant's independent requests, whose prompts take `load` of a prefill worker's time."""
    asked: list[Asked] = []
    num_tokens = 0
    while num_tokens * TOKEN_S < load * duration_s * NUM_PREFILL:
        one = Asked(
            tenant, rng.random() * duration_s, tokens(rng, rng.randint(*PROMPT_LENS)), rng.randint(*OUTPUT_LENS)
        )
        asked.append(one)
        num_tokens += len(one.prompt)
    return asked


def prefixed(rng: random.Random, tenant: str, num: int) -> list[Asked]:
    """Draws requests that begin with one of a few prefixes, all due at once."""
    prefixes = [tokens(rng, PREFIX_LEN) for _ in range(NUM_PREFIXES)]
    return [
        Asked(
            tenant, 0.0, (*rng.choice(prefixes), *tokens(rng, rng.randint(*QUESTION_LENS))), rng.randint(*OUTPUT_LENS)
        )
        for _ in range(num)
    ]


async def serve(cluster: PacedCluster, asked: Asked, began_s: float) -> Answered:
    """Sends a request when it is due, and reads its answer."""
    now_s = asyncio.get_running_loop().time
    await asyncio.sleep(began_s + asked.at_s - now_s())
    ttft_s, took_s, reason, num_tokens = None, None, "", len(asked.prompt)
    request = ask(asked.prompt, asked.output_len, ignore_eos=True)
    try:
        opened = cluster.router.dispatcher.open(request, asked.deadline_s, key_of(asked.tenant))
        async for response in opened.outbox:
            if response.HasField("chunk"):
                ttft_s = now_s() - began_s - asked.at_s if ttft_s is None else ttft_s
                num_tokens += len(response.chunk.token_ids)
        took_s = now_s() - began_s - asked.at_s
    except (Overloaded, DeadlineExceeded) as error:
        reason = error.reason
    return Answered(asked, ttft_s, took_s, reason, num_tokens, now_s() - began_s)


async def _play(asked: Sequence[Asked]) -> list[Answered]:
    settings = RouterSettings(max_open_requests=MAX_QUEUED, max_queued_requests=MAX_QUEUED)
    loop = asyncio.get_running_loop()
    model = HashModel(LAYOUT, VOCAB_SIZE, MAX_CONTEXT_LEN)
    cluster = PacedCluster(model, Sizes(NUM_PAGES, NUM_SLOTS, BATCH, settings), clock=loop.time)
    cluster.directory.records = PacedRecords(cluster.directory.state)
    await cluster.start(NUM_PREFILL, NUM_DECODE)
    began_s = loop.time()
    answered = await asyncio.gather(*(serve(cluster, one, began_s) for one in asked))
    await cluster.stop()
    return answered


def play(asked: Sequence[Asked]) -> list[Answered]:
    """Serves requests with a cluster of their own."""
    return virtual_time.run(_play(asked))


def percentile(values: Sequence[float], share: float) -> float:
    return sorted(values)[min(int(share * len(values)), len(values) - 1)]


def ttft_of(answered: Sequence[Answered], tenant: str, share: float) -> float:
    """Returns a percentile of a tenant's time to the first token."""
    return percentile([one.ttft_s for one in answered if one.asked.tenant == tenant and one.ttft_s is not None], share)


def measure_light(seed: int, duration_s: float) -> Mapping[str, float]:
    """Serves a light tenant alone, and beside a heavy one."""
    rng = random.Random(seed)
    light, heavy = arrivals(rng, "light", LIGHT_LOAD, duration_s), arrivals(rng, "heavy", HEAVY_LOAD, duration_s)
    alone, beside = play(light), play([*light, *heavy])
    return {
        "requests": len(light),
        "alone p50": ttft_of(alone, "light", 0.5),
        "alone p99": ttft_of(alone, "light", 0.99),
        "beside p50": ttft_of(beside, "light", 0.5),
        "beside p99": ttft_of(beside, "light", 0.99),
        "heavy p50": ttft_of(beside, "heavy", 0.5),
    }


def measure_prefixes(seed: int, num: int) -> Mapping[str, float]:
    """Serves the backlogs of two tenants, under fairness and as one tenant's. Returns tokens per second."""
    rng = random.Random(seed)
    asked = [*prefixed(rng, "a", num), *prefixed(rng, "b", num)]
    rng.shuffle(asked)
    one_tenant = [Asked("", one.at_s, one.prompt, one.output_len) for one in asked]
    fair, plain = play(asked), play(one_tenant)
    return {name: rate(answered) for name, answered in (("fair", fair), ("plain", plain))}


def rate(answered: Sequence[Answered]) -> float:
    return sum(one.num_tokens for one in answered) / max(one.ended_s for one in answered)


def measure_deadlines(seed: int, duration_s: float) -> Mapping[str, float]:
    """Serves twice as much as the cluster can, with deadlines. Returns shares of requests."""
    rng = random.Random(seed)
    asked = [
        replace(one, deadline_s=rng.uniform(*DEADLINES_S)) for one in arrivals(rng, "crowd", CROWD_LOAD, duration_s)
    ]
    answered = play(asked)
    admitted = [one for one in answered if one.reason != Overloaded.__new__(Overloaded).reason]
    missed = [one for one in admitted if one.took_s is None or one.took_s > (one.asked.deadline_s or 0.0)]
    served = sum(len(one.asked.prompt) for one in admitted if one not in missed)
    return {
        "requests": len(answered),
        "admitted": len(admitted),
        "missed": len(missed) / len(admitted),
        "busy": served * TOKEN_S / max(one.ended_s for one in answered),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--duration", type=float, default=60.0, help="simulated seconds of arrivals (default 60)")
    parser.add_argument("--seeds", type=int, default=3, help="rounds with requests of their own (default 3)")
    parser.add_argument("--out", default="fairness", help="name of the result in benchmarks/results")
    options = parser.parse_args()
    rounds: dict[str, list[Mapping[str, float]]] = {"light": [], "prefixes": [], "deadlines": []}
    for seed in range(options.seeds):
        rounds["light"].append(measure_light(seed, options.duration))
        rounds["prefixes"].append(measure_prefixes(seed, NUM_QUESTIONS))
        rounds["deadlines"].append(measure_deadlines(seed, options.duration))
        print({name: found[-1] for name, found in rounds.items()}, file=sys.stderr, flush=True)
    head: list[object] = ["row", *(f"seed {seed}" for seed in range(options.seeds))]
    table: list[list[object]] = [head]
    for name, found in rounds.items():
        table += [[f"{name}: {one}", *(each[one] for each in found)] for one in found[0]]
    figures = {
        "light tenant's TTFT p99, beside a heavy one / alone": _worst(rounds["light"], "beside p99", "alone p99", max),
        "tokens/s of prefix-heavy tenants, fair / as one tenant": _worst(rounds["prefixes"], "fair", "plain", min),
        "admitted requests that missed their deadline": sum(
            one["missed"] * one["admitted"] for one in rounds["deadlines"]
        )
        / sum(one["admitted"] for one in rounds["deadlines"]),
    }
    write_result(options.out, figures, rounds, table)


def _worst(found: Sequence[Mapping[str, float]], over: str, under: str, pick: Callable[..., float]) -> float:
    return pick(one[over] / one[under] for one in found)


if __name__ == "__main__":
    main()
