"""How long a full router takes to refuse, against a bare server that does nothing else.

    python benchmarks/refusals.py --duration 20 --rounds 3

A Poisson flood of ten times the capacity arrives at a router whose workers are fakes: every request that is let in
gains a token at each beat. What computes is elsewhere, as in a cluster: the cores are the router's and its clients'.
(flood.py has the whole service, engines and all, on the same cores.)
"""

import argparse
import asyncio
import sys
from collections import Counter
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.load_client import LoadClient
from benchmarks.observer import observe
from benchmarks.result_file import write_result
from benchmarks.schedule import poisson
from benchmarks.server_process import server_process

_REFUSED = "RESOURCE_EXHAUSTED"
_LEAD_S = 2.0
"""Until the router is full, which is not watched."""
_INPUT_LEN = 64
_TIMEOUT_S = 60.0


def main() -> None:
    options = _parse(sys.argv[1:])
    answers: Counter[str] = Counter()
    router_ms: list[float] = []
    bare_ms: list[float] = []
    with (
        server_process("workers", str(options.interval)) as workers,
        server_process("router", *workers.addresses, str(options.max_open)) as router,
        server_process("refusing") as bare,
    ):
        for seed in range(options.rounds):
            flood, seen, seen_bare = asyncio.run(_round(router.addresses[0], bare.addresses[0], options, seed))
            answers += flood
            router_ms += seen
            bare_ms += seen_bare
    write_result(options.out, _figures(answers, router_ms, bare_ms, options), {})


async def _round(
    router: str, bare: str, options: argparse.Namespace, seed: int
) -> tuple[Counter[str], list[float], list[float]]:
    """What became of the flood, and milliseconds of the refusals that the observer got from either server."""
    flood = poisson(options.factor * _capacity_rps(options), options.duration, _INPUT_LEN, options.tokens, seed)
    async with LoadClient(router, _TIMEOUT_S) as client:
        sending = asyncio.create_task(client.run(flood))
        await asyncio.sleep(_LEAD_S)
        seen = await observe(options.observe, options.duration - _LEAD_S, [router, bare])
        records = await sending
    refusals_ms = [[ms for code, ms, _ in answers if code == _REFUSED] for answers in seen]
    return Counter(record.error or "OK" for record in records), refusals_ms[0], refusals_ms[1]


def _capacity_rps(options: argparse.Namespace) -> float:
    """Requests a second that the fakes can end."""
    return float(options.max_open / (options.tokens * options.interval))


def _figures(
    answers: Counter[str], router_ms: list[float], bare_ms: list[float], options: argparse.Namespace
) -> dict[str, object]:
    of_router, of_bare = np.percentile(router_ms, [50, 99]), np.percentile(bare_ms, [50, 99])
    return {
        "refusal_p99_ms": float(of_router[1]),
        "refusal_p50_ms": float(of_router[0]),
        "bare_refusal_p99_ms": float(of_bare[1]),
        "bare_refusal_p50_ms": float(of_bare[0]),
        "observed": len(router_ms),
        "bare_observed": len(bare_ms),
        "capacity_rps": _capacity_rps(options),
        "flood_rps": answers.total() / options.rounds / options.duration,
        "flood_answers": dict(answers),
    }


def _parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--factor", type=float, default=10.0, help="rate of the flood, in capacities")
    parser.add_argument("--duration", type=float, default=20.0, help="seconds of each round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--observe", type=float, default=20.0, help="requests a second of the observer to each server")
    parser.add_argument("--max-open", type=int, default=64, help="requests that the router lets in")
    parser.add_argument("--interval", type=float, default=0.02, help="seconds between the tokens of a stream")
    parser.add_argument("--tokens", type=int, default=256, help="of each stream")
    parser.add_argument("--out", default="refusals", help="name of the result in benchmarks/results")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
