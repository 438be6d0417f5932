"""A decode worker as a Ray actor."""

from decode_worker.behaviour import decode_behaviour
from worker.actor import WorkerActor
from worker.behaviour import Behaviour
from worker.config import WorkerConfig


class DecodeActor(WorkerActor):
    """See WorkerActor."""

    def make_behaviour(self, config: WorkerConfig) -> Behaviour:
        return decode_behaviour(config.batch, config.pool.block_size)
