"""A prefill worker as a Ray actor."""

from prefill_worker.behaviour import prefill_behaviour
from worker.actor import WorkerActor
from worker.behaviour import Behaviour
from worker.config import WorkerConfig


class PrefillActor(WorkerActor):
    """See WorkerActor."""

    def make_behaviour(self, config: WorkerConfig) -> Behaviour:
        return prefill_behaviour(config.batch, config.pool.block_size)
