"""`baton logs`: shows the log files of a cluster."""

import argparse
from collections.abc import Iterator
from pathlib import Path

from cli.terminal import MAX_ECHO_CHARS, Subparsers, add_command, escaped, read_count, repeat
from deploy.local.client import known_cluster
from deploy.local.log_files import LogReader, find_logs
from wire.errors import WorkerNotFound

DESCRIPTION = """\
Shows the last lines that the processes of a cluster on this machine have logged, also of one that has crashed. WORKER
is the name of a process: prefill-0, router, controller, gateway-0; ray and redis, where they are the cluster's own.
Of a Ray that the cluster has joined, this machine's processes are shown while one of them lives.
Without it all processes follow one another, and a line begins with its process. Control characters are escaped."""
NUM_LINES = 20
MAX_NAMED = 12
POLL_S = 0.25


def add_parser(commands: Subparsers) -> None:
    parser = add_command(commands, "logs", "show what the processes of a cluster log", DESCRIPTION, run)
    parser.add_argument("worker", nargs="?", type=str, metavar="WORKER", help="one process (default: all)")
    parser.add_argument("--follow", action="store_true", help="go on with lines as they come, until Ctrl-C")
    told = f"of each process, to begin with (default: {NUM_LINES})"
    parser.add_argument("--lines", type=read_count, default=NUM_LINES, metavar="N", help=told)


def run(args: argparse.Namespace) -> int:
    state = known_cluster(args.name)
    folder = Path(state.run_dir)
    known = list(find_logs(folder))
    if args.worker not in (None, *known):
        names = ", ".join(known[:MAX_NAMED]) + (", ..." if len(known) > MAX_NAMED else "")
        raise WorkerNotFound(f"{args.worker[:MAX_ECHO_CHARS]!r} has no log here: there are {names or 'none'}")
    readers: dict[Path, LogReader] = {}

    def show() -> bool:
        for line in _new_lines(folder, args, readers):
            print(escaped(line), flush=args.follow)
        return bool(args.follow and folder.exists())

    return repeat(show, POLL_S)


def _new_lines(folder: Path, args: argparse.Namespace, readers: dict[Path, LogReader]) -> Iterator[str]:
    """Yields the lines since the last call; for a process seen for the first time, its last `args.lines` lines."""
    for name, path in find_logs(folder).items():
        if args.worker in (None, name):
            if path not in readers:
                readers[path] = LogReader(path, args.lines)
            yield from (line if args.worker else f"{name} | {line}" for line in readers[path].new())
