"""The process that starts Ray, or joins it, and makes the controller. `RayProcess` speaks to it through its stdin.

in   a HeadConfig as argument; a ClusterPlan as the only message; end of file before the answer: give up
out  {"address"} of Ray, then the answer of Controller.start; {"failure"} in place of either

A Ray cluster that it has started ends with it, whatever its own end; one that it joined goes on without it.
"""

import json
import logging
import os
import signal
import sys
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import ray
from ray.exceptions import RayError, RayTaskError

from deploy.actors.end_actors import end_actors
from deploy.actors.ray_host import actor_options
from deploy.controller.controller import Controller
from deploy.plan.cluster_plan import CONTROLLER, Resources
from wire.errors import BatonError, ConfigError
from wire.settings import from_json

OBJECT_STORE_BYTES = 80 << 20
"""About the least that Ray takes: no KV goes through it."""
LOOK_EVERY_S = 0.2
ACTORS_NICENESS = "0"
"""Ray's default of 15 would leave the router waiting behind whatever else the machine does."""

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class HeadConfig:
    """`address`: the Ray cluster to join; None starts one, which keeps its files in `temp_dir`."""

    namespace: str
    temp_dir: str
    address: str | None = None


class Gone(Exception):
    """`baton up` has gone away, or wants the cluster to end."""


def main() -> int:
    logging.basicConfig(level=logging.INFO)
    signal.signal(signal.SIGTERM, _give_up)
    config = from_json(HeadConfig, sys.argv[1], "head")
    line = _Line()
    try:
        line.say({"address": _connect(config)})
        line.say(_launch(line))
    except (BatonError, RayError, OSError, RuntimeError, ValueError, Gone) as error:
        log.exception("the cluster did not start")
        if config.address is not None and ray.is_initialized():
            end_actors(config.namespace)
        line.say({"failure": _describe(error)})
        return 1
    if config.address is None:
        _wait_for_end()
    return 0


def _connect(config: HeadConfig) -> str:
    """Starts or joins Ray; returns its address."""
    common: dict[str, Any] = {"namespace": config.namespace, "log_to_driver": False, "logging_level": logging.WARNING}
    if config.address is not None:
        ray.init(address=config.address, **common)
        _require_one_node()
    else:
        os.environ.setdefault("RAY_worker_niceness", ACTORS_NICENESS)
        own: dict[str, Any] = {"include_dashboard": False, "object_store_memory": OBJECT_STORE_BYTES}
        ray.init(address="local", _temp_dir=config.temp_dir, **own, **common)
    address: str = ray.get_runtime_context().gcs_address
    return address


def _require_one_node() -> None:
    num_nodes = sum(node["Alive"] for node in ray.nodes())
    if num_nodes > 1:
        raise ConfigError(f"the Ray cluster has {num_nodes} nodes, but a cluster of Baton serves from one node for now")


def _launch(line: "_Line") -> dict[str, Any]:
    """Makes the controller, and through it everything else; returns the controller's answer."""
    options = actor_options(CONTROLLER, Resources()) | {"max_restarts": -1}
    controller: Any = ray.remote(Controller).options(**options).remote(line.hear())
    started = controller.start.remote()
    while not ray.wait([started], timeout=LOOK_EVERY_S)[0]:
        line.require_open()
    answer: dict[str, Any] = json.loads(ray.get(started))
    return answer


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
    """The connection that this process has as its stdin; its children get none of it."""

    def __init__(self) -> None:
        self._connection = Connection(os.dup(0))
        with open(os.devnull, "rb") as nothing:
            os.dup2(nothing.fileno(), 0)

    def say(self, message: dict[str, Any]) -> None:
        try:
            self._connection.send_bytes(json.dumps(message).encode())
        except (BrokenPipeError, ConnectionResetError):
            log.info("`baton up` has gone, and does not hear %s", sorted(message))

    def hear(self) -> str:
        """Returns the next message. Raises Gone if there is none."""
        try:
            return self._connection.recv_bytes().decode()
        except (EOFError, ConnectionResetError) as error:
            raise Gone("`baton up` has gone") from error

    def require_open(self) -> None:
        """Raises Gone once the other side has closed the line."""
        if self._connection.poll(0):
            self.hear()


if __name__ == "__main__":
    sys.exit(main())
