"""The start of a cluster, from a configuration to a cluster that serves, or to nothing at all."""

import os
import secrets
import socket
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

from deploy.local import redis_server, run_dir
from deploy.local.ray_process import RayProcess
from deploy.local.shutdown import connection_problem, tear_down
from deploy.local.state import ClusterPhase, ClusterState, StateFile, load_secret
from deploy.plan.byte_size import format_bytes
from deploy.plan.cluster_plan import ClusterPlan, NodeConfig, make_plan, namespace
from deploy.plan.config import ClusterConfig
from deploy.plan.machine import SHARED_MEMORY, Machine, inspect_machine
from deploy.plan.model import ModelFacts, inspect_model
from deploy.plan.sizing import Sizes, size
from deploy.processes.process import ProcessRef
from wire.errors import ConfigError
from worker.config import StoreSettings

LOOPBACK = "127.0.0.1"


class Reporter(Protocol):
    """The command that shows the progress of the start."""

    def tell(self, part: str, text: str) -> None: ...

    def show_progress(self, part: str, done_bytes: int, total_bytes: int) -> None: ...


class Startup:
    """A start under way. It keeps the state file as far as the cluster is: `down` can clean up after a crash."""

    def __init__(self, config: ClusterConfig, reporter: Reporter) -> None:
        self._config = config
        self._reporter = reporter
        self._file = StateFile(config.name)
        self._run_dir = run_dir.create(config.name)
        self._state = ClusterState(
            name=config.name,
            phase=ClusterPhase.STARTING,
            command=ProcessRef.of(os.getpid()),
            run_dir=str(self._run_dir),
            token=secrets.token_hex(16),
        )

    def run(self) -> ClusterState:
        """Returns when the cluster serves. Raises ConfigError, and leaves nothing behind, if it cannot."""
        with ExitStack() as undo:
            undo.callback(run_dir.remove, self._run_dir)
            _require_free("--grpc-port", self._config.router.grpc_port)
            _require_free("--metrics-port", self._config.router.metrics_port)
            if (problem := connection_problem(self._config.ray.address or "")) is not None:
                raise ConfigError(f"no Ray cluster answers at {self._config.ray.address} ({problem})")
            self._claim()
            undo.callback(self._file.remove)
            undo.callback(lambda: tear_down(self._state))
            self._start()
            undo.pop_all()
        return self._state

    def _claim(self) -> None:
        """Takes the cluster's name; removes first what a crashed cluster of that name has left."""
        if self._file.claim(self._state):
            return
        if earlier := self._file.read():
            if earlier.is_alive:
                advice = f"stop it with `baton down --name {earlier.name}`, or give this one another --name"
                raise ConfigError(f"a cluster named {earlier.name} is {earlier.phase.value}: {advice}")
            self._reporter.tell("cleanup", "removing what an earlier cluster of this name has left")
            tear_down(earlier)
            self._file.remove()
        if not self._file.claim(self._state):
            raise ConfigError(f"another `baton up --name {self._config.name}` is at work")

    def _start(self) -> None:
        ray = RayProcess(self._run_dir, namespace(self._config.name), self._config.ray.address)
        try:
            self._note(head=ray.process)
            redis_url = self._start_redis()
            machine = inspect_machine()
            model = self._inspect_model(machine)
            plan = self._plan(model, self._size(model, machine), redis_url)
            ray_address = ray.wait_for_ray()
            self._reporter.tell("ray", f"{'joined' if self._config.ray.address else 'started'} at {ray_address}")
            self._note(ray_address=ray_address, arena_path=plan.node.arena_path)
            addresses = self._launch(ray, plan)
        finally:
            ray.close()
        head = None if self._config.ray.address else ray.process
        self._note(phase=ClusterPhase.RUNNING, model=model.served.name, head=head, **addresses)

    def _start_redis(self) -> str | None:
        settings = self._config.redis
        if settings.url != "own":
            self._reporter.tell("redis", "off" if settings.url == "off" else "as given")
            return None if settings.url == "off" else settings.url
        server = redis_server.start(redis_server.find_program(), self._run_dir, settings.max_bytes)
        self._note(redis=server.process)
        self._reporter.tell("redis", f"{server.program}, our own, at most {format_bytes(settings.max_bytes)}")
        return server.url

    def _inspect_model(self, machine: Machine) -> ModelFacts:
        device = "cuda" if machine.gpus and self._config.worker.num_gpus != 0 else "cpu"
        model = inspect_model(self._config.model, device, self._config.worker.cpu_kernels)
        served = model.served
        self._reporter.tell(
            "model", f"{served.name}, {served.dtype} on {device} ({model.kernels}), context {served.max_context_len}"
        )
        return model

    def _size(self, model: ModelFacts, machine: Machine) -> Sizes:
        sizes, pools = size(self._config, model, machine), self._config.pools
        pool = format_bytes(sizes.num_pool_blocks * model.served.layout.block_bytes)
        each = f"{pool} of KV pages and {sizes.num_threads} threads each"
        self._reporter.tell("workers", f"{pools.prefill} prefill and {pools.decode} decode, {each}")
        for note in sizes.notes:
            self._reporter.tell("note", note)
        return sizes

    def _plan(self, model: ModelFacts, sizes: Sizes, redis_url: str | None) -> ClusterPlan:
        directory, timeout_s = str(self._run_dir / "directory.sock"), self._config.redis.timeout_ms / 1000
        store, arena_path = StoreSettings(directory, redis_url, timeout_s), str(SHARED_MEMORY / self._run_dir.name)
        node = NodeConfig(store, arena_path, model.served.layout_hex, sizes.num_arena_slots)
        return make_plan(self._config, model, sizes, node, self._state.token, load_secret())

    def _launch(self, ray: RayProcess, plan: ClusterPlan) -> dict[str, str]:
        arena, size_bytes = Path(plan.node.arena_path), plan.node.arena_bytes
        self._reporter.tell("arena", f"{format_bytes(size_bytes)} of shared memory")

        def show_progress() -> None:
            with suppress(FileNotFoundError):
                done_bytes = min(size_bytes, arena.stat().st_blocks * 512)
                self._reporter.show_progress("arena", done_bytes, size_bytes)

        return ray.launch(plan, show_progress)

    def _note(self, **changes: Any) -> None:
        self._state = replace(self._state, **changes)
        self._file.write(self._state)


def _require_free(flag: str, port: int | str) -> None:
    """Raises ConfigError for a port in use: here in milliseconds, where the router would take seconds."""
    if not isinstance(port, int):
        return
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((LOOPBACK, port))
        except OSError as error:
            reason = f"port {port} cannot be had ({error.strerror})"
            raise ConfigError(f"{reason}: give another {flag}, or 0 for any free one") from error
