"""A real cluster, started and asked through the command line; its status comes from the operator's service itself."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from cli.status import to_object
from deploy.deadlines import STATUS_IN_COMMAND_S
from deploy.local.client import call_operator, find_cluster
from deploy.processes.process import recorded, recorded_gateways
from tests.harness.fork_server import ON_FORKS, ForkedCommand, ForkServer
from tests.kernels.backends import lend_kernels
from wire.errors import DeadlineExceeded, Unavailable
from wire.pb import cluster_pb2

COMMAND_TIMEOUT_S = 110
SHARED_MEMORY = Path("/dev/shm")
RUN_ROOT = Path("/tmp")
ALWAYS = ("--disaggregation", "always")
"""Flags of `up` for tests in which each prompt is handed off, whatever the load."""
Command = subprocess.Popen[str] | ForkedCommand


class ServedCluster:
    """`name` is short: it is part of paths. State and caches of the user stay out of it.

    program: the command. forks: forks commands in place of the program. target: ON_FORKS to have the cluster's actors
    forked, too. timeout_s: of a command.
    """

    def __init__(
        self,
        name: str,
        folder: Path,
        program: Sequence[str] = (sys.executable, "-m", "cli"),
        forks: ForkServer | None = None,
        target: str = ON_FORKS,
        timeout_s: float = COMMAND_TIMEOUT_S,
    ) -> None:
        self.name = name
        self._timeout_s = timeout_s
        self._program = program
        self._forks = forks
        self._target = target
        lend_kernels(folder / "cache")
        self._env = {
            **os.environ,
            "XDG_STATE_HOME": str(folder / "state"),
            "XDG_CACHE_HOME": str(folder / "cache"),
            "OMP_NUM_THREADS": "1",
            "PYTHONWARNINGS": "default",
        }

    @contextmanager
    def started(self, command: str, *arguments: str) -> Iterator[Command]:
        """A command under way, which is killed at the end of the block if it still runs."""
        own = [*command.split(), "--name", self.name, *arguments]
        if self._forks is not None:
            with closing(ForkedCommand(self._forks, self._target, own, self._env)) as forked:
                yield forked
            return
        whole = [*self._program, *own]
        pipe = subprocess.PIPE
        with subprocess.Popen(whole, env=self._env, stdout=pipe, stderr=pipe, text=True) as process:
            try:
                yield process
            finally:
                process.kill()

    def run(self, command: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        """A command, whatever becomes of it."""
        with self.started(command, *arguments) as process:
            try:
                out, error = process.communicate(timeout=self._timeout_s)
            except subprocess.TimeoutExpired:
                process.kill()
                out, error = process.communicate()
                raise AssertionError(f"{command} takes too long: {out}{error}") from None
            code = process.returncode
            assert code is not None
            return subprocess.CompletedProcess(process.args, code, out, error)

    def do(self, command: str, *arguments: str) -> str:
        """What a command prints; it must succeed."""
        done = self.run(command, *arguments)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def generate(self, prompt_ids: Sequence[int], *arguments: str) -> dict[str, Any]:
        ids = ",".join(map(str, prompt_ids))
        greedy = () if "--temperature" in arguments else ("--temperature", "0")
        answer: dict[str, Any] = json.loads(self.do("generate", "--token-ids", ids, "--json", *greedy, *arguments))
        return answer

    def status(self) -> dict[str, Any]:
        """The object of `baton status --json`, as a script reads it."""
        return self._ask(cluster_pb2.GetStatusRequest())

    def is_sound(self) -> bool:
        """Whether the router answers, and finds all invariants to hold."""
        try:
            return not self._ask(cluster_pb2.GetStatusRequest(check=True))["problems"]
        except (Unavailable, DeadlineExceeded):
            return False

    def _ask(self, request: cluster_pb2.GetStatusRequest) -> dict[str, Any]:
        """Asks for a status from this process: a command takes half a second to start."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("XDG_STATE_HOME", self._env["XDG_STATE_HOME"])
            state = find_cluster(self.name)
        status = call_operator(state, "GetStatus", request, STATUS_IN_COMMAND_S)
        gateways = recorded_gateways(Path(state.run_dir))
        answer: dict[str, Any] = json.loads(json.dumps(to_object(status, state.addresses, gateways)))
        return answer

    def workers(self, role: str) -> dict[str, dict[str, Any]]:
        """Workers by id."""
        return {worker["id"]: worker for worker in self.status()["pools"][role]}

    def state(self) -> dict[str, Any]:
        """What the command line knows of the cluster."""
        path = Path(self._env["XDG_STATE_HOME"]) / "baton" / f"{self.name}.json"
        state: dict[str, Any] = json.loads(path.read_text())
        return state

    def key_file(self) -> Path:
        return Path(self._env["XDG_STATE_HOME"]) / "baton" / f"{self.name}.keys.json"

    def actor(self, name: str) -> psutil.Process:
        """The living process of an actor, by the beginning of its name in Ray; those that ended leave records."""
        records = Path(self.state()["run_dir"]).glob(f"{name}*.process")
        known = [process for one in records if (process := recorded(one.parent, one.stem)) is not None]
        (living,) = (process for process in known if process.is_alive)
        return psutil.Process(living.pid)

    def left_behind(self) -> list[str]:
        """Processes, shared memory and files of this cluster."""
        mark = f"baton-{self.name}"
        folders = [str(path) for root in (SHARED_MEMORY, RUN_ROOT) for path in root.glob(f"{mark}-*")]
        processes = [
            f"{process.pid} {process.info['cmdline']}"
            for process in psutil.process_iter(["cmdline"])
            if any(mark in part for part in process.info["cmdline"] or ())
        ]
        return folders + processes


def wait_until(holds: Callable[[], bool], what: str, timeout_s: float = 60.0, pause_s: float = 0.1) -> None:
    """Asks again and again, with a pause between two questions."""
    deadline = time.monotonic() + timeout_s
    while not holds():
        assert time.monotonic() < deadline, f"not within {timeout_s} s: {what}"
        time.sleep(pause_s)
