"""Ray's actors from both sides: `RayHost` in the controller, `ActorShell` in each actor's process."""

import asyncio
import gc
import logging
import pkgutil
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import ray.util
from ray._private.state import state as ray_state
from ray.exceptions import RayActorError, RayError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, NodeLabelSchedulingStrategy, NotIn

from deploy.actors.liveness import Liveness
from deploy.deadlines import PLACE_S, PROBE_S, STOP_S
from deploy.plan.machine import Machine, RayNode, Resources, inspect_machine
from deploy.processes.logs import start_logging
from deploy.processes.process import record_own, recorded, wait_or_kill
from wire.errors import BatonError, ConfigError, Unavailable
from wire.typed_reader import from_json, to_json

NODE_ID_LABEL = "ray.io/node-id"
NODES_TIMEOUT_S = 30.0

log = logging.getLogger(__name__)


class ActorShell:
    """The Ray actor in each process of a cluster: makes one object of ours, and passes calls on to it.

    It imports the object's module, so that the controller needs no torch. The import begins with the process, and
    `start` makes the object: both may overlap with other work.
    """

    def __init__(self, name: str, target: str, run_dir: str) -> None:
        """`name` names the process in its log and in the cluster's folder; `target` is MODULE:CLASS."""
        start_logging(name)
        record_own(Path(run_dir), name)
        gc.disable()  # imports make no garbage: the collector's searches take 0.1 to 0.5 s of them
        self._class: Any = pkgutil.resolve_name(target)
        gc.freeze()
        gc.enable()
        self._object: Any = None
        self._starting: asyncio.Task[str] | None = None

    async def start(self, config_json: str) -> str:
        """Makes the object and starts it, once; later calls get the same answer. Raises the object's exceptions."""
        if self._starting is None:
            self._starting = asyncio.create_task(self._start(config_json))
        return await asyncio.shield(self._starting)

    async def call(self, method: str, *arguments: str | int) -> str:
        """Calls a method of the started object; returns its text, "" for None. Raises Unavailable before the start."""
        if self._object is None:
            raise Unavailable("the actor has not started")
        return await getattr(self._object, method)(*arguments) or ""

    async def _start(self, config_json: str) -> str:
        self._object = await asyncio.to_thread(self._class, config_json)
        return await self.call("start")

    async def ping(self) -> str:
        """Answers while the event loop runs."""
        return ""

    async def where(self) -> str:
        """Returns the id of the node that this process runs on."""
        return str(ray.get_runtime_context().get_node_id())

    async def inspect(self) -> str:
        """Returns this Machine as text. Raises ConfigError."""
        return to_json(await asyncio.to_thread(inspect_machine))


class RayHost:
    """An ActorHost over detached actors, which Ray never restarts. `run_dir` is the cluster's folder."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._handles: dict[str, Any] = {}

    @property
    def own_node(self) -> str:
        return str(ray.get_runtime_context().get_node_id())

    def names(self) -> list[str]:
        return list(ray.util.list_named_actors())

    def adopt(self, name: str) -> bool:
        with suppress(ValueError):
            self._handles[name] = ray.get_actor(name)
        return name in self._handles

    async def nodes(self) -> list[RayNode]:
        try:
            async with asyncio.timeout(NODES_TIMEOUT_S):
                listed = await asyncio.to_thread(ray.nodes)
                leaving = await asyncio.to_thread(ray_state.get_draining_nodes)
        except (RayError, TimeoutError) as error:
            raise Unavailable(f"Ray did not list its nodes within {NODES_TIMEOUT_S:.0f} s") from error
        return [
            RayNode(
                one["NodeID"],
                one["NodeManagerAddress"],
                one["Resources"],
                one["NodeID"] == self.own_node,
                one["NodeID"] in leaving,
            )
            for one in listed
            if one["Alive"]
        ]

    def launch(
        self, name: str, target: str, resources: Resources, node_id: str | None = None, not_on: Sequence[str] = ()
    ) -> None:
        if name in self._handles:
            return
        shell = type(target.partition(":")[2], (ActorShell,), {})  # for the name under which `ps` shows the process
        options = actor_options(name, resources, node_id)
        if not_on:
            options["scheduling_strategy"] = NodeLabelSchedulingStrategy({NODE_ID_LABEL: NotIn(*not_on)})
        self._handles[name] = ray.remote(shell).options(**options).remote(name, target, str(self._run_dir))

    async def where(self, name: str, timeout_s: float) -> str:
        return await self._ask(name, "where", self._handle(name).where.remote(), timeout_s)

    async def inspect(self, name: str) -> Machine:
        answer = await self._ask(name, "inspect", self._handle(name).inspect.remote(), PLACE_S)
        return from_json(Machine, answer, "machine")

    async def start(self, name: str, config_json: str, timeout_s: float) -> str:
        return await self._ask(name, "start", self._handle(name).start.remote(config_json), timeout_s)

    async def call(self, name: str, method: str, *arguments: str | int, timeout_s: float) -> str:
        return await self._ask(name, method, self._handle(name).call.remote(method, *arguments), timeout_s)

    async def probe(self, name: str) -> Liveness:
        if name not in self._handles:
            return Liveness.DEAD
        try:
            async with asyncio.timeout(PROBE_S):
                await self._handles[name].ping.remote()
        except RayActorError:
            return Liveness.DEAD
        except (RayError, TimeoutError):
            return Liveness.SILENT
        return Liveness.ANSWERING

    def memory_bytes(self, name: str) -> int:
        process = recorded(self._run_dir, name)
        with suppress(psutil.NoSuchProcess):
            used = psutil.Process(process.pid).memory_info() if process and process.is_alive else None
            return used.rss - used.shared if used else 0  # shared: the arena, and files like program code
        return 0

    async def end(self, name: str) -> None:
        if name not in self._handles:
            return
        if await self.probe(name) is Liveness.ANSWERING:
            try:
                await self.call(name, "stop", timeout_s=STOP_S)
            except BatonError as error:
                log.info("%s did not stop by itself: %s", name, error.message)
        await asyncio.to_thread(ray.kill, self._handles[name])
        process = recorded(self._run_dir, name)
        if process and process.is_alive and not await asyncio.to_thread(wait_or_kill, process, STOP_S):
            log.error("process %d of %s does not end", process.pid, name)
        # Only now: after a cancelled call, a second one ends the actor.
        self._handles.pop(name, None)

    def leave(self) -> None:
        ray.kill(ray.get_runtime_context().current_actor)

    def _handle(self, name: str) -> Any:
        if name not in self._handles:
            raise Unavailable(f"{name} is not there")
        return self._handles[name]

    async def _ask(self, name: str, what: str, answer: Any, timeout_s: float) -> str:
        try:
            async with asyncio.timeout(timeout_s):
                return str(await answer)
        except TimeoutError as error:
            raise Unavailable(f"{name} did not answer {what} within {timeout_s:.0f} s") from error
        except RayTaskError as error:
            if isinstance(error.cause, BatonError):
                raise error.cause from error
            log.exception("%s failed in %s", name, what)
            raise ConfigError(f"{name} failed in {what}: {error.cause!r}") from error
        except RayError as error:
            last_line = (str(error).strip() or type(error).__name__).splitlines()[-1].strip()
            raise Unavailable(f"{name} died: {last_line}") from error


def actor_options(name: str, resources: Resources, node_id: str | None) -> dict[str, Any]:
    """Returns the options of a detached actor that Ray never restarts. node_id: None for any node."""
    return {
        "name": name,
        "namespace": ray.get_runtime_context().namespace,
        "lifetime": "detached",
        "num_cpus": resources.num_cpus,
        "num_gpus": resources.num_gpus,
        "memory": resources.memory_bytes or None,
        "resources": dict(resources.custom),
        "max_restarts": 0,
        "max_concurrency": 1000,
        "scheduling_strategy": "DEFAULT" if node_id is None else NodeAffinitySchedulingStrategy(node_id, soft=False),
    }
