"""`baton up`: starts a cluster, and returns when it serves."""

import argparse
import signal
import sys
import time
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
    _add_model(parser.add_argument_group("model"))
    _add_workers(parser.add_argument_group("workers"))
    _add_services(parser.add_argument_group("services"))


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


def _add_model(group: Any) -> None:
    group.add_argument(
        "--model",
        dest="model.path",
        metavar="PATH_OR_HUB_NAME",
        help="checkpoint folder, or OWNER/NAME of one on the Hugging Face hub (default: the demo model)",
    )
    group.add_argument(
        "--dtype",
        dest="model.dtype",
        choices=DTYPES,
        help="what it computes in (default: auto, which is float32 on a CPU and the checkpoint's own on a GPU)",
    )
    group.add_argument(
        "--block-size", dest="model.block_size", type=int, metavar="TOKENS", help="tokens per block of KV (default: 16)"
    )


def _add_workers(group: Any) -> None:
    group.add_argument(
        "--prefill", dest="pools.prefill", type=int, metavar="N", help="prefill workers, 0 for none (default: 1)"
    )
    group.add_argument("--decode", dest="pools.decode", type=int, metavar="M", help="decode workers (default: 1)")
    group.add_argument(
        "--pool-bytes", dest="worker.pool_bytes", metavar="SIZE", help="KV pages of each worker, like 512MiB"
    )
    group.add_argument("--threads", dest="worker.num_threads", type=int, metavar="T", help="threads of each worker")
    group.add_argument(
        "--gpus", dest="worker.num_gpus", type=float, metavar="SHARE", help="share of a GPU for each worker, 0 to 1"
    )


def _add_services(group: Any) -> None:
    group.add_argument(
        "--grpc-port",
        dest="router.grpc_port",
        type=int,
        metavar="PORT",
        help="where clients connect, on 127.0.0.1; 0 is any free port (default: 50051)",
    )
    group.add_argument(
        "--metrics-port",
        dest="router.metrics_port",
        type=_port_or_off,
        metavar="PORT",
        help="where Prometheus scrapes, on 127.0.0.1; 0 is any free port, `off` is none (default: 0)",
    )
    group.add_argument(
        "--arena-bytes", dest="arena.size_bytes", metavar="SIZE", help="shared memory for KV blocks, like 1GiB"
    )
    group.add_argument(
        "--redis-url",
        dest="redis.url",
        metavar="URL",
        help="a Redis server of yours, `off` for none, or `own` to start one (default: own)",
    )
    group.add_argument(
        "--ray-address", dest="ray.address", metavar="ADDRESS", help="a Ray cluster to join (default: start one)"
    )


def _port_or_off(text: str) -> int | str:
    return int(text) if text.isdecimal() else text


def _nested(flat: dict[str, Any]) -> dict[str, Any]:
    """`{"a.b": 1}` as `{"a": {"b": 1}}`."""
    nested: dict[str, Any] = {}
    for name, value in flat.items():
        table, _, key = name.rpartition(".")
        (nested.setdefault(table, {}) if table else nested)[key] = value
    return nested


def _interrupt(_number: int, _frame: FrameType | None) -> None:
    """SIGTERM ends this as Ctrl-C does: what is half done is cleaned up."""
    raise KeyboardInterrupt


class Console:
    """A Reporter that prints. A bar is drawn on a terminal only, and only where there is time to look at it."""

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
