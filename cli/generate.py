"""`baton generate`: one request, streamed."""

import argparse
import json
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict
from functools import partial
from typing import Any, BinaryIO, cast

from google.protobuf.json_format import MessageToDict

from baton import Client, Completion
from baton.request import Options, Prompt, make_request
from baton.results import Choice, Span
from cli.terminal import Subparsers, add_command, read_number, read_whole, render
from deploy.local.client import explained, find_cluster
from deploy.local.state import ClusterState
from deploy.plan.byte_size import format_bytes
from wire.convert import logprobs_to_pb
from wire.errors import InvalidRequest
from wire.journal import GATES, Kind
from wire.pb import inference_pb2 as pb
from wire.rpc import MAX_MESSAGE_BYTES
from wire.sampling import MAX_STOPS
from wire.tier import Tier

DESCRIPTION = """\
Sends one prompt and streams the answer to stdout; then, to stderr, where its time went: which worker did what, and
from which tier blocks of KV came. What no flag says is as the model's authors advise."""
NO_TIMEOUT_S = 86400.0
"""A timeout beyond any cluster's limit."""
MIN_WAIT_MS = 1.0
TOO_LONG = f"longer than {format_bytes(MAX_MESSAGE_BYTES)}, the most that a request may have"
_read_seed = partial(read_whole, num_bits=64)
SCALARS: dict[str, tuple[Callable[[str], Any], str, str]] = {
    "max_tokens": (int, "N", "tokens to generate at most (default: 256, or what fits)"),
    "min_tokens": (int, "N", "tokens to generate at least"),
    "temperature": (float, "T", "0 to 2; 0 is greedy (default: the model's own)"),
    "top_p": (float, "P", "sample from the likeliest tokens that make up this share, 0 to 1"),
    "top_k": (int, "K", "sample from the K likeliest tokens"),
    "min_p": (float, "P", "leave out tokens less likely than this share of the likeliest"),
    "seed": (_read_seed, "SEED", "the same seed gives the same tokens (default: drawn, and shown with --json)"),
    "n": (int, "N", "independent answers, 1 to 16"),
    "presence_penalty": (float, "X", "-2 to 2"),
    "frequency_penalty": (float, "X", "-2 to 2"),
    "repetition_penalty": (float, "X", "above 0 to 10; 1 is none"),
    "logprobs": (int, "K", "log-probabilities of each token and of the K likeliest, with --json"),
}


def add_parser(commands: Subparsers) -> None:
    parser = add_command(commands, "generate", "send a prompt and stream the answer", DESCRIPTION, run)
    parser.add_argument("prompt", type=str, nargs="?", help="text; - reads it from stdin")
    parser.add_argument("--token-ids", type=str, metavar="1,2,3", help="a prompt of token ids instead of text")
    parser.add_argument("--json", action="store_true", help="print one object when the answer is complete, for scripts")
    parser.add_argument("--timeout", type=read_timeout, metavar="SECONDS", help="give up after so long")
    group = parser.add_argument_group("sampling")
    for name, (kind, metavar, text) in SCALARS.items():
        group.add_argument(f"--{name.replace('_', '-')}", type=kind, metavar=metavar, help=text)
    stop = f"end before this text; up to {MAX_STOPS}"
    group.add_argument("--stop", type=str, action="append", default=[], metavar="TEXT", help=stop)
    group.add_argument("--ignore-eos", action="store_true", help="go on after the end-of-sequence token")


def run(args: argparse.Namespace) -> int:
    prompt, options = read_prompt(args), read_options(args)
    # A request that no message can hold is refused before a cluster is looked for.
    if make_request(prompt, options).ByteSize() > MAX_MESSAGE_BYTES:
        raise InvalidRequest("prompt", TOO_LONG)
    state = find_cluster(args.name)
    with explained(state):
        completion = _generate(state, prompt, options, not args.json and (args.n or 1) == 1)
    if args.json:
        print(json.dumps(to_object(completion)))
        return 0
    if len(completion.choices) == 1:  # it is on the screen already
        print()
    else:
        print(*(f"[{choice.index}] {choice.text}" for choice in completion.choices), sep="\n")
    print("\n" + render_timeline(completion), file=sys.stderr)
    return 0


def read_prompt(args: argparse.Namespace) -> Prompt:
    """Reads the prompt of the arguments. Raises InvalidRequest unless there is exactly one."""
    if (args.prompt is None) == (args.token_ids is None):
        raise InvalidRequest("prompt", "give either a text (or - for stdin) or --token-ids")
    if args.prompt is not None:
        return read_stdin(lambda stdin: stdin.read(MAX_MESSAGE_BYTES + 1)) if args.prompt == "-" else str(args.prompt)
    parts = args.token_ids.replace(",", " ").split()
    if not all(part.isascii() and part.isdecimal() and len(part) <= 10 and int(part) < 1 << 32 for part in parts):
        raise InvalidRequest("token_ids", "must be whole numbers with commas between them")
    return [int(part) for part in parts]


def read_stdin(read: Callable[[BinaryIO], bytes]) -> str:
    """Returns the text that `read` reads from stdin. Raises InvalidRequest if it is too long, or not UTF-8."""
    try:
        data = read(sys.stdin.buffer) if sys.stdin else b""  # a closed one is None
        if len(data) > MAX_MESSAGE_BYTES:
            raise InvalidRequest("prompt", TOO_LONG)
        return data.decode()
    except UnicodeDecodeError as error:
        raise InvalidRequest("prompt", "stdin must be UTF-8") from error
    except OSError as error:
        raise InvalidRequest("prompt", "stdin cannot be read") from error


def read_timeout(text: str) -> float:
    """Reads a number of seconds that a request may take. Raises ArgumentTypeError."""
    if 0 < (seconds := read_number(text)) <= NO_TIMEOUT_S:
        return seconds
    raise argparse.ArgumentTypeError(f"must be above 0 and at most {NO_TIMEOUT_S:.0f} seconds, not {seconds:g}")


def read_options(args: argparse.Namespace) -> Options:
    """Takes the given flags as options; the server checks ranges, and the model has defaults for missing options."""
    if len(args.stop) > MAX_STOPS:
        raise InvalidRequest("stop", f"at most {MAX_STOPS} strings")
    given = {name: getattr(args, name) for name in SCALARS if getattr(args, name) is not None}
    timeout_s = NO_TIMEOUT_S if args.timeout is None else args.timeout
    eos = {"ignore_eos": True} if args.ignore_eos else {}
    return cast(Options, {**given, **eos, "stop": args.stop, "timeout_s": timeout_s})


def _generate(state: ClusterState, prompt: Prompt, options: Options, is_shown: bool) -> Completion:
    with Client(state.addresses.local) as client, client.stream(prompt, **options) as stream:
        for chunk in stream:
            if is_shown and chunk.index == 0:
                print(chunk.text, end="", flush=True)
        return stream.completion


def to_object(completion: Completion) -> dict[str, Any]:
    """Returns the object that `--json` prints; its top level repeats choice 0."""
    choices = [_choice(choice) for choice in completion.choices]
    usage, timeline = completion.usage, completion.timeline
    return {
        "request_id": completion.request_id,
        **{name: choices[0][name] for name in ("text", "token_ids", "finish_reason")},
        "choices": choices,
        "usage": asdict(usage) | {"cached_tokens": {tier.value: usage.cached_tokens.get(tier, 0) for tier in Tier}},
        "seed": completion.seed,
        "workers": {"prefill": timeline.prefill_worker, "decode": timeline.decode_worker},
        "timeline": {"total_ms": timeline.total_ms, "spans": [asdict(span) for span in timeline.spans]},
    }


def _choice(choice: Choice) -> dict[str, Any]:
    described = asdict(choice) | {"finish_reason": choice.finish_reason and choice.finish_reason.value}
    del described["logprobs"]
    if choice.logprobs:
        logprobs = logprobs_to_pb(choice.token_ids, choice.logprobs)
        described["logprobs"] = [MessageToDict(one, preserving_proto_field_name=True) for one in logprobs]
    return described


def render_timeline(completion: Completion) -> str:
    """Renders a row for each step, with its time, worker and blocks by tier; then a summary of the request.

    Gates that took no time have no row.
    """
    timeline = completion.timeline
    is_handed_off = timeline.prefill_worker not in (None, timeline.decode_worker)
    between_ms = timeline.total_ms - sum(span.duration_ms for span in timeline.spans if "." in span.name)
    table = render_steps(timeline.spans, {Kind.GENERATE.step: " after the first"} if is_handed_off else {})
    return "\n".join([table, "", _summary(completion, between_ms)])


def render_steps(spans: Iterable[Span | pb.Span], ends: Mapping[str, str]) -> str:
    """Renders a row for each step. ends: text after the counts of a step, by its name."""
    steps = [(span, span.name.partition(".")[2]) for span in spans if "." in span.name]
    rows = [
        (
            f"{span.start_ms:.1f}",
            f"{span.duration_ms:.1f}",
            span.worker,
            step,
            _describe(span.counts) + ends.get(step, ""),
        )
        for span, step in steps
        if span.duration_ms >= MIN_WAIT_MS or span.name not in GATES
    ]
    return render(("at ms", "took ms", "worker", "step", ""), rows)


def _summary(completion: Completion, between_ms: float) -> str:
    usage, timeline = completion.usage, completion.timeline
    num_cached = sum(usage.cached_tokens.values())
    sources = ", ".join(f"{tokens} {tier}" for tier, tokens in usage.cached_tokens.items()) or "none"
    return (
        f"{usage.prompt_tokens} prompt tokens ({num_cached} cached: {sources}), "
        f"{usage.completion_tokens} generated, {timeline.total_ms:.1f} ms "
        f"({max(0.0, between_ms):.1f} ms of it between processes)"
    )


def _describe(counts: Mapping[str, int]) -> str:
    """Names blocks by their tier, without tokens by tier, which say the same."""
    blocks = [f"{_count('blocks', count)} from {tier}" for tier in Tier if (count := counts.get(f"blocks_{tier}"))]
    by_tier = {f"{unit}_{tier}" for unit in ("tokens", "blocks") for tier in Tier}
    return ", ".join(blocks + [_count(name, counts[name]) for name in sorted(counts.keys() - by_tier)])


def _count(name: str, value: int) -> str:
    unit, _, what = name.partition("_")
    return f"{value} {unit.removesuffix('s') if value == 1 else unit} {what}".rstrip()
