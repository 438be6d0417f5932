"""`baton generate`: one request, streamed."""

import argparse
import asyncio
import json
import sys
from typing import Any

from deploy.cli.command import Subparsers, add_command
from deploy.cli.generation import Generation
from deploy.cli.timeline_view import render_timeline
from deploy.local.client import find_cluster, inference
from deploy.local.state import ClusterState
from wire.errors import BatonError, InvalidRequest
from wire.pb import inference_pb2 as pb

DESCRIPTION = """\
Sends one prompt and streams the answer to stdout; then, to stderr, where its time went: which worker did what, and
from which tier blocks of KV came. Greedy (temperature 0) unless told otherwise."""
SCALARS: dict[str, tuple[type, str, str]] = {
    "max_tokens": (int, "N", "tokens to generate at most (default: 256, or what fits)"),
    "min_tokens": (int, "N", "tokens to generate at least"),
    "temperature": (float, "T", "0 to 2; 0 is greedy (default: 0)"),
    "top_p": (float, "P", "sample from the likeliest tokens that make up this share, 0 to 1"),
    "top_k": (int, "K", "sample from the K likeliest tokens"),
    "min_p": (float, "P", "leave out tokens less likely than this share of the likeliest"),
    "seed": (int, "SEED", "the same seed gives the same tokens (default: drawn, and shown with --json)"),
    "n": (int, "N", "independent answers, 1 to 16"),
    "presence_penalty": (float, "X", "-2 to 2"),
    "frequency_penalty": (float, "X", "-2 to 2"),
    "repetition_penalty": (float, "X", "above 0 to 10; 1 is none"),
    "logprobs": (int, "K", "log-probabilities of each token and of the K likeliest, with --json"),
}


def add_parser(commands: Subparsers) -> None:
    parser = add_command(commands, "generate", "send a prompt and stream the answer", DESCRIPTION, run)
    parser.add_argument("prompt", nargs="?", help="text; - reads it from stdin")
    parser.add_argument("--token-ids", metavar="1,2,3", help="a prompt of token ids instead of text")
    parser.add_argument("--json", action="store_true", help="print one object when the answer is complete, for scripts")
    parser.add_argument("--timeout", type=float, metavar="SECONDS", help="give up after so long")
    group = parser.add_argument_group("sampling")
    for name, (kind, metavar, text) in SCALARS.items():
        group.add_argument(f"--{name.replace('_', '-')}", type=kind, metavar=metavar, help=text)
    group.add_argument("--stop", action="append", default=[], metavar="TEXT", help="end before this text; up to 4")
    group.add_argument("--ignore-eos", action="store_true", help="go on after the end-of-sequence token")


def run(args: argparse.Namespace) -> int:
    request = make_request(args)
    state = find_cluster(args.name)
    generation = asyncio.run(_generate(state, request, args))
    complete = generation.complete
    if complete is None:
        raise BatonError("the stream ended before the answer was complete")
    if args.json:
        print(json.dumps(generation.to_object(complete)))
        return 0
    _print_choices(generation, complete)
    print("\n" + render_timeline(complete), file=sys.stderr)
    return 0


def make_request(args: argparse.Namespace) -> pb.GenerateRequest:
    """Makes the request. Raises InvalidRequest unless there is exactly one prompt; the server checks the rest."""
    if (args.prompt is None) == (args.token_ids is None):
        raise InvalidRequest("prompt", "give either a text (or - for stdin) or --token-ids")
    given = {name: getattr(args, name) for name in SCALARS if getattr(args, name) is not None}
    try:
        params = pb.SamplingParams(**{"temperature": 0.0, **given}, stop=args.stop)
    except ValueError as error:
        raise InvalidRequest("sampling", str(error)) from error
    if args.ignore_eos:
        params.ignore_eos = True
    return pb.GenerateRequest(**_prompt(args), sampling_params=params)


def _prompt(args: argparse.Namespace) -> dict[str, Any]:
    if args.token_ids is not None:
        return {"token_ids": pb.TokenIds(ids=_parse_ids(args.token_ids))}
    return {"text": sys.stdin.read() if args.prompt == "-" else args.prompt}


def _parse_ids(text: str) -> list[int]:
    parts = text.replace(",", " ").split()
    if not all(part.isdecimal() and int(part) < 1 << 32 for part in parts):
        raise InvalidRequest("token_ids", "must be whole numbers with commas between them")
    return [int(part) for part in parts]


async def _generate(state: ClusterState, request: pb.GenerateRequest, args: argparse.Namespace) -> Generation:
    generation = Generation()
    is_shown = not args.json and request.sampling_params.n <= 1
    async with inference(state) as stub:
        async for response in stub.Generate(request, timeout=args.timeout):
            text = generation.accept(response)
            if is_shown:
                print(text, end="", flush=True)
    return generation


def _print_choices(generation: Generation, complete: pb.Complete) -> None:
    """Prints several answers one after another, at the end; a single answer is on the screen already."""
    if len(complete.choices) == 1:
        print()
        return
    for choice in complete.choices:
        print(f"[{choice.index}] {generation.text(choice.index)}")
