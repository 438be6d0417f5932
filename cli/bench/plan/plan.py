"""`baton plan`: tells how many workers of which role a load needs, and whether disaggregation pays."""

import argparse
import asyncio
import json
import math
import secrets
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from cli.bench.latency import Record, Slo, without_nan
from cli.bench.open_loop import NO_CONTEXT_LEN, LoadClient
from cli.bench.plan.costs import LearnedCosts, learn
from cli.bench.schedule import Arrival, ScaledTrace, TraceRow, read_trace, replay, scale
from cli.terminal import COLORS, NOT_KNOWN, Subparsers, add_command, read_above_0, read_count, read_limits, show
from deploy.local.client import find_cluster
from deploy.plan.config import ClusterConfig
from wire.errors import ConfigError, InvalidRequest, require
from wire.pools import Role
from wire.typed_reader import from_object

if TYPE_CHECKING:  # they import torch
    from cli.bench.plan.sizing import TriedSizes
    from cli.bench.plan.twin_cluster import TwinSettings

DESCRIPTION = """\
Replays a trace on a cluster in this process, for one size of the pools after another: real router, batchers and store,
on a clock that moves only with modelled work. It tells how many workers keep the limits, and whether prefill and decode
on two pools need fewer of them than one pool that does both.

What work costs is learned from requests: those of `baton bench --json FILE`, or some dozens that --measure sends to the
running cluster. All workers are on one node; the answer is as good as those requests are like the load."""
SLO_EXAMPLE = "ttft_ms=1000,itl_ms=50,share=0.95"
MEASURED = ((1, 8), (4, 16), (16, 32))
"""The rounds of --measure: requests at once, and their number."""
MAX_OUTPUT_LEN, TIMEOUT_S = 64, 120.0
"""Bounds on the answers of --measure."""
SLOTS_PER_PAGE = 4
"""Blocks of the arena, for each page of a worker."""
SEED, SEED_BITS = 0, 16
HEAD = ("prefill", "decode", "within limits", "TTFT p50", "p99", "ITL p50", "p99 ms", "prefill busy", "decode busy")


def add_parser(commands: Subparsers) -> None:
    parser = add_command(commands, "plan", "tell how many workers a load needs", DESCRIPTION, run)
    parser.add_argument(
        "--trace",
        type=Path,
        metavar="FILE",
        required=True,
        help="Azure's .csv or Mooncake's .jsonl: arrivals and lengths of the load",
    )
    parser.add_argument(
        "--slo",
        type=read_slo,
        metavar=SLO_EXAMPLE,
        required=True,
        help="limits of a request, its ITL the mean, and the least share of requests that keep them",
    )
    costs = parser.add_mutually_exclusive_group(required=True)
    costs.add_argument("--costs", type=Path, metavar="FILE", help="learn from what `baton bench --json` has written")
    costs.add_argument("--measure", action="store_true", help="learn from requests to the running cluster")
    parser.add_argument("--max-workers", type=read_count, default=16, metavar="N", help="of both pools (default: 16)")
    parser.add_argument("--config", type=Path, metavar="FILE", help="batch, router and block size of `up --config`")
    parser.add_argument(
        "--pages",
        type=read_count,
        default=4096,
        metavar="N",
        help="KV pages of each worker (default: 4096); the arena has four times as many",
    )
    parser.add_argument(
        "--rate", type=read_above_0, metavar="R", help="requests a second (default: the trace's own pace)"
    )
    parser.add_argument(
        "--num-requests", type=read_count, default=1000, metavar="N", help="the first N of the trace (default: 1000)"
    )
    parser.add_argument(
        "--length-factor",
        type=read_above_0,
        default=1.0,
        metavar="X",
        help="multiplies the trace's lengths (default: 1)",
    )
    parser.add_argument("--json", action="store_true", help="print one object, for scripts")
    parser.add_argument("--color", choices=COLORS, default="auto", help="of tables (default: auto)")


def run(args: argparse.Namespace) -> int:
    from cli.bench.plan.sizing import PlannedLoad, find_sizes

    rows = read_trace(args.trace)[: args.num_requests]
    rounds = asyncio.run(_measure(args.name, rows, args.length_factor)) if args.measure else [read_run(args.costs)]
    learned = learn(rounds)
    trace = paced(rows, args.rate, args.length_factor)
    load = PlannedLoad(replay(trace, SEED), _settings(args, trace, learned), args.slo, _tell)
    tried = find_sizes(load, args.max_workers)
    words, verdict = f"{args.trace.name}: {trace.describe()}", verdict_of(tried, args.slo, args.max_workers)
    if args.json:
        print(json.dumps(without_nan(_to_object(words, learned, tried, verdict)), allow_nan=False))
    else:
        print(words)
        show(("cost", "s", "learned from"), [*_cost_rows(learned)], args.color)
        show(HEAD, [*map(_row, tried)], args.color)
        print(f"\n{verdict}")
    return 0


def paced(rows: Sequence[TraceRow], rate: float | None, length_factor: float) -> ScaledTrace:
    """Scales a trace to a rate, or leaves it at its own pace. No request is cut."""
    duration_s = len(rows) / rate if rate else rows[-1].at_s or 1.0
    return scale(rows, len(rows) / duration_s, duration_s, length_factor, NO_CONTEXT_LEN)


def read_run(path: Path) -> list[Record]:
    """Reads the requests of a run that `baton bench --json` has written. Raises InvalidRequest for another file."""
    try:
        return [from_object(Record, one, "requests") for one in json.loads(path.read_text())["requests"]]
    except (ValueError, LookupError, TypeError, ConfigError) as error:
        raise InvalidRequest("costs", "is no file of `baton bench --json`") from error


async def _measure(name: str, rows: Sequence[TraceRow], length_factor: float) -> list[list[Record]]:
    """Sends requests like the load's to the cluster, some alone, others together. Raises BatonError."""
    async with LoadClient(find_cluster(name).addresses.local, TIMEOUT_S) as client:
        max_len, rounds = await client.max_context_len(), []
        for at_once, number in MEASURED:
            spread = [rows[place * len(rows) // number] for place in range(number)]
            trace = scale(spread, number, 1.0, length_factor, max_len)
            arrivals = replay(trace, secrets.randbits(SEED_BITS))
            short = [Arrival(0.0, one.prompt, min(one.output_len, MAX_OUTPUT_LEN)) for one in arrivals]
            rounds.append(await client.run(short, at_once))
        return rounds


def _settings(args: argparse.Namespace, trace: ScaledTrace, learned: LearnedCosts) -> "TwinSettings":
    """Returns the settings of the cluster that serves the load. Raises InvalidRequest if a worker has too few pages."""
    from cli.bench.plan.twin_cluster import TwinSettings

    config = ClusterConfig.load(args.config, {})
    max_len, block_size = max(one.input_len + one.output_len for one in trace.rows) + 1, config.model.block_size
    num_needed = -(-max_len // block_size) + 1
    require(args.pages >= num_needed, "pages", f"the longest request takes {num_needed} of a worker's {args.pages}")
    return TwinSettings(
        costs=learned.costs,
        batch=config.batch,
        router=config.router,
        limits=config.slo,
        block_size=block_size,
        max_context_len=max_len,
        num_pages=args.pages,
        num_slots=SLOTS_PER_PAGE * args.pages,
    )


def verdict_of(tried: Sequence["TriedSizes"], slo: Slo, max_workers: int) -> str:
    """Tells in a sentence how many workers the load needs, and whether two pools pay.

    The fewest workers are chosen; of equals the greater share, then one pool.
    """
    wanted, kept = f"{slo.share:.0%} of requests within the limits", [one for one in tried if one.share >= slo.share]
    if not kept:
        best = max(tried, key=lambda one: (one.is_whole, one.share))
        reached = f"the best, {_sizes(best)}, keeps {best.share:.1%}"
        return f"No size of at most {max_workers} workers keeps {wanted}: {reached}."
    chosen, *others = sorted(kept, key=lambda one: (one.num_workers, -one.share, one.sizes.prefill))
    is_pair = chosen.sizes.prefill > 0
    beside = next(
        (_sizes(one) for one in others if (one.sizes.prefill > 0) != is_pair), f"more than {max_workers} workers"
    )
    advice, how = ("Disaggregate", "one pool") if is_pair else ("Do not disaggregate", "two pools")
    return f"{advice}: {_sizes(chosen)} would keep {wanted}; {how} would take {beside}."


def _sizes(candidate: "TriedSizes") -> str:
    prefill, decode = candidate.sizes.prefill, candidate.sizes.decode
    alone = f"{decode} decode worker{'s' if decode > 1 else ''} alone"
    return f"{prefill} prefill + {decode} decode" if prefill else alone


def _tell(candidate: "TriedSizes") -> None:
    """Shows that the search goes on."""
    if sys.stderr.isatty():
        print(f"{_sizes(candidate)}: {_row(candidate)[2]}", file=sys.stderr)


def _row(candidate: "TriedSizes") -> tuple[str, ...]:
    sizes, ttft, itl = candidate.sizes, candidate.summary.ttft_ms, candidate.summary.tpot_ms
    latencies = [NOT_KNOWN if math.isnan(ms) else f"{ms:.1f}" for ms in (ttft.p50, ttft.p99, itl.p50, itl.p99)]
    busy = [f"{candidate.busy[role]:.0%}" if role in candidate.busy else NOT_KNOWN for role in Role]
    at_most = "" if candidate.is_whole else "given up below "
    return (str(sizes.prefill), str(sizes.decode), f"{at_most}{candidate.share:.1%}", *latencies, *busy)


def _cost_rows(learned: LearnedCosts) -> Iterator[tuple[str, str, str]]:
    for name, cost_s in asdict(learned.costs).items():
        yield name, f"{np.median(cost_s):.3g}", learned.sources[name]


def _to_object(load: str, learned: LearnedCosts, tried: Sequence["TriedSizes"], verdict: str) -> dict[str, Any]:
    candidates = [{**asdict(one), "busy": {role.value: share for role, share in one.busy.items()}} for one in tried]
    costs = {name: {"s": cost_s, "source": learned.sources[name]} for name, cost_s in asdict(learned.costs).items()}
    return {"load": load, "costs": costs, "candidates": candidates, "verdict": verdict}


def read_slo(text: str) -> Slo:
    """Reads limits, in ms, and their share; a missing limit is infinite. Raises ArgumentTypeError."""
    given = read_limits(text, {"ttft_ms": math.inf, "itl_ms": math.inf, "share": 0.95}, SLO_EXAMPLE)
    if given["share"] > 1:
        raise argparse.ArgumentTypeError(f"share must be at most 1, not {given['share']:g}")
    return Slo(given["ttft_ms"] / 1000, given["itl_ms"] / 1000, given["share"])
