"""`baton usage`: shows what tenants and their keys have used."""

import argparse
import json
import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

from cli.terminal import Subparsers, add_command, render
from deploy.deadlines import STATUS_IN_COMMAND_S
from deploy.local.client import call_each, find_cluster
from wire.errors import Unavailable
from wire.pb import cluster_pb2

DESCRIPTION = """\
Shows what each tenant and key has used since its router started, of requests that are over: tokens computed for
prompts, prompt tokens whose KV was found, generated tokens, and the time that workers computed or generated for it."""
AMOUNTS = ("requests", "computed_tokens", "cached_tokens", "generated_tokens", "worker_s")


def add_parser(commands: Subparsers) -> None:
    parser = add_command(commands, "usage", "show what tenants and keys have used", DESCRIPTION, run)
    parser.add_argument("--json", action="store_true", help="print one list, for scripts")


def run(args: argparse.Namespace) -> int:
    answers = call_each(find_cluster(args.name), "GetUsage", cluster_pb2.GetUsageRequest(), STATUS_IN_COMMAND_S)
    if all(answer is None for answer in answers.values()):
        raise Unavailable("no router answers: see `baton status`")
    for address in (address for address, answer in answers.items() if answer is None):
        print(f"the router at {address} does not answer, and its part is missing", file=sys.stderr)
    used = total(one for answer in answers.values() if answer is not None for one in answer.usage)
    if args.json:
        print(json.dumps(used))
    elif used:
        print(render(("tenant", "key", *(name.replace("_", " ") for name in AMOUNTS)), [_row(one) for one in used]))
    else:
        print("no request is over yet")
    return 0


def total(rows: Iterable[cluster_pb2.TenantUsage]) -> list[dict[str, Any]]:
    """Sums the routers' rows by tenant and key."""
    sums: defaultdict[tuple[str, str], dict[str, float]] = defaultdict(lambda: dict.fromkeys(AMOUNTS, 0))
    for row in rows:
        for name in AMOUNTS:
            sums[row.tenant, row.key][name] += getattr(row, name)
    return [{"tenant": tenant, "key": key, **amounts} for (tenant, key), amounts in sorted(sums.items())]


def _row(used: Mapping[str, Any]) -> tuple[str, ...]:
    return (used["tenant"], used["key"] or "-", *(f"{used[name]:,.0f}" for name in AMOUNTS))
