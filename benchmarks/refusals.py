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
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.observer import Answer, observe, refusal_figures
from benchmarks.result_file import write_result
from benchmarks.server_process import server_process
from cli.bench.latency import Record
from cli.bench.open_loop import LoadClient
from cli.bench.schedule import poisson

_LEAD_S = 2.0
"""Until the router is full, which is not watched."""
_INPUT_LEN = 64
_TIMEOUT_S = 60.0


@dataclass
class Seen:
    """Outcomes of the flood, and answers that the observer got from either server."""

    flood: list[Record] = field(default_factory=list)
    router: list[Answer] = field(default_factory=list)
    bare: list[Answer] = field(default_factory=list)


def main() -> None:
    options = _parse(sys.argv[1:])
    seen = Seen()
    with (
        server_process("workers", str(options.interval)) as workers,
        server_process("router", *workers.addresses, str(options.max_open)) as router,
        server_process("refusing") as bare,
    ):
        for seed in range(options.rounds):
            asyncio.run(_round(seen, [router.addresses[0], bare.addresses[0]], options, seed))
    write_result(options.out, _figures(seen, options), {})


async def _round(seen: Seen, addresses: list[str], options: argparse.Namespace, seed: int) -> None:
    flood = poisson(options.factor * _capacity_rps(options), options.duration, _INPUT_LEN, options.tokens, seed)
    async with LoadClient(addresses[0], _TIMEOUT_S) as client:
        sending = asyncio.create_task(client.run(flood))
        await asyncio.sleep(_LEAD_S)
        router, bare = await observe(options.observe, options.duration - _LEAD_S, 1000 + 2 * seed, addresses)
        seen.flood += await sending
    seen.router += router
    seen.bare += bare


def _capacity_rps(options: argparse.Namespace) -> float:
    """Requests a second that the fakes can end."""
    return float(options.max_open / (options.tokens * options.interval))


def _figures(seen: Seen, options: argparse.Namespace) -> dict[str, object]:
    return {
        **refusal_figures("refusal", seen.router),
        **refusal_figures("bare_refusal", seen.bare),
        "observer_lateness_p99_ms": float(np.percentile([answer.late_ms for answer in seen.router + seen.bare], 99)),
        "capacity_rps": _capacity_rps(options),
        "flood_rps": len(seen.flood) / options.rounds / options.duration,
        "flood_answers": dict(Counter(record.error or "OK" for record in seen.flood)),
        "client_lateness_p99_ms": float(np.percentile([one.late_s * 1000 for one in seen.flood], 99)),
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
