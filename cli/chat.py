"""`baton chat`: a conversation in the terminal."""

import argparse
import sys
from typing import cast

from baton import Client
from baton.request import Message, Options
from cli.generate import read_stdin, read_timeout
from cli.terminal import Subparsers, add_command
from deploy.local.client import explained, find_cluster
from deploy.plan.model import DEMO_MODEL
from wire.errors import BatonError
from wire.rpc import MAX_MESSAGE_BYTES

DESCRIPTION = """\
Talks to the model, a line at a time, through its chat template; each answer is streamed, and the whole conversation is
the next prompt, of which all but the new line is a hit. Ends with an empty line or the end of stdin. Through a pipe
each line of stdin is a turn, stdout has the answers alone, and the first failure ends it."""
TIMEOUT_S = 600.0
_OF_DEMO = """\
This is the demo model. It answers from facts in what you say, like: Ages: Ben 30, Anna 41. Question: how old is Anna?
For a model that knows the world: `baton down`, then `baton up --model smollm2`."""


def add_parser(commands: Subparsers) -> None:
    parser = add_command(commands, "chat", "talk to the model", DESCRIPTION, run)
    parser.add_argument("--system", type=str, metavar="TEXT", help="instructions that go before the conversation")
    parser.add_argument("--temperature", type=float, metavar="T", help="0 to 2; 0 is greedy (default: the model's own)")
    parser.add_argument("--max-tokens", type=int, metavar="N", help="of each answer (default: 256, or what fits)")
    parser.add_argument("--timeout", type=read_timeout, metavar="SECONDS", default=TIMEOUT_S, help="of each answer")


def run(args: argparse.Namespace) -> int:
    state = find_cluster(args.name)
    given = {name: getattr(args, name) for name in ("temperature", "max_tokens") if getattr(args, name) is not None}
    options = cast(Options, {**given, "timeout_s": args.timeout})
    messages: list[Message] = [{"role": "system", "content": args.system}] if args.system else []
    if state.model == DEMO_MODEL and sys.stdin.isatty():
        print(_OF_DEMO, file=sys.stderr)
    with explained(state), Client(state.addresses.local) as client:
        while said := _ask():
            messages.append({"role": "user", "content": said})
            try:
                messages.append({"role": "assistant", "content": _answer(client, messages, options)})
            except BatonError as error:
                if len(messages) == 1 or not sys.stdin.isatty():
                    raise
                print(f"baton: {error.message}", file=sys.stderr)
                messages.pop()
    return 0


def _ask() -> str:
    """Reads a line; shows a prompt for it on a terminal only. Raises the InvalidRequest of `read_stdin`."""
    if sys.stdin.isatty():
        print("> ", end="", flush=True)
    return read_stdin(lambda stdin: stdin.readline(MAX_MESSAGE_BYTES + 1)).strip()


def _answer(client: Client, messages: list[Message], options: Options) -> str:
    with client.stream(messages, **options) as stream:
        for chunk in stream:
            print(chunk.text, end="", flush=True)
        print()
        return stream.completion.text
