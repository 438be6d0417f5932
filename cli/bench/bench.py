"""`baton bench`: sends load to a service, and prints latencies, rates and goodput."""

import argparse
import asyncio
import json
import os
import secrets
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from itertools import islice, takewhile
from math import inf, isnan
from pathlib import Path

from baton.request import API_KEY
from cli.bench.latency import (
    LATENCIES,
    LatencyLimits,
    ModeSummary,
    Record,
    describe_limits,
    rates,
    reasons,
    summarize,
    without_nan,
)
from cli.bench.open_loop import ChatsClient, CompletionsClient, LoadClient, OpenLoopClient, chat, token_ids
from cli.bench.schedule import Arrival, poisson_process, read_trace, replay, scale
from cli.generate import read_timeout
from cli.terminal import (
    COLORS,
    NOT_KNOWN,
    Subparsers,
    add_command,
    is_drawn,
    read_above_0,
    read_count,
    read_limits,
    read_whole,
    show,
)
from deploy.local.client import find_cluster

DESCRIPTION = """\
Sends requests at times drawn beforehand, whether or not earlier ones were answered, and tells how long answers took.
The door is this cluster's gRPC, another one's (--address), or any server of OpenAI's completions (--url). Prompts are
random token ids, with --chat as many words in one turn of a chat, so that no cache helps, but for --prefix-len and the
prefixes of a trace.

TTFT and e2e count from when a request should have been sent. The exit status is 1 if any request failed."""
LATE_MS = 100.0
"""If the client sends a hundredth of its requests later than this, the output says so."""
SEED_BITS = 16


def add_parser(commands: Subparsers) -> None:
    parser = add_command(commands, "bench", "measure a service under load", DESCRIPTION, run)
    door = parser.add_mutually_exclusive_group()
    door.add_argument("--url", type=str, metavar="URL", help="a server of OpenAI's, like http://127.0.0.1:8000/v1")
    door.add_argument("--address", type=str, metavar="HOST:PORT", help="gRPC of a Baton (default: this cluster's)")
    parser.add_argument("--model", type=str, default="", help="with --url: its name (default: the first one told)")
    parser.add_argument("--chat", action="store_true", help="send messages, not token ids: the template adds its own")
    parser.add_argument("--api-key", type=str, help=f"of the caller (default: ${API_KEY}, hidden from `ps`)")
    parser.add_argument(
        "--ignore-eos",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="with --url: have answers of full length; a server that does not know the field wants --no-ignore-eos",
    )
    load = parser.add_argument_group("load")
    load.add_argument("--rate", type=read_above_0, default=2.0, metavar="R", help="requests a second (default: 2)")
    ends = load.add_mutually_exclusive_group()
    ends.add_argument(
        "--duration", type=read_above_0, default=30.0, metavar="S", help="seconds of arrivals (default: 30)"
    )
    ends.add_argument("--num-requests", type=read_count, metavar="N", help="so many requests instead")
    load.add_argument("--input-len", type=read_count, default=200, metavar="N", help="prompt tokens (default: 200)")
    load.add_argument("--output-len", type=read_count, default=50, metavar="N", help="output tokens (default: 50)")
    load.add_argument(
        "--prefix-len",
        type=_from_0,
        default=0,
        metavar="N",
        help="tokens at the start that all prompts share (default: 0)",
    )
    load.add_argument(
        "--trace",
        type=Path,
        metavar="FILE",
        help="Azure's .csv or Mooncake's .jsonl: arrivals and lengths from there, at --rate",
    )
    load.add_argument(
        "--length-factor",
        type=read_above_0,
        default=1.0,
        metavar="X",
        help="multiplies a trace's lengths (default: 1)",
    )
    load.add_argument("--concurrency", type=read_count, metavar="N", help="so many at a time; others are sent late")
    load.add_argument("--timeout", type=read_timeout, default=120.0, metavar="S", help="of a request (default: 120)")
    load.add_argument(
        "--seed",
        type=int,
        default=secrets.randbits(SEED_BITS),
        help="the same seed draws the same requests, which a cache then knows (default: another one each time)",
    )
    parser.add_argument(
        "--slo",
        type=_read_slo,
        default=LatencyLimits(1.0, 0.1),
        metavar="ttft=MS,tpot=MS",
        help="what a good request keeps, in ms: to the first token, and for each later one "
        "(default: ttft=1000,tpot=100)",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures, and each request, to a file")
    parser.add_argument("--color", choices=COLORS, default="auto", help="of tables and progress (default: auto)")


def run(args: argparse.Namespace) -> int:
    load, records = asyncio.run(_measure(args))
    summary = summarize([records], args.slo)
    print(load)
    show(("", "p50", "p90", "p99"), _latency_rows(summary), args.color)
    show(("", ""), list(rates(summary).items()), args.color)
    print(describe_limits(args.slo))
    if args.json is not None:
        args.json.write_text(_to_json(args, load, summary, records))
    for kind, reason in reasons(records).items():
        print(f"baton: {summary.errors[kind]} {kind}, the first of them: {reason}", file=sys.stderr)
    if summary.client_lateness_ms.p99 > LATE_MS:
        late = "requests were sent late, so this client (or --concurrency) is part of their TTFT"
        print(f"baton: {late}", file=sys.stderr)
    return 1 if summary.errors else 0


async def _measure(args: argparse.Namespace) -> tuple[str, list[Record]]:
    """Returns the load in words, and a record of each request. Raises BatonError if the service does not answer."""
    async with _open(args) as client:
        load, schedule = draw_load(args, await client.max_context_len())
        with _progress(len(schedule), args.color) as tell:
            return load, await client.run(schedule, args.concurrency, tell)


def _open(args: argparse.Namespace) -> OpenLoopClient:
    if args.url is not None:
        key = args.api_key or os.environ.get(API_KEY, "")
        client = ChatsClient if args.chat else CompletionsClient
        return client(args.url, args.timeout, args.model, key, args.ignore_eos or None)
    address = args.address or find_cluster(args.name).addresses.local
    return LoadClient(address, args.timeout, args.api_key, chat if args.chat else token_ids)


def draw_load(args: argparse.Namespace, max_context_len: int) -> tuple[str, list[Arrival]]:
    """Describes the requests, and returns them. Raises InvalidRequest for a trace that cannot be read."""
    duration_s = args.num_requests / args.rate if args.num_requests else args.duration
    if args.trace is not None:
        trace = scale(read_trace(args.trace), args.rate, duration_s, args.length_factor, max_context_len)
        return f"{args.trace.name}: {trace.describe()}, seed {args.seed}", replay(trace, args.seed)
    shared = f", the first {args.prefix_len} the same in all" if args.prefix_len else ""
    unit = "words of a chat" if args.chat else "tokens"
    ends = f"{args.num_requests} of them" if args.num_requests else f"for {args.duration:g} s"
    lengths = f"{args.input_len} {unit} in{shared}, {args.output_len} out, seed {args.seed}"
    return f"Poisson, {args.rate:g} requests a second {ends}, {lengths}", _draw_poisson(args)


def _draw_poisson(args: argparse.Namespace) -> list[Arrival]:
    endless = poisson_process(args.rate, args.input_len, args.output_len, args.seed, args.prefix_len)
    if args.num_requests:
        return list(islice(endless, args.num_requests))
    return list(takewhile(lambda arrival: arrival.at_s < args.duration, endless))


def _latency_rows(summary: ModeSummary) -> list[tuple[str, ...]]:
    picked = [(name, pick(summary)) for name, pick in LATENCIES]
    return [
        (name, *(NOT_KNOWN if isnan(value_ms) else f"{value_ms:.1f}" for value_ms in (of.p50, of.p90, of.p99)))
        for name, of in picked
    ]


def _to_json(args: argparse.Namespace, load: str, summary: ModeSummary, records: Sequence[Record]) -> str:
    """Formats the load, the figures, and the record of each request."""
    report = {
        "door": args.url or args.address or args.name,
        "load": load,
        "limits": asdict(args.slo),
        "summary": asdict(summary),
        "requests": [asdict(record) for record in records],
    }
    return json.dumps(without_nan(report), indent=1, allow_nan=False) + "\n"


@contextmanager
def _progress(num_requests: int, color: str) -> Iterator[Callable[[Record], None]]:
    """Draws a bar of ended requests if stderr is a terminal; yields the callback to call for each."""
    if not is_drawn(color, sys.stderr):
        yield lambda record: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.fields[errors]} errors"))
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task, errors = progress.add_task("", total=num_requests, errors=0), 0

        def tell(record: Record) -> None:
            nonlocal errors
            errors += record.error is not None
            progress.update(task, advance=1, errors=errors)

        yield tell


def _from_0(text: str) -> int:
    if (number := read_whole(text)) >= 0:
        return number
    raise argparse.ArgumentTypeError(f"must be at least 0, not {number}")


def _read_slo(text: str) -> LatencyLimits:
    """Reads one limit or both; a missing limit is infinite. Raises ArgumentTypeError."""
    limits_ms = read_limits(text, {"ttft": inf, "tpot": inf}, "ttft=1000,tpot=100")
    return LatencyLimits(limits_ms["ttft"] / 1000, limits_ms["tpot"] / 1000)
