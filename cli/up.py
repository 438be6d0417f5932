"""`baton up`: starts a cluster, and returns when it serves."""

import argparse
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from cli.status import memory_lines
from cli.terminal import Parser, Subparsers, read_whole
from deploy.deadlines import STATUS_IN_COMMAND_S
from deploy.local.client import call_operator
from deploy.local.startup import Startup
from deploy.local.state import ClusterState, command_line
from deploy.plan.byte_size import format_bytes
from deploy.plan.config import ClusterConfig
from deploy.plan.model import DEMO_MODEL
from deploy.plan.rules import DTYPES, EXACT, WEIGHTS
from router.config import METRICS_COMPAT, Disaggregation
from wire.errors import BatonError, ConfigError
from wire.layout import KV_DTYPES
from wire.pb import cluster_pb2
from worker.config import PROPOSERS

DESCRIPTION = """\
Starts a cluster on this machine and returns when it serves: Ray (or joins yours), Redis (or uses yours), a router,
and the workers. It goes on running in the background until `baton down`.

Every flag is also a setting of a file given with --config, and wins over it. See deploy/baton.example.toml."""
DEMO_PROMPT = "Pets: Tom dog, Lucy parrot. Question: which pet has Lucy?"
BAR_WIDTH = 30
SLOW_S = 1.0


def _port_or_off(text: str) -> int | str:
    return read_whole(text) if text[:1].isdigit() else text


FLAGS: dict[str, dict[str, tuple[str, str | None, Callable[[str], Any], str]]] = {
    "model": {
        "--model": (
            "model.path",
            "PATH_OR_NAME",
            str,
            "checkpoint folder, GGUF file, name of `baton pull`, or OWNER/NAME on the hub (default: the demo model)",
        ),
        "--served-model-name": (
            "model.served_name",
            "NAME",
            str,
            "what clients call it; several names are names of one model (default: the folder's name)",
        ),
        "--dtype": ("model.dtype", None, str, "what it computes in (default: auto, which is the checkpoint's own)"),
        "--weights": (
            "model.weights",
            None,
            str,
            "auto, in that dtype; on a CPU also int8 or int4: half of it or less, faster, less exact (default: auto)",
        ),
        "--exact": (
            "model.exact",
            None,
            str,
            "on: on a GPU no token depends on other requests, as on a CPU; off: by the library's products"
            " (default: auto, on where a device has timed that it costs little: plain weights of 16 bits on a Hopper)",
        ),
        "--kv-dtype": (
            "model.kv_dtype",
            None,
            str,
            "what KV is kept in: auto, as it computes, or less exact in int8 or fp8, half of it, or int4"
            " (default: auto)",
        ),
        "--kv-policy": (
            "model.kv_policy",
            "POLICY",
            str,
            "what of its KV a sequence keeps: full, or sinks=4+1020, its first and latest tokens (default: full)",
        ),
        "--block-size": ("model.block_size", "TOKENS", int, "tokens per block of KV (default: 16)"),
    },
    "workers": {
        "--speculate": (
            "speculation.proposer",
            None,
            str,
            "ngram: guess next tokens by what followed the same ones before; no token changes (default: off)",
        ),
        "--draft": (
            "speculation.draft",
            "PATH_OR_HUB_NAME",
            str,
            "guess next tokens by a smaller model of the same vocabulary; no token changes (default: none)",
        ),
        "--prefill": ("pools.prefill", "N", int, "prefill workers, 0 for none (default: 1)"),
        "--decode": ("pools.decode", "M", int, "decode workers (default: 1)"),
        "--pool-bytes": ("worker.pool_bytes", "SIZE", str, "KV pages of each worker, like 512MiB"),
        "--threads": ("worker.num_threads", "T", int, "threads of each worker"),
        "--gpus": ("worker.num_gpus", "SHARE", float, "share of a GPU for each worker, 0 to 1"),
    },
    "services": {
        "--host": (
            "router.host",
            "ADDRESS",
            str,
            "the address of the ports for clients; another one wants keys and TLS, or --insecure (default: 127.0.0.1)",
        ),
        "--tls-cert": (
            "tls.certificate",
            "FILE",
            str,
            "certificate chain of the ports for clients, as PEM; read again when it changes (default: no TLS)",
        ),
        "--tls-key": ("tls.key", "FILE", str, "the key of that certificate, as PEM"),
        "--tls-client-ca": (
            "tls.client_ca",
            "FILE",
            str,
            "authority of a certificate that each client must show, as PEM (default: none)",
        ),
        "--grpc-port": ("router.grpc_port", "PORT", int, "where clients connect; 0 is any free port (default: 50051)"),
        "--http-port": (
            "http.port",
            "PORT",
            _port_or_off,
            "where clients of OpenAI's HTTP connect; 0 is any free port, `off` is none (default: 8000)",
        ),
        "--host-names": (
            "http.host_names",
            "NAME",
            str,
            "names by which requests may ask for the HTTP port on 127.0.0.1, as host.docker.internal (default: none)",
        ),
        "--cors-origins": (
            "http.cors_origins",
            "ORIGIN",
            str,
            "origins whose pages may use the model, like https://a.example; * where calls need a key (default: none)",
        ),
        "--gateways": (
            "http.gateways",
            "N",
            int,
            "processes that serve the HTTP port together, each on about a core under load (default: 1)",
        ),
        "--metrics-port": (
            "router.metrics_port",
            "PORT",
            _port_or_off,
            "where Prometheus scrapes; 0 is any free port, `off` is none (default: 0)",
        ),
        "--disaggregation": (
            "router.disaggregation",
            None,
            str,
            "whether prompts go to the prefill pool: always, never, or conditional, where it costs less (the default)",
        ),
        "--metrics-compat": (
            "router.metrics_compat",
            None,
            str,
            "vllm: export metrics under vLLM's names, too (default: off)",
        ),
        "--arena-bytes": ("arena.size_bytes", "SIZE", str, "shared memory for KV blocks, like 1GiB"),
        "--redis-url": (
            "redis.url",
            "URL",
            str,
            "a Redis server of yours, `off` for none, or `own` to start one (default: own)",
        ),
        "--files-folder": (
            "files.folder",
            "PATH",
            str,
            "a folder for KV blocks, which outlives the cluster (default: none)",
        ),
        "--ray-address": ("ray.address", "ADDRESS", str, "a Ray cluster to join (default: start one)"),
    },
}
"""Flags by group, each with its setting in the file and its value."""
OTHERS = {
    "--allowed-origins": "--cors-origins",
    "--api-key": "`baton key create`",
    "--gpu-memory-utilization": "--pool-bytes",
    "--kv-cache-dtype": "--kv-dtype",
    "--otlp-traces-endpoint": "endpoint of a file's [traces]",
    "--max-num-seqs": "max_running of a file's [batch]",
    "--max-num-batched-tokens": "max_step_tokens of a file's [batch]",
    "--port": "--http-port",
    "--ssl-certfile": "--tls-cert",
    "--ssl-keyfile": "--tls-key",
}
"""Flags of other servers, and ours in their place."""
CHOICES = {
    "model.dtype": DTYPES,
    "model.weights": WEIGHTS,
    "model.exact": EXACT,
    "model.kv_dtype": KV_DTYPES,
    "speculation.proposer": PROPOSERS,
    "router.disaggregation": tuple(Disaggregation),
    "router.metrics_compat": ("off", *METRICS_COMPAT),
}


def add_parser(commands: Subparsers) -> None:
    parser = add_settings_parser(commands, "up", "start a cluster", DESCRIPTION)
    parser.set_defaults(run=run)
    parser.add_argument(
        "--insecure",
        action="store_true",
        help="allow settings that leave a port open to strangers: see docs/security.md",
    )


def add_settings_parser(commands: Subparsers, name: str, summary: str, description: str) -> Parser:
    """Adds a command that takes a cluster's settings, from a file and by flags."""
    parser: Parser = commands.add_parser(
        name,
        help=summary,
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        argument_default=argparse.SUPPRESS,
    )
    parser.others = OTHERS
    parser.add_argument("--config", type=Path, metavar="FILE", help="settings in TOML")
    parser.add_argument("--name", help="name of the cluster (default: default)")
    add_flags(parser)
    return parser


def add_flags(parser: Parser) -> None:
    """Adds the flags of settings; each is given under the setting's name."""
    for title, flags in FLAGS.items():
        group = parser.add_argument_group(title)
        for flag, (setting, metavar, kind, text) in flags.items():
            choices = CHOICES.get(setting)
            nargs = "+" if setting in ("model.served_name", "http.host_names", "http.cors_origins") else None
            group.add_argument(flag, dest=setting, metavar=metavar, type=kind, choices=choices, nargs=nargs, help=text)
        if title == "services":
            help_text = "start no HTTP gateway: gRPC only"
            group.add_argument("--no-http", dest="http.port", action="store_const", const="off", help=help_text)


def run(args: argparse.Namespace) -> int:
    console = Console()
    with by_flags(args) as given:
        config = ClusterConfig.load(getattr(args, "config", None), given)
        Startup(config, console).run()
    return 0


@contextmanager
def by_flags(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yields the settings that flags give, as nested tables. A ConfigError names flags in place of their settings."""
    given = {name: value for name, value in vars(args).items() if name not in ("run", "config")}
    try:
        yield _nested(given)
    except ConfigError as error:
        raise ConfigError(_by_flag(error.message, given), **error.ids) from error


def _by_flag(message: str, given: Mapping[str, Any]) -> str:
    """Replaces the names of settings by the flags that gave them."""
    for flag, (setting, *_) in (one for flags in FLAGS.values() for one in flags.items()):
        if setting in given:
            message = re.sub(rf"(?<!\S){re.escape(setting)}(?![\w.])", flag, message)
    return message


def _nested(flat: dict[str, Any]) -> dict[str, Any]:
    nested: dict[str, Any] = {}
    for name, value in flat.items():
        table, _, key = name.rpartition(".")
        (nested.setdefault(table, {}) if table else nested)[key] = value
    return nested


class Console:
    """A Reporter that prints. It draws a bar on a terminal, for waits of a second or more."""

    def __init__(self) -> None:
        self._began_s = time.monotonic()
        self._first_progress_s: float | None = None
        self._is_drawing = False
        self._warmed = set[str]()

    def tell(self, part: str, text: str) -> None:
        print(f"{part:<8} {text}", flush=True)

    def tell_served(self, state: ClusterState) -> None:
        took_s = time.monotonic() - self._began_s
        self._tell_memory(state)
        prompt = DEMO_PROMPT if state.model == DEMO_MODEL else "Once upon a time"
        generate, status, down = (command_line(verb, state.name) for verb in ("generate", "status", "down"))
        http = f", and at {state.http_url} in OpenAI's dialect," if state.http_url else ""
        print(f"\nServing {state.model} at {state.addresses.public}{http} after {took_s:.1f} s. Now:")
        chat = f"  {command_line('chat', state.name)}\n" if state.model != DEMO_MODEL else ""
        print(f'{chat}  {generate} "{prompt}"\n  {status}\n  {down}', flush=True)

    def _tell_memory(self, state: ClusterState) -> None:
        """Prints load time and memory of each worker, and memory of each node. Ignores failures: the cluster serves."""
        try:
            status = call_operator(state, "GetStatus", cluster_pb2.GetStatusRequest(), STATUS_IN_COMMAND_S)
        except BatonError as error:
            self.tell("memory", f"not known: {error.message}")
            return
        for line in memory_lines(status.workers):
            self.tell("memory", line)

    def show_warming(self, worker_to_text: Mapping[str, str]) -> None:
        """Redraws a line on a terminal; elsewhere prints the first text of each part of each worker."""
        for worker, text in worker_to_text.items():
            part = f"{worker} {text.partition(' ')[0]}"
            if text and part not in self._warmed and not sys.stderr.isatty():
                self.tell("warm", f"{worker}: {text}")
            self._warmed.add(part)
        if worker_to_text and sys.stderr.isatty():
            told = ", ".join(f"{worker}: {text}" for worker, text in sorted(worker_to_text.items()))
            print(f"\r{'warm':<8} {told}\x1b[K", end="", file=sys.stderr, flush=True)
        elif self._warmed and sys.stderr.isatty():
            print(file=sys.stderr)
            self._warmed.clear()

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
