"""The process that starts Ray, or joins it, and asks it for the controller. `RayHead` talks to it, in JSON lines.

in   a HeadConfig as argument; a ClusterPlan as the first line of stdin; end of file before `ready`: give up
out  {"said": "ray", "address"}, then {"said": "progress", "done_bytes"} now and then, and at last
     {"said": "ready", ...what Controller.start returns} or {"said": "failed", "message"}

A Ray cluster that it has started ends with it, whatever its own end; one that it joined goes on without it.
"""

import json
import logging
import os
import select
import signal
import sys
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from deploy.actors.end_actors import end_actors
from deploy.controller.controller import Controller
from deploy.plan.names import CONTROLLER
from wire.errors import BatonError, ConfigError
from wire.settings import from_json, to_json

OBJECT_STORE_BYTES = 80 << 20
"""About the least that Ray takes: no KV goes through it."""
PROGRESS_EVERY_S = 0.2
ACTORS_NICENESS = "0"
"""Ray's default of 15 would leave the router waiting behind whatever else the machine does."""

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class HeadConfig:
    """`address`: the Ray cluster to join; None starts one, which keeps its files in `temp_dir`."""

    namespace: str
    temp_dir: str
    address: str | None = None

    def to_json(self) -> str:
        return to_json(self)


class Gone(Exception):
    """Whoever asked for the cluster has gone away, or wants it to end."""


def main() -> int:
    logging.basicConfig(level=logging.INFO)
    signal.signal(signal.SIGTERM, _give_up)
    config = from_json(HeadConfig, sys.argv[1], "head")
    line = _Line()
    try:
        line.say("ray", address=_connect(config))
        line.say("ready", **_launch(line))
    except (BatonError, RayError, OSError, RuntimeError, ValueError, Gone) as error:
        log.exception("the cluster did not start")
        if config.address is not None and ray.is_initialized():
            end_actors(config.namespace)
        line.say("failed", message=_describe(error))
        return 1
    if config.address is None:
        _wait_for_end()
    return 0


def _connect(config: HeadConfig) -> str:
    """Starts or joins Ray; its address."""
    common: dict[str, Any] = {"namespace": config.namespace, "log_to_driver": False, "logging_level": logging.WARNING}
    if config.address is not None:
        ray.init(address=config.address, **common)
        _require_one_node()
    else:
        os.environ.setdefault("RAY_worker_niceness", ACTORS_NICENESS)
        ray.init(
            address="local",
            include_dashboard=False,
            object_store_memory=OBJECT_STORE_BYTES,
            _temp_dir=config.temp_dir,
            **common,
        )
    address: str = ray.get_runtime_context().gcs_address
    return address


def _require_one_node() -> None:
    num_nodes = sum(node["Alive"] for node in ray.nodes())
    if num_nodes > 1:
        raise ConfigError(f"the Ray cluster has {num_nodes} nodes, but a cluster of Baton serves from one node for now")


def _launch(line: "_Line") -> dict[str, Any]:
    """Starts the controller, and through it everything else."""
    node_id = ray.get_runtime_context().get_node_id()
    plan = line.hear()
    controller: Any = (
        ray.remote(Controller)
        .options(
            name=CONTROLLER,
            lifetime="detached",
            num_cpus=0,
            max_restarts=-1,
            max_concurrency=1000,
            scheduling_strategy=NodeAffinitySchedulingStrategy(node_id, soft=False),
        )
        .remote(plan)
    )
    started = controller.start.remote()
    while not ray.wait([started], timeout=PROGRESS_EVERY_S)[0]:
        line.require_open()
        _report_progress(line, controller)
    answer: dict[str, Any] = json.loads(ray.get(started))
    return answer


def _report_progress(line: "_Line", controller: Any) -> None:
    try:
        answer = ray.get(controller.progress.remote(), timeout=PROGRESS_EVERY_S)
    except (GetTimeoutError, RayTaskError):
        return  # there is nothing to tell yet
    line.say("progress", **json.loads(answer))


def _describe(error: Exception) -> str:
    cause = error.cause if isinstance(error, RayTaskError) else error
    return cause.message if isinstance(cause, BatonError) else str(cause) or type(cause).__name__


def _wait_for_end() -> None:
    try:
        while True:
            signal.pause()
    except Gone:
        ray.shutdown()


def _give_up(_number: int, _frame: Any) -> None:
    raise Gone("asked to end")


class _Line:
    """Stdin and stdout, the latter kept from whatever else this process prints."""

    def __init__(self) -> None:
        self._out = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)

    def say(self, said: str, **values: Any) -> None:
        """Nobody has to listen any more."""
        try:
            print(json.dumps({"said": said, **values}), file=self._out, flush=True)
        except BrokenPipeError:
            log.info("nobody heard: %s", said)

    def hear(self) -> str:
        """The next line. Raises Gone if there is none."""
        heard = sys.stdin.readline()
        if not heard:
            raise Gone("nobody wants the cluster any more")
        return heard

    def require_open(self) -> None:
        """Raises Gone once the other side has closed the line."""
        if select.select([sys.stdin], [], [], 0)[0]:
            self.hear()


if __name__ == "__main__":
    sys.exit(main())
