"""`baton generate`: one request, streamed."""

import argparse
import asyncio
import json
import sys
from dataclasses import asdict
from typing import Any, cast

from google.protobuf.json_format import MessageToDict

from baton import AsyncClient, Completion
from baton.request import Options, Prompt, make_request
from baton.results import Choice
from deploy.cli.command import Subparsers, add_command
from deploy.cli.timeline_view import render_timeline
from deploy.local.client import explained, find_cluster
from deploy.local.state import ClusterState
from wire.convert import logprobs_to_pb
from wire.errors import InvalidRequest
from wire.tier import Tier

DESCRIPTION = """\
Sends one prompt and streams the answer to stdout; then, to stderr, where its time went: which worker did what, and
from which tier blocks of KV came. Greedy (temperature 0) unless told otherwise."""
NO_TIMEOUT_S = 86400.0
"""More than any cluster lets a request take."""
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
    prompt, options = read_prompt(args), read_options(args)
    make_request(prompt, options)  # what no message can hold is told before a cluster is looked for
    state = find_cluster(args.name)
    with explained(state):
        completion = asyncio.run(_generate(state, prompt, options, not args.json and (args.n or 1) == 1))
    if args.json:
        print(json.dumps(to_object(completion)))
        return 0
    _print_choices(completion)
    print("\n" + render_timeline(completion), file=sys.stderr)
    return 0


def read_prompt(args: argparse.Namespace) -> Prompt:
    """Raises InvalidRequest unless there is exactly one prompt."""
    if (args.prompt is None) == (args.token_ids is None):
        raise InvalidRequest("prompt", "give either a text (or - for stdin) or --token-ids")
    if args.prompt is not None:
        text: str = sys.stdin.read() if args.prompt == "-" else args.prompt
        return text
    parts = args.token_ids.replace(",", " ").split()
    if not all(part.isdecimal() and int(part) < 1 << 32 for part in parts):
        raise InvalidRequest("token_ids", "must be whole numbers with commas between them")
    return [int(part) for part in parts]


def read_options(args: argparse.Namespace) -> Options:
    """Takes the given flags, and greedy sampling unless told otherwise. The server checks their ranges."""
    given = {name: getattr(args, name) for name in SCALARS if getattr(args, name) is not None}
    timeout_s = NO_TIMEOUT_S if args.timeout is None else args.timeout
    eos = {"ignore_eos": True} if args.ignore_eos else {}
    return cast(Options, {"temperature": 0.0, **given, **eos, "stop": args.stop, "timeout_s": timeout_s})


async def _generate(state: ClusterState, prompt: Prompt, options: Options, is_shown: bool) -> Completion:
    async with AsyncClient(state.address) as client, client.stream(prompt, **options) as stream:
        async for chunk in stream:
            if is_shown and chunk.index == 0:
                print(chunk.text, end="", flush=True)
        return stream.completion


def _print_choices(completion: Completion) -> None:
    """Prints several answers one after another, at the end; a single answer is on the screen already."""
    if len(completion.choices) == 1:
        print()
        return
    for choice in completion.choices:
        print(f"[{choice.index}] {choice.text}")


def to_object(completion: Completion) -> dict[str, Any]:
    """Returns the object that `--json` prints: choice 0 stands at the top too."""
    choices = [_choice(choice) for choice in completion.choices]
    usage, timeline = completion.usage, completion.timeline
    return {
        "request_id": completion.request_id,
        **{name: choices[0][name] for name in ("text", "token_ids", "finish_reason")},
        "choices": choices,
        "usage": {
            "prompt_tokens": usage.prompt_tokens,
            "completion_tokens": usage.completion_tokens,
            "cached_tokens": {tier.value: usage.cached_tokens.get(tier, 0) for tier in Tier},
        },
        "seed": completion.seed,
        "workers": {"prefill": timeline.prefill_worker, "decode": timeline.decode_worker},
        "timeline": {"total_ms": timeline.total_ms, "spans": [asdict(span) for span in timeline.spans]},
    }


def _choice(choice: Choice) -> dict[str, Any]:
    logprobs = logprobs_to_pb(choice.token_ids, choice.logprobs) if choice.logprobs else []
    described = {
        "index": choice.index,
        "text": choice.text,
        "token_ids": choice.token_ids,
        "finish_reason": choice.finish_reason and choice.finish_reason.value,
        "matched_stop": choice.matched_stop,
    }
    if logprobs:
        described["logprobs"] = [MessageToDict(one, preserving_proto_field_name=True) for one in logprobs]
    return described
