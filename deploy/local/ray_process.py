"""The process of Ray, from the side of `baton up`; its own side is deploy/controller/head.py."""

import json
import os
import secrets
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Pipe
from pathlib import Path
from typing import Any

from deploy.local.run_dir import log_tail, ray_folder
from deploy.plan.cluster_plan import ClusterPlan
from deploy.processes.process import ProcessRef, spawn_leader
from wire.errors import ConfigError

RAY_TIMEOUT_S = 120.0
LAUNCH_TIMEOUT_S = 1860.0
PROGRESS_EVERY_S = 0.2
SOURCES = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Launched:
    """A cluster that serves. Without metrics their address is empty."""

    address: str
    operator_address: str
    metrics_address: str = ""


class RayProcess:
    """A process that starts Ray, or joins it. `process` leads the session of all of Ray's, if Ray was started."""

    def __init__(self, run_dir: Path, namespace: str, ray_address: str | None) -> None:
        """Begins at once; returns before Ray is there."""
        self._log = run_dir / "ray.log"
        self._line, theirs = Pipe()
        config = {"namespace": namespace, "temp_dir": str(ray_folder(run_dir)), "address": ray_address}
        command = [sys.executable, "-m", "deploy.controller.head", json.dumps(config)]
        env = _common_env() if ray_address else {**_common_env(), **_private_env()}
        with theirs:
            self.process: ProcessRef = spawn_leader(command, self._log, env, stdin=theirs.fileno())

    def wait_for_ray(self) -> str:
        """Returns Ray's address. Raises ConfigError, with the reason, if Ray does not start or cannot be joined."""
        address: str = self._hear(RAY_TIMEOUT_S)["address"]
        return address

    def launch(self, plan: ClusterPlan, on_wait: Callable[[], None]) -> Launched:
        """Starts the cluster; calls `on_wait` five times a second. Raises ConfigError if the cluster does not serve."""
        with suppress(BrokenPipeError):  # then the reason is still to be heard
            self._line.send_bytes(plan.to_json().encode())
        deadline = time.monotonic() + LAUNCH_TIMEOUT_S
        while not self._line.poll(PROGRESS_EVERY_S) and time.monotonic() < deadline:
            on_wait()
        return Launched(**self._hear(0))

    def close(self) -> None:
        """Ends the line: before the cluster serves, this gives it up."""
        self._line.close()

    def _hear(self, timeout_s: float) -> dict[str, Any]:
        try:
            if not self._line.poll(timeout_s):
                raise ConfigError(f"Ray did not answer in time:\n{log_tail(self._log)}")
            heard: dict[str, Any] = json.loads(self._line.recv_bytes())
        except (EOFError, ConnectionResetError) as error:
            raise ConfigError(f"Ray did not start:\n{log_tail(self._log)}") from error
        if "failure" in heard:
            raise ConfigError(heard["failure"])
        return heard


def _common_env() -> dict[str, str]:
    """Lets every process find the very code that this one runs, wherever it was started."""
    path = os.environ.get("PYTHONPATH")
    return {"PYTHONPATH": f"{SOURCES}{os.pathsep}{path}" if path else str(SOURCES), "RAY_USAGE_STATS_ENABLED": "0"}


def _private_env() -> dict[str, str]:
    """Keeps others out by a token: Ray listens on all interfaces, and runs what it is sent."""
    return {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
