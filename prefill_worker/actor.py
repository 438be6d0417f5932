"""A prefill worker as a Ray actor."""

from prefill_worker.behaviour import prefill_behaviour
from worker.actor import WorkerActor
from worker.config import WorkerConfig
from worker.job import Behaviour


class PrefillActor(WorkerActor):
    """The actor of a prefill worker; see WorkerActor."""

    def make_behaviour(self, config: WorkerConfig) -> Behaviour:
        return prefill_behaviour(config.batch, config.block_size)
