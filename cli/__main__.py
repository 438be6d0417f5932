"""The command line: `baton COMMAND`. Each command has a module; none imports torch or ray at its start."""

import argparse
import importlib
import os
import signal
import sys
from collections.abc import Sequence
from contextlib import suppress

from cli.terminal import Parser
from wire.errors import BatonError

COMMANDS = {
    "pull": "cli.size.pull",
    "up": "cli.up",
    "generate": "cli.generate",
    "chat": "cli.chat",
    "status": "cli.status",
    "logs": "cli.logs",
    "scale": "cli.operate.scale",
    "drain": "cli.operate.drain",
    "roll": "cli.operate.roll",
    "requests": "cli.requests",
    "abort": "cli.requests",
    "why": "cli.requests",
    "cache": "cli.operate.cache",
    "down": "cli.down",
    "models": "cli.models",
    "size": "cli.size.size",
    "bench": "cli.bench.bench",
    "plan": "cli.bench.plan.plan",
    "doctor": "cli.doctor",
    "key": "cli.key",
    "usage": "cli.operate.usage",
}
"""The module of each command."""
FAILED = 1
INTERRUPTED = 130


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command; returns 0 if done, 1 failed, 2 wrong usage, 78 wrong configuration, 130 interrupted."""
    _open_closed_streams()
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, _leave)
    code, failure = FAILED, None
    try:
        code = _run(arguments)
    except OSError as error:
        failure = error
    if (failure := _flush() or failure) is None:
        return code
    _tell(failure)
    _flush()
    return FAILED


def make_parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="baton",
        description="Serve a language model with prefill and decode on separate pools of workers.",
        epilog='Begin with `baton up`, then `baton generate "Once upon a time"`; `baton down` ends it.',
    )
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for module in dict.fromkeys(COMMANDS.values()):  # not before: an interrupted import is an interrupted command
        importlib.import_module(module).add_parser(commands)
    return parser


def _run(arguments: Sequence[str] | None) -> int:
    try:
        parsed = make_parser().parse_args(arguments)
        code: int = parsed.run(parsed)
        return code
    except BatonError as error:
        ids = ", ".join(f"{name} {value}" for name, value in error.ids.items() if name != "param")
        print(f"baton: {error.message}{f' ({ids})' if ids else ''}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:  # `up` and `down` have their own way with signals
        return INTERRUPTED
    except SystemExit as end:  # argparse has said why
        return int(end.code or 0)


def _leave(*_: object) -> None:
    """Ends a command that has nothing to undo. An exception at the start of a call would keep its channel open."""
    os._exit(INTERRUPTED)


def _tell(failure: OSError) -> None:
    """Reports a failed file or stream, if stderr takes it; not a broken pipe, whose reader knows."""
    with suppress(OSError):
        if not isinstance(failure, BrokenPipeError):
            print(f"baton: {failure.filename or 'the output'}: {failure.strerror or failure}", file=sys.stderr)


def _open_closed_streams() -> None:
    """Replaces each closed standard stream by /dev/null, read-only: else a file or socket would get its number."""
    for name in ("stdin", "stdout", "stderr"):
        if getattr(sys, name) is None:
            number = os.open(os.devnull, os.O_RDONLY)
            setattr(sys, name, os.fdopen(number, "r" if name == "stdin" else "w", closefd=False))


def _flush() -> OSError | None:
    """Flushes the streams, and discards what they do not take; returns the last error."""
    failure: OSError | None = None
    for name, stream in (("stdout", sys.stdout), ("stderr", sys.stderr)):
        try:
            stream.flush()
        except OSError as error:
            failure = error
            failure.filename = name
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())  # the interpreter flushes once more
    return failure


if __name__ == "__main__":
    sys.exit(main())
