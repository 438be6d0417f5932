"""`baton up`: starts a cluster, and returns when it serves."""

import argparse
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from deploy.cli.command import Subparsers
from deploy.local.startup import Startup
from deploy.plan.byte_size import format_bytes
from deploy.plan.config import DTYPES, ClusterConfig
from deploy.plan.model import DEMO_MODEL

DESCRIPTION = """\
Starts a cluster on this machine and returns when it serves: Ray (or joins yours), Redis (or uses yours), a router,
and the workers. It goes on running in the background until `baton down`.

Every flag is also a setting of a file given with --config, and wins over it. See deploy/baton.example.toml."""
DEMO_PROMPT = "Pets: Tom dog, Lucy parrot. Question: which pet has Lucy?"
BAR_WIDTH = 30
SLOW_S = 1.0


def _port_or_off(text: str) -> int | str:
    return int(text) if text.isdecimal() else text


@dataclass(frozen=True)
class Flag:
    """A flag that is a setting of the file, too."""

    flag: str
    setting: str
    metavar: str | None
    help: str
    type: Callable[[str], Any] = str
    choices: Sequence[str] | None = None


_MODEL = "checkpoint folder, or OWNER/NAME of one on the Hugging Face hub (default: the demo model)"
_DTYPE = "what it computes in (default: auto, which is float32 on a CPU and the checkpoint's own on a GPU)"
_GRPC = "where clients connect, on 127.0.0.1; 0 is any free port (default: 50051)"
_METRICS = "where Prometheus scrapes, on 127.0.0.1; 0 is any free port, `off` is none (default: 0)"
_REDIS = "a Redis server of yours, `off` for none, or `own` to start one (default: own)"
FLAGS = {
    "model": (
        Flag("--model", "model.path", "PATH_OR_HUB_NAME", _MODEL),
        Flag("--dtype", "model.dtype", None, _DTYPE, choices=DTYPES),
        Flag("--block-size", "model.block_size", "TOKENS", "tokens per block of KV (default: 16)", int),
    ),
    "workers": (
        Flag("--prefill", "pools.prefill", "N", "prefill workers, 0 for none (default: 1)", int),
        Flag("--decode", "pools.decode", "M", "decode workers (default: 1)", int),
        Flag("--pool-bytes", "worker.pool_bytes", "SIZE", "KV pages of each worker, like 512MiB"),
        Flag("--threads", "worker.num_threads", "T", "threads of each worker", int),
        Flag("--gpus", "worker.num_gpus", "SHARE", "share of a GPU for each worker, 0 to 1", float),
    ),
    "services": (
        Flag("--grpc-port", "router.grpc_port", "PORT", _GRPC, int),
        Flag("--metrics-port", "router.metrics_port", "PORT", _METRICS, _port_or_off),
        Flag("--arena-bytes", "arena.size_bytes", "SIZE", "shared memory for KV blocks, like 1GiB"),
        Flag("--redis-url", "redis.url", "URL", _REDIS),
        Flag("--ray-address", "ray.address", "ADDRESS", "a Ray cluster to join (default: start one)"),
    ),
}


def add_parser(commands: Subparsers) -> None:
    parser: argparse.ArgumentParser = commands.add_parser(
        "up",
        help="start a cluster",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        argument_default=argparse.SUPPRESS,
    )
    parser.set_defaults(run=run)
    parser.add_argument("--config", type=Path, metavar="FILE", help="settings in TOML")
    parser.add_argument("--name", help="name of the cluster (default: default)")
    for title, flags in FLAGS.items():
        group = parser.add_argument_group(title)
        for one in flags:
            group.add_argument(
                one.flag, dest=one.setting, metavar=one.metavar, help=one.help, type=one.type, choices=one.choices
            )


def run(args: argparse.Namespace) -> int:
    began_s = time.monotonic()
    given = {name: value for name, value in vars(args).items() if name not in ("run", "config")}
    config = ClusterConfig.load(getattr(args, "config", None), _nested(given))
    signal.signal(signal.SIGTERM, _interrupt)
    state = Startup(config, Console()).run()
    named = "" if config.name == "default" else f" --name {config.name}"
    print(f"\nServing {state.model} at {state.address} after {time.monotonic() - began_s:.1f} s. Now:")
    prompt = DEMO_PROMPT if state.model == DEMO_MODEL else "Once upon a time"
    print(f'  baton generate{named} "{prompt}"\n  baton status{named}\n  baton down{named}')
    return 0


def _nested(flat: dict[str, Any]) -> dict[str, Any]:
    """Turns `{"a.b": 1}` into `{"a": {"b": 1}}`."""
    nested: dict[str, Any] = {}
    for name, value in flat.items():
        table, _, key = name.rpartition(".")
        (nested.setdefault(table, {}) if table else nested)[key] = value
    return nested


def _interrupt(_number: int, _frame: FrameType | None) -> None:
    """Ends the command at SIGTERM as Ctrl-C does, with a clean-up of half-done work."""
    raise KeyboardInterrupt


class Console:
    """A Reporter that prints. It draws a bar on a terminal only, and only if that takes a second or more."""

    def __init__(self) -> None:
        self._first_progress_s: float | None = None
        self._is_drawing = False

    def tell(self, part: str, text: str) -> None:
        print(f"{part:<8} {text}", flush=True)

    def show_progress(self, part: str, done_bytes: int, total_bytes: int) -> None:
        if not done_bytes:
            return
        now_s = time.monotonic()
        self._first_progress_s = self._first_progress_s or now_s
        is_done = done_bytes >= total_bytes
        if not sys.stderr.isatty() or now_s - self._first_progress_s < SLOW_S or (is_done and not self._is_drawing):
            return
        self._is_drawing = not is_done
        bar = "#" * min(BAR_WIDTH, BAR_WIDTH * done_bytes // total_bytes)
        end = "\n" if is_done else ""
        print(f"\r{part:<8} [{bar:<{BAR_WIDTH}}] {format_bytes(done_bytes)} ", end=end, file=sys.stderr, flush=True)
