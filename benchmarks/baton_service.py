"""A service of ours, started and stopped by the command line as a user would."""

import itertools
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any

import psutil

from deploy.local import redis_server
from deploy.local.state import ClusterState, StateFile
from deploy.plan.config import RedisSettings
from deploy.processes.process import recorded, recorded_names

HANDED_OFF = ("--disaggregation", "always")
"""Flags of `up` for benchmarks of hand-offs, in which each prompt is handed off, whatever the load."""
_UP_TIMEOUT_S = 300.0
_CALL_TIMEOUT_S = 60.0
_POLL_S = 0.5


class BatonService:
    """`baton up` on entry, `baton down` on exit, also where this process is killed.

    settings: more flags for `baton up`. told: what it printed.
    """

    def __init__(
        self, name: str, model: str | None, num_prefill: int, num_decode: int, settings: Sequence[str] = ()
    ) -> None:
        self.name = f"bench-{name[:8]}"
        self._pools = {"prefill": num_prefill, "decode": num_decode}
        self._settings = [*([] if model is None else ["--model", model]), *settings]
        self.address = ""
        self.told = ""
        self._ending: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> "BatonService":
        pools = [part for role, size in self._pools.items() for part in (f"--{role}", str(size))]
        self._ending = end_with_this_process(self._command("down"))
        try:
            self.told = self._baton("up", *pools, "--grpc-port", "0", *self._settings, timeout_s=_UP_TIMEOUT_S)
            self.address = self.status()["address"]
        except BaseException:
            self._down()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._down()

    def call(self, *command: str, timeout_s: float = _CALL_TIMEOUT_S) -> subprocess.CompletedProcess[str]:
        """Runs a command of `baton` on the service, whatever its exit status; its errors are among its output."""
        return subprocess.run(
            self._command(*command),
            timeout=timeout_s,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )

    def status(self) -> dict[str, Any]:
        """Reads `baton status --json`."""
        status: dict[str, Any] = json.loads(self._baton("status", "--json"))
        return status

    def scale(self, **pools: int) -> None:
        """`baton scale`; returns once it has happened."""
        flags = [part for role, size in pools.items() for part in (f"--{role}", str(size))]
        self._baton("scale", *flags, timeout_s=_UP_TIMEOUT_S)
        self._pools.update(pools)

    def pin_workers(self) -> None:
        """Binds each worker, with its threads of now and later, to a core of its own; more workers begin again."""
        cpus = itertools.cycle(sorted(os.sched_getaffinity(0)))
        for pid, cpu in zip(self.worker_pids(), cpus, strict=False):
            pin(pid, cpu)

    def worker_pids(self) -> list[int]:
        """Lists the processes of all workers, prefill first."""
        pools = self.status()["pools"]
        return [worker["pid"] for role in self._pools for worker in pools[role]]

    def cpu_s(self) -> dict[str, float]:
        """Sums CPU seconds so far, for workers, router, and all other processes of the cluster."""
        state = self.state()
        assert state.head is not None, "it has joined another's Ray"
        workers, router = self.worker_pids(), self.actor_pid("router")
        others = {*state.head.session(), *([state.redis.pid] if state.redis else [])}.difference(workers, {router})
        groups = {"workers": workers, "router": [router], "others": others}
        return {name: sum(map(cpu_s, pids)) for name, pids in groups.items()}

    def wait_for_rest(self, timeout_s: float) -> dict[str, Any]:
        """Returns `baton status --check --json` once all workers are there and nothing is in use, or at the timeout."""
        deadline = time.monotonic() + timeout_s
        while True:
            command = self._command("status", "--json", "--check")
            done = subprocess.run(command, timeout=_CALL_TIMEOUT_S, stdout=subprocess.PIPE, text=True, check=False)
            status: dict[str, Any] = json.loads(done.stdout)
            is_whole = all(len(status["pools"][role]) == size for role, size in self._pools.items())
            if (is_whole and not status["problems"] and not num_in_use(status)) or time.monotonic() > deadline:
                return status
            time.sleep(_POLL_S)

    @property
    def redis_pid(self) -> int:
        """The pid of the service's own Redis."""
        redis = self.state().redis
        assert redis is not None, "it has no Redis of its own"
        return redis.pid

    def actor_pid(self, name: str) -> int:
        """Returns the last process of the actor whose name begins so: a node's service has the node in its own."""
        run_dir = Path(self.state().run_dir)
        [whole] = [known for known in recorded_names(run_dir) if known.startswith(name)]
        process = recorded(run_dir, whole)
        assert process is not None, f"the record of {whole} is damaged"
        return process.pid

    def kill_redis(self) -> None:
        os.kill(self.redis_pid, signal.SIGKILL)

    def start_redis(self) -> None:
        """Starts a new Redis in place of the killed one; `baton down` will end it."""
        state = self.state()
        server = redis_server.start(redis_server.find_program(), Path(state.run_dir), RedisSettings().max_bytes)
        StateFile(self.name).write(replace(state, redis=server.process))

    def state(self) -> ClusterState:
        """Reads the file that `baton up` wrote."""
        state = StateFile(self.name).read()
        assert state is not None, "it is not up"
        return state

    def _down(self) -> None:
        """Raises CalledProcessError if something is left."""
        ending, self._ending = self._ending, None
        assert ending is not None
        ending.communicate(timeout=_CALL_TIMEOUT_S)
        if ending.returncode:
            raise subprocess.CalledProcessError(ending.returncode, ending.args)

    def _baton(self, *arguments: str, timeout_s: float = _CALL_TIMEOUT_S) -> str:
        command = self._command(*arguments)
        return subprocess.run(command, timeout=timeout_s, stdout=subprocess.PIPE, text=True, check=True).stdout

    def _command(self, *arguments: str) -> list[str]:
        return [sys.executable, "-m", "cli", *arguments, "--name", self.name]


def end_with_this_process(command: Sequence[str]) -> subprocess.Popen[bytes]:
    """Starts a shell that runs a command once its stdin is closed, as the end of this process closes it, too.

    It is in a session of its own: what ends this process and its group does not end it.
    """
    whole = ["sh", "-c", 'cat; exec "$@"', "sh", *command]
    return subprocess.Popen(whole, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, start_new_session=True)


def pin(pid: int, cpu: int) -> None:
    """Binds all threads of a process to a core; threads that they start inherit it."""
    for thread in psutil.Process(pid).threads():
        os.sched_setaffinity(thread.id, {cpu})


def cpu_s(pid: int) -> float:
    """Reads the CPU seconds of a process; none once it is gone."""
    with suppress(psutil.NoSuchProcess):
        times = psutil.Process(pid).cpu_times()
        return times.user + times.system
    return 0.0


def num_in_use(status: dict[str, Any]) -> int:
    """Counts pages and slots with references, leases and holds; with no open request, all of them have leaked."""
    counts = [worker["blocks"] for pool in status["pools"].values() for worker in pool]
    counts.append(status["tiers"]["host"]["blocks"])
    in_use = sum(count[state] for count in counts for state in ("owned", "published", "draining"))
    host = status["tiers"]["host"]
    return int(in_use + host["num_leases"] + host["num_holds"])
