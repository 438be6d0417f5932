"""Ray for a cluster, as `baton up` sees it: started or joined by a process that leads a session of its own."""

import json
import os
import secrets
import select
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deploy.local.run_dir import log_tail, ray_folder
from deploy.plan.cluster_plan import ClusterPlan
from deploy.processes.process import ProcessRef, spawn_leader
from wire.errors import ConfigError

RAY_TIMEOUT_S = 120.0
LAUNCH_TIMEOUT_S = 1860.0
SOURCES = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Launched:
    """A cluster that serves. No metrics, no address for them."""

    address: str
    operator_address: str
    metrics_address: str = ""


class RayHead:
    """`process` leads the session of all of Ray's processes, if Ray was started and not joined."""

    def __init__(self, run_dir: Path, namespace: str, ray_address: str | None) -> None:
        """Begins at once; returns before Ray is there."""
        self._log = run_dir / "ray.log"
        config = {"namespace": namespace, "temp_dir": str(ray_folder(run_dir)), "address": ray_address}
        stdin, self._stdin = os.pipe()
        self._stdout, stdout = os.pipe()
        command = [sys.executable, "-m", "deploy.controller.head", json.dumps(config)]
        env = _common_env() if ray_address else {**_common_env(), **_private_env()}
        self.process: ProcessRef = spawn_leader(command, self._log, env, stdin, stdout)
        os.close(stdin)
        os.close(stdout)
        self._unread = b""

    def wait_for_ray(self) -> str:
        """Ray's address. Raises ConfigError, with the reason, if Ray does not start or cannot be joined."""
        address: str = self._hear(RAY_TIMEOUT_S)["address"]
        return address

    def launch(self, plan: ClusterPlan, on_progress: Callable[[int], None]) -> Launched:
        """Starts the cluster, telling of bytes of the arena that are made. Raises ConfigError if it does not serve."""
        os.write(self._stdin, plan.to_json().encode() + b"\n")
        deadline = time.monotonic() + LAUNCH_TIMEOUT_S
        while True:
            heard = self._hear(deadline - time.monotonic())
            if heard["said"] == "ready":
                return Launched(**{key: value for key, value in heard.items() if key != "said"})
            on_progress(heard["done_bytes"])

    def close(self) -> None:
        """Ends the line: before the cluster serves, this gives it up."""
        os.close(self._stdin)
        os.close(self._stdout)

    def _hear(self, timeout_s: float) -> dict[str, Any]:
        heard: dict[str, Any] = json.loads(self._read_line(time.monotonic() + timeout_s))
        if heard["said"] == "failed":
            raise ConfigError(heard["message"])
        return heard

    def _read_line(self, deadline: float) -> bytes:
        while b"\n" not in self._unread:
            left_s = max(0.0, deadline - time.monotonic())
            if not select.select([self._stdout], [], [], left_s)[0]:
                raise ConfigError(f"Ray did not answer in time:\n{log_tail(self._log)}")
            data = os.read(self._stdout, 1 << 16)
            if not data:
                raise ConfigError(f"Ray did not start:\n{log_tail(self._log)}")
            self._unread += data
        line, _, self._unread = self._unread.partition(b"\n")
        return line


def _common_env() -> dict[str, str]:
    """Every process finds the very code that this one runs, wherever it was started."""
    path = os.environ.get("PYTHONPATH")
    return {"PYTHONPATH": f"{SOURCES}{os.pathsep}{path}" if path else str(SOURCES), "RAY_USAGE_STATS_ENABLED": "0"}


def _private_env() -> dict[str, str]:
    """Ray listens on all interfaces, and runs what it is sent: a token of its own keeps everybody else out."""
    return {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
