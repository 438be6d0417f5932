"""Ray's process, as `baton up` sees it; its own code is deploy/controller/ray_head.py."""

import os
import secrets
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Pipe
from pathlib import Path

import grpc

from deploy.deadlines import CLUSTER_START_IN_UP_S
from deploy.local.run_dir import log_tail
from deploy.plan.cluster_plan import ClusterPlan
from deploy.processes.process import ProcessRef, spawn_leader
from wire.errors import ConfigError
from wire.pools import Addresses, HeadAnswer
from wire.rpc import NO_PROXY
from wire.typed_reader import from_json, to_json

RAY_TIMEOUT_S = 120.0
PROGRESS_EVERY_S = 0.2
PROBE_TIMEOUT_S = 10.0
RAY_TLS_FILES = ("CA_CERT", "SERVER_KEY", "SERVER_CERT")
RAY_METHOD = "/ray.rpc.NodeInfoGcsService/CheckAlive"
SOURCES = Path(__file__).resolve().parents[2]


class RayProcess:
    """A process that starts Ray, or joins it. If it starts Ray, `process` leads the session of all Ray processes."""

    def __init__(self, run_dir: Path, ray_address: str | None) -> None:
        """Begins at once; returns before Ray runs."""
        self._log = run_dir / "ray.log"
        self._line, theirs = Pipe()
        command = [sys.executable, "-m", "deploy.controller.ray_head", str(run_dir)]
        command += [ray_address] if ray_address else []
        with theirs:
            self.process: ProcessRef = spawn_leader(command, self._log, _env(ray_address), stdin=theirs.fileno())

    def wait_for_ray(self) -> str:
        """Waits for Ray's address. Raises ConfigError, with the reason, if Ray does not start or cannot be joined."""
        return self._hear(RAY_TIMEOUT_S).ray_address

    def launch(self, plan: ClusterPlan, on_wait: Callable[[], None]) -> Addresses:
        """Starts the cluster; returns its addresses. Raises ConfigError if it does not serve.

        Calls `on_wait` five times a second.
        """
        with suppress(BrokenPipeError):  # then the reason is still in the pipe
            self._line.send_bytes(to_json(plan).encode())
        deadline = time.monotonic() + CLUSTER_START_IN_UP_S
        while not self._line.poll(PROGRESS_EVERY_S) and time.monotonic() < deadline:
            on_wait()
        addresses = self._hear(0).addresses
        assert addresses is not None, "it has heard of a failure else"
        return addresses

    def close(self) -> None:
        """Closes the pipe to the process, which gives up a cluster that does not serve yet."""
        self._line.close()

    def _hear(self, timeout_s: float) -> HeadAnswer:
        try:
            if not self._line.poll(timeout_s):
                limit_s = timeout_s or CLUSTER_START_IN_UP_S
                raise ConfigError(f"Ray did not answer within {limit_s:.0f} s:\n{log_tail(self._log)}")
            heard = from_json(HeadAnswer, self._line.recv_bytes().decode(), "head")
        except (EOFError, ConnectionResetError) as error:
            raise ConfigError(f"Ray did not start:\n{log_tail(self._log)}") from error
        if heard.failure:
            raise ConfigError(heard.failure)
        return heard


def asks_for_token(ray_address: str) -> bool:
    """Calls Ray's control service without a token; returns whether it asks for one."""
    with _channel_to_ray(ray_address) as channel:
        try:
            channel.unary_unary(RAY_METHOD, bytes, bytes)(b"", timeout=PROBE_TIMEOUT_S)
        except grpc.RpcError as error:
            return error.code() is grpc.StatusCode.UNAUTHENTICATED
    return False


def _channel_to_ray(address: str) -> grpc.Channel:
    """Opens a channel to Ray, with TLS if Ray's environment variables say so."""
    if os.environ.get("RAY_USE_TLS", "").lower() not in ("1", "true"):
        return grpc.insecure_channel(address, options=NO_PROXY)
    root, key, certificate = (Path(os.environ[f"RAY_TLS_{one}"]).read_bytes() for one in RAY_TLS_FILES)
    return grpc.secure_channel(address, grpc.ssl_channel_credentials(root, key, certificate), options=NO_PROXY)


def _env(ray_address: str | None) -> dict[str, str]:
    """Returns an environment in which every process imports this process's code, in any working folder."""
    path = os.environ.get("PYTHONPATH")
    env = {"PYTHONPATH": f"{SOURCES}{os.pathsep}{path}" if path else str(SOURCES), "RAY_USAGE_STATS_ENABLED": "0"}
    if not ray_address:  # a token keeps others out: Ray listens on all interfaces, and runs what it is sent
        env |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    return env
