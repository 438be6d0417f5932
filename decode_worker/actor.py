"""A decode worker as a Ray actor."""

from decode_worker.behaviour import decode_behaviour
from worker.actor import WorkerActor
from worker.config import WorkerConfig
from worker.job import Behaviour


class DecodeActor(WorkerActor):
    """The actor of a decode worker; see WorkerActor."""

    def make_behaviour(self, config: WorkerConfig) -> Behaviour:
        return decode_behaviour(config.batch, config.block_size)
