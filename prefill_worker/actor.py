"""A prefill worker as a Ray actor."""

from prefill_worker.role import prefill_role
from worker.actor import WorkerActor
from worker.config import WorkerConfig
from worker.role import Role


class PrefillActor(WorkerActor):
    """See WorkerActor."""

    def make_role(self, config: WorkerConfig) -> Role:
        return prefill_role(config.batch, config.pool.block_size)
