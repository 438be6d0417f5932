"""A decode worker as a Ray actor."""

from decode_worker.role import decode_role
from worker.actor import WorkerActor
from worker.config import WorkerConfig
from worker.role import Role


class DecodeActor(WorkerActor):
    """See WorkerActor."""

    def make_role(self, config: WorkerConfig) -> Role:
        return decode_role(config.batch, config.pool.block_size)
