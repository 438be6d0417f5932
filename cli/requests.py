"""`baton requests`, `baton why` and `baton abort`: shows the last requests that ended, and ends one that runs."""

import argparse
import time
from collections.abc import Sequence
from itertools import count, groupby

from cli.generate import render_steps
from cli.operate.cache import TIMEOUT_S
from cli.terminal import NOT_KNOWN, Subparsers, add_command, escaped, read_count, render
from deploy.deadlines import STATUS_IN_COMMAND_S
from deploy.local.client import call_each, call_operator, find_cluster
from wire.convert import misses_from_pb
from wire.errors import InvalidRequest
from wire.journal import comparisons_of
from wire.pb import cluster_pb2
from wire.pb import inference_pb2 as pb
from wire.tier import words_of

DESCRIPTION = """\
Shows the last requests that ended, well or not, of all tenants: what each came to, its tokens, and where most of its
time went. With an id, all about the last request of it: where each millisecond went. Never a prompt or an answer."""
WHY = """\
Shows which blocks of a recent request's prompt were not read from the cache, and why: runs of blocks with one cause
each. Never a prompt or its tokens. Without a request, and with two prompts: from which token on they differ, and which
of the blocks that they share are held where now."""
ABORT = """\
Ends one running request; its client gets CANCELLED, over HTTP 499, and what it has is freed. Returns when its id is
free again."""
ID = "its id as the log has it: TENANT/ID, and ID alone for a request of the default tenant"
NUM_SHOWN = 20
HEAD = ("ended", "request", "outcome", "prompt", "output", "ttft ms", "took ms", "most of it")


def add_parser(commands: Subparsers) -> None:
    parser = add_command(commands, "requests", "show the last requests that ended", DESCRIPTION, run)
    parser.add_argument("request_id", nargs="?", default="", metavar="ID", type=str, help=ID)
    count = f"how many (default: {NUM_SHOWN})"
    parser.add_argument("--lines", type=read_count, default=NUM_SHOWN, metavar="N", help=count)
    aborting = add_command(commands, "abort", "end one request", ABORT, abort)
    aborting.add_argument("request_id", metavar="REQUEST_ID", type=str, help=ID)
    asking = add_command(commands, "why", "show why a prompt's blocks were not cached", WHY, why)
    asking.add_argument("request_id", nargs="?", metavar="REQUEST_ID", type=str, help=ID)
    asking.add_argument(
        "--prompt", action="append", default=[], metavar="TEXT", type=str, help="give twice, to compare two prompts"
    )
    asking.add_argument("--tenant", default="", type=str, help="the tenant of both prompts (default: default)")


def run(args: argparse.Namespace) -> int:
    if args.request_id:
        print(escaped(render_request(find_request(args.name, args.request_id))))
        return 0
    listed = _list(args.name, cluster_pb2.ListRequestsRequest(limit=args.lines))
    print(escaped(render(HEAD, [_row(one) for one in listed])) if listed else "no request has ended yet")
    return 0


def find_request(cluster: str, request_id: str) -> cluster_pb2.EndedRequest:
    """Asks the router for the last request with an id. Raises RequestNotFound if the router keeps none."""
    return _list(cluster, cluster_pb2.ListRequestsRequest(request_id=request_id, limit=1))[-1]


def _list(cluster: str, asked: cluster_pb2.ListRequestsRequest) -> Sequence[cluster_pb2.EndedRequest]:
    """Lists requests of all routers, newest last. Raises RequestNotFound if none keeps the one that is asked for."""
    state, given = find_cluster(cluster), ("ListRequests", asked, STATUS_IN_COMMAND_S)
    answers: list[cluster_pb2.ListRequestsResponse | None] = [call_operator(state, *given)]
    if "," in state.addresses.operator and not asked.request_id:
        answers = [*call_each(state, *given).values()]
    listed = [one for answer in answers if answer is not None for one in answer.requests]
    return sorted(listed, key=lambda one: one.ended_s)[-asked.limit :]


def why(args: argparse.Namespace) -> int:
    if (len(args.prompt), args.request_id is None) not in ((0, False), (2, True)):
        raise InvalidRequest("--prompt", "wanted twice, or else the id of a request")
    if args.prompt:
        asked = cluster_pb2.ComparePromptsRequest(tenant=args.tenant, first=args.prompt[0], second=args.prompt[1])
        compared = call_operator(find_cluster(args.name), "ComparePrompts", asked, TIMEOUT_S)
        print(escaped(render_comparison(compared)))
    else:
        wanted = cluster_pb2.ExplainMissesRequest(request_id=args.request_id)
        print(escaped(render_misses(call_operator(find_cluster(args.name), "ExplainMisses", wanted, TIMEOUT_S))))
    return 0


def abort(args: argparse.Namespace) -> int:
    request = pb.AbortRequest(request_id=args.request_id)
    call_operator(find_cluster(args.name), "Abort", request, STATUS_IN_COMMAND_S)
    print(f"{args.request_id} is aborted")
    return 0


def render_request(ended: cluster_pb2.EndedRequest) -> str:
    """Renders a request: its end, tokens, causes and steps."""
    cached = ", ".join(f"{one.tokens} {one.tier}" for one in ended.cached_tokens) or "none"
    tokens = f"{ended.prompt_tokens} prompt tokens (cached: {cached}), {ended.output_tokens} generated"
    spent = f"{ended.timeline.total_ms:.1f} ms, attempts: {ended.attempts}"
    why, by = ended.timeline.prefill_reason, ended.timeline.prefill_worker or "decode"
    pool = [f"prefill by {by}: {why}"] if why else []
    parts = [
        f"{ended.request_id}: {_outcome(ended)}",
        f"{tokens}, {spent}",
        *pool,
        *(f"  {one}" for one in (*ended.causes, *comparisons_of(ended.timeline))),
    ]
    return "\n".join([*parts, "", render_steps(ended.timeline.spans, {})])


def _row(ended: cluster_pb2.EndedRequest) -> tuple[str, ...]:
    at = time.strftime("%H:%M:%S", time.localtime(ended.ended_s))
    ttft = f"{ended.ttft_ms:.1f}" if ended.HasField("ttft_ms") else NOT_KNOWN
    tokens = (str(ended.prompt_tokens), str(ended.output_tokens))
    took = f"{ended.timeline.total_ms:.1f}"
    return (at, ended.request_id, ended.outcome, *tokens, ttft, took, next(iter(ended.causes), ""))


def _outcome(ended: cluster_pb2.EndedRequest) -> str:
    return ": ".join(filter(None, (ended.reason or ended.outcome, ended.message)))


def render_comparison(compared: cluster_pb2.PromptComparison) -> str:
    """Renders the place where two prompts differ, and the tiers of the blocks that they share."""
    num_tokens, num_blocks = compared.shared_tokens, compared.shared_blocks
    lines = [f"the first {num_tokens} of {compared.first_tokens} and {compared.second_tokens} tokens are the same"]
    if num_tokens < max(compared.first_tokens, compared.second_tokens):
        shown = (
            f"  {name}: ...{text!r}..."
            for name, text in zip("AB", (compared.first_text, compared.second_text), strict=True)
        )
        lines += [f"they differ from token {num_tokens} on:", *shown]
    lines += [f"{num_blocks} blocks of {compared.block_size} tokens have one name in both"]
    lines += [f"  {row.tier}{row.node_id and f' of {row.node_id}'}: {_ranges(row.places)}" for row in compared.held]
    lines += ["  no tier holds any of them now"] if num_blocks and not compared.held else []
    return "\n".join([*lines, *(f"problem: {one}, and may hold more" for one in compared.problems)])


def _ranges(places: Sequence[int]) -> str:
    """Renders numbers, consecutive numbers as ranges."""
    nth = count()
    runs = (list(run) for _, run in groupby(sorted(places), key=lambda place: place - next(nth)))
    return "blocks " + ", ".join(f"{run[0]} to {run[-1]}" if len(run) > 1 else f"{run[0]}" for run in runs)


def render_misses(explained: cluster_pb2.MissExplanation) -> str:
    """Renders the causes of a request's uncached blocks."""
    ended = explained.request
    num_cached = sum(one.tokens for one in ended.cached_tokens)
    runs = [f"  {words_of(one)}" for one in misses_from_pb(ended.misses)]
    head = f"{ended.request_id}: {num_cached} of {ended.prompt_tokens} prompt tokens cached"
    lines = runs or ["  no uncached block has a cause: all were found, or it reached no worker"]
    return "\n".join([head, *lines, *(f"problem: {one}, and may hold it" for one in explained.problems)])
