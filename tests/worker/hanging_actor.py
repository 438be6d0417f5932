"""A decode worker whose engine hangs at its first request."""

import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace

from deploy.actors.worker import PoolWorker
from engine.schedule.batcher import UNLEARNED, Batcher, Candidate, Pages, Plan, StepCosts
from wire.pools import Role
from worker.config import WorkerConfig
from worker.job import Behaviour


@dataclass(frozen=True)
class HangingBatcher:
    """Plans as another one does, while there is nothing to do."""

    batcher: Batcher

    def plan(
        self,
        waiting: Sequence[Candidate],
        running: Sequence[Candidate],
        pages: Pages,
        costs: StepCosts = UNLEARNED,
    ) -> Plan:
        if waiting:
            threading.Event().wait()
        return self.batcher.plan(waiting, running, pages, costs)


class HangingActor(PoolWorker):
    """See WorkerActor."""

    def make_behaviour(self, config: WorkerConfig, role: Role) -> Behaviour:
        behaviour = super().make_behaviour(config, role)
        return replace(behaviour, batcher=HangingBatcher(behaviour.batcher))
