"""The process that starts Ray, or joins it, and makes the controller. `RayProcess` speaks to it through its stdin.

in   run folder, and Ray's address where it joins one, as arguments; a ClusterPlan as the only message; end of file
     before the answer: give up
out  HeadAnswer with Ray's address, then one with the cluster's; a failure in place of either

A Ray cluster that the process started ends with it, however it ends; a joined Ray cluster goes on. If one of its own
Ray's services ends, the run folder records a crash, though the cluster may serve for a minute more.
"""

import logging
import os
import select
import signal
import sys
from collections.abc import Mapping
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import psutil
import ray.util
from ray._private.node import Node
from ray.exceptions import RayError, RayTaskError

from deploy.actors.end_actors import end_actors
from deploy.actors.ray_host import RayHost, actor_options
from deploy.controller.controller import Controller
from deploy.local import run_dir
from deploy.plan.cluster_plan import CONTROLLER, namespace
from deploy.plan.machine import Resources
from wire.errors import BatonError, ConfigError
from wire.pools import Addresses, HeadAnswer
from wire.typed_reader import from_json, to_json

OBJECT_STORE_BYTES = 80 << 20
"""Size of Ray's object store, about its minimum: no KV passes through it."""
LOOK_EVERY_S = 0.2
SERVICES = ("gcs_server", "raylet")
"""Programs of Ray; without any of them it ends, at once or within a minute."""
HEAD_RESOURCE, HEAD_SHARE = "node:__internal_head__", 0.001
"""The resource that Ray gives its head, 1 of it, and the part of a controller."""
ACTORS_NICENESS = "0"
"""Niceness of actors; with Ray's default of 15 the router would wait for all other work of the machine."""
NEEDLESS = ("start_monitor", "start_log_monitor", "start_api_server")
"""Methods of Ray's node that start its autoscaler, log monitor and dashboard; Ray calls them unasked, and waits."""

log = logging.getLogger(__name__)


def main(folder: str, address: str | None = None) -> int:
    logging.basicConfig(level=logging.INFO)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    line = _take_stdin()
    try:
        _say(line, HeadAnswer(ray_address=_connect(Path(folder), address)))
        _say(line, HeadAnswer(addresses=_launch(line, Path(folder))))
    except (BatonError, RayError, OSError, RuntimeError, ValueError, EOFError, KeyboardInterrupt) as error:
        log.exception("the cluster did not start")
        if address is not None and ray.is_initialized():
            end_actors(namespace(folder))
        _say(line, HeadAnswer(failure=_describe(error)))
        return 1
    if address is None:
        _wait_for_end(Path(folder))
    return 0


def _take_stdin() -> Connection:
    """Returns the connection that is this process's stdin; children do not inherit it."""
    line = Connection(os.dup(0))
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    return line


def _connect(folder: Path, address: str | None) -> str:
    common: dict[str, Any] = {
        "namespace": namespace(str(folder)),
        "log_to_driver": False,
        "logging_level": logging.WARNING,
    }
    if address is not None:
        ray.init(address=address, **common)
        require_free_name(folder.name)
    else:
        os.environ.setdefault("RAY_worker_niceness", ACTORS_NICENESS)
        for start in NEEDLESS:
            setattr(Node, start, lambda *_, **__: None)
        own: dict[str, Any] = {"include_dashboard": False, "object_store_memory": OBJECT_STORE_BYTES}
        ray.init(address="local", _temp_dir=str(run_dir.ray_folder(folder)), **own, **common)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # Ray has put its own there, which ends in a stack
    return str(ray.get_runtime_context().gcs_address)


def require_free_name(folder_name: str) -> None:
    """Raises ConfigError if this Ray runs the controller of another cluster with the name."""
    name = run_dir.cluster_of(folder_name)
    for actor in ray.util.list_named_actors(all_namespaces=True):
        if actor["name"] == CONTROLLER and run_dir.cluster_of(actor["namespace"]) == name:
            place = f"started by another user or state folder, in {run_dir.ROOT / actor['namespace']}"
            advice = "give this one another --name, or stop that one where it was started"
            raise ConfigError(f"another cluster named {name} serves on this Ray ({place}): {advice}")


def _launch(line: Connection, folder: Path) -> Addresses:
    """Starts the controller, which starts everything else. Raises EOFError once stdin is closed."""
    node_id = ray.get_runtime_context().get_node_id()
    options = controller_options(node_id, next(one["Resources"] for one in ray.nodes() if one["NodeID"] == node_id))
    controller: Any = ray.remote(Controller).options(**options).remote(line.recv_bytes().decode(), RayHost(folder))
    started = controller.start.remote()
    while not ray.wait([started], timeout=LOOK_EVERY_S)[0]:
        if line.poll(0):
            line.recv_bytes()
    return from_json(Addresses, ray.get(started), "addresses")


def controller_options(node_id: str, resources: Mapping[str, float]) -> dict[str, Any]:
    """Returns the options of a controller on this node; on Ray's head it restarts on the head of that time.

    A head that is started again has another id.
    """
    if HEAD_RESOURCE in resources:
        options = actor_options(CONTROLLER, Resources(custom={HEAD_RESOURCE: HEAD_SHARE}), None)
    else:
        options = actor_options(CONTROLLER, Resources(), node_id)
    return options | {"max_restarts": -1}


def _describe(error: BaseException) -> str:
    if isinstance(error, KeyboardInterrupt):
        return "the process of Ray was told to end (SIGTERM)"
    cause = error.cause if isinstance(error, RayTaskError) else error
    return cause.message if isinstance(cause, BatonError) else str(cause) or type(cause).__name__


def _wait_for_end(folder: Path) -> None:
    with suppress(KeyboardInterrupt):
        watch_services(folder)
        while True:
            signal.pause()
    ray.shutdown()


def watch_services(folder: Path) -> None:
    """Blocks until one of Ray's services has ended, and records a crash in the run folder."""
    watched: dict[int, str] = {}
    for child in psutil.Process().children():
        with suppress(psutil.NoSuchProcess, OSError):  # a helper that has ended, or a system without pidfd
            if (name := child.name()) in SERVICES:
                watched[os.pidfd_open(child.pid)] = name
    ended, _, _ = select.select(watched, [], [])
    run_dir.record_crash(folder, f"Ray's {watched[ended[0]]} ended")


def _say(line: Connection, answer: HeadAnswer) -> None:
    try:
        line.send_bytes(to_json(answer).encode())
    except (BrokenPipeError, ConnectionResetError):
        log.info("`baton up` has ended, and does not read %s", answer)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
