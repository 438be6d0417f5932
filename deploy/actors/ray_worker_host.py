"""Workers as Ray actors."""

import asyncio
import json
from pathlib import Path

from deploy.actors.liveness import Liveness
from deploy.actors.ray_actor import RayActor, Resources
from wire.ids import WorkerId
from wire.pools import Role, Worker
from worker.config import WorkerTemplate

START_TIMEOUT_S = 900.0
DRAIN_MARGIN_S = 10.0
_TARGETS = {Role.PREFILL: "prefill_worker.actor:PrefillActor", Role.DECODE: "decode_worker.actor:DecodeActor"}


class RayWorkerHost:
    """A WorkerHost. Processes begin at once, and go to work when the node's service is up: `node_is_up`."""

    def __init__(
        self, template: WorkerTemplate, resources: Resources, run_dir: Path, node_is_up: asyncio.Event
    ) -> None:
        self._template = template
        self._resources = resources
        self._run_dir = run_dir
        self._node_is_up = node_is_up
        self._actors: dict[WorkerId, RayActor] = {}

    async def start(self, worker: Worker) -> str:
        if worker.id not in self._actors:
            self._actors[worker.id] = RayActor.create(worker.id, _TARGETS[worker.role], self._resources, self._run_dir)
        actor = self._actors[worker.id]
        await self._node_is_up.wait()
        answer = await actor.start(self._template.config_of(worker).to_json(), START_TIMEOUT_S)
        address: str = json.loads(answer)["address"]
        return address

    async def adopt(self, worker_id: WorkerId) -> bool:
        actor = await asyncio.to_thread(RayActor.find, worker_id, self._run_dir)
        if actor is not None:
            self._actors[worker_id] = actor
        return actor is not None

    async def probe(self, worker_id: WorkerId) -> Liveness:
        return await self._actors[worker_id].probe() if worker_id in self._actors else Liveness.DEAD

    async def drain(self, worker_id: WorkerId, grace_s: int) -> int:
        answer = await self._actors[worker_id].call("drain", grace_s, timeout_s=grace_s + DRAIN_MARGIN_S)
        num_unfinished: int = json.loads(answer)["unfinished"]
        return num_unfinished

    async def end(self, worker_id: WorkerId) -> None:
        if worker_id in self._actors:
            await self._actors[worker_id].end()
            # Only now: a worker whose end was broken off is to be ended again.
            self._actors.pop(worker_id, None)
