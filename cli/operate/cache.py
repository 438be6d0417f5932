"""`baton cache`: shows what arenas, Redis and files hold, and clears it, by tenant, model or prompt."""

import argparse
from collections import Counter
from pathlib import Path

from cli.terminal import NOT_KNOWN, Subparsers, add_command, escaped, render
from deploy.local.client import call_operator, find_cluster
from deploy.plan.byte_size import format_bytes
from wire.errors import InvalidRequest
from wire.pb import cluster_pb2
from wire.pb import inference_pb2 as pb

DESCRIPTION = """\
What arenas, Redis and files hold, by node, tenant and model: blocks, bytes, and how long ago they were used. Nodes that
share a Redis or a folder show the same blocks each. Blocks without a tenant are of another model, or of a cluster with
another secret. Never a prompt, its tokens or a key."""
LIST = "Shows the blocks of each tier by node, tenant and model. Exit status 1 where a worker or a tier did not answer."
CLEAR = """\
Withdraws blocks from workers, arenas, Redis and files, and shows what each tier lost. A request that runs keeps what it
uses, gets the same tokens, and may write blocks of its prompt again. Clearing a tenant or a model drops the cached
pages of all tenants from workers' own memory: they are found in the arena again."""
TIMEOUT_S = 600.0
MAX_IDS_BYTES = 16 << 20
HEAD = ("tier", "node", "tenant", "model", "blocks", "bytes", "of tier", "share", "newest use", "oldest use")


def add_parser(commands: Subparsers) -> None:
    parser: argparse.ArgumentParser = commands.add_parser(
        "cache", help="show and clear what tiers hold", description=DESCRIPTION
    )
    verbs = parser.add_subparsers(title="verbs", metavar="VERB", required=True)
    listing = add_command(verbs, "ls", "show what tiers hold", LIST, run_list)
    clearing = add_command(verbs, "clear", "withdraw blocks from every tier", CLEAR, run_clear)
    for one in (listing, clearing):
        one.add_argument("--tenant", type=str, help="only this tenant's blocks (with a prompt: default)")
        one.add_argument("--model", type=str, help="only this model's blocks, by the name that `baton cache ls` shows")
        prompt = one.add_mutually_exclusive_group()
        prompt.add_argument("--prompt", type=str, metavar="TEXT", help="only the blocks of this prompt")
        prompt.add_argument(
            "--token-ids",
            type=str,
            metavar="FILE",
            help="the same, by a file of its token ids, with spaces or commas between them",
        )
    clearing.add_argument("--everything", action="store_true", help="all blocks, unknown namespaces' too")
    clearing.add_argument("--dry-run", action="store_true", help="show what would be cleared, and clear nothing")


def run_list(args: argparse.Namespace) -> int:
    return _show(args, "ListCache", "no block is held")


def run_clear(args: argparse.Namespace) -> int:
    given = (args.tenant, args.model, args.prompt, args.token_ids)
    if args.everything == any(one is not None for one in given):
        raise InvalidRequest("--everything", "give either --everything, or --tenant, --model, --prompt or --token-ids")
    return _show(args, "ListCache" if args.dry_run else "ClearCache", "no block was held")


def _show(args: argparse.Namespace, method: str, nothing: str) -> int:
    """Prints a call's answer; returns 1 if a worker or a tier did not answer."""
    contents: cluster_pb2.CacheContents = call_operator(find_cluster(args.name), method, request_of(args), TIMEOUT_S)
    print(escaped(render_contents(contents) or nothing))
    return 1 if contents.problems else 0


def request_of(args: argparse.Namespace) -> cluster_pb2.CacheRequest:
    """Makes the request that arguments ask for. Raises InvalidRequest."""
    token_ids = None if args.token_ids is None else pb.TokenIds(ids=read_ids(Path(args.token_ids)))
    return cluster_pb2.CacheRequest(
        tenant=args.tenant,
        model=args.model,
        text=args.prompt,
        token_ids=token_ids,
        everything=getattr(args, "everything", False) and not args.dry_run,
    )


def read_ids(path: Path) -> list[int]:
    """Reads token ids: whole numbers with spaces or commas between them, or a list of JSON.

    Raises InvalidRequest, OSError.
    """
    with path.open("rb") as file:
        data = file.read(MAX_IDS_BYTES + 1)
    words = data.decode(errors="replace").strip().strip("[]").replace(",", " ").split()
    if len(data) > MAX_IDS_BYTES or not all(word.isascii() and word.isdigit() and len(word) <= 9 for word in words):
        raise InvalidRequest("--token-ids", f"{path} must have whole numbers below 10^9, in at most 16 MiB")
    return [int(word) for word in words]


def render_contents(contents: cluster_pb2.CacheContents) -> str:
    """Renders the rows, then the prompt's blocks, the blocks cleared from devices, and problems."""
    held = Counter[tuple[str, str]]()
    for row in contents.rows:
        held[row.tier, row.node_id] += row.bytes
    cells = [_cells(row, held[row.tier, row.node_id]) for row in contents.rows]
    parts = [render(HEAD, cells)] if cells else []
    parts += [f"the prompt has {contents.prompt_blocks} blocks"] if contents.prompt_blocks else []
    parts += [f"{contents.dropped_pages} cached pages of workers dropped"] if contents.dropped_pages else []
    return "\n".join([*parts, *(f"problem: {one}, and may hold more" for one in contents.problems)])


def _cells(row: cluster_pb2.CacheRow, num_tier_bytes: int) -> tuple[str, ...]:
    part = f"{100 * row.bytes / num_tier_bytes:.0f} %" if num_tier_bytes else NOT_KNOWN
    share = f"{100 * row.share:.0f} %" if row.HasField("share") else NOT_KNOWN
    names = (one or NOT_KNOWN for one in (row.tier, row.node_id, row.tenant, row.model))
    used = (f"{age_s:.0f} s ago" for age_s in (row.newest_s, row.oldest_s))
    return (*names, str(row.blocks), format_bytes(row.bytes), part, share, *used)
