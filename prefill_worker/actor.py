"""A prefill worker as a Ray actor."""

from prefill_worker.behaviour import least_chunk_tokens, prefill_behaviour
from worker.actor import WorkerActor
from worker.config import WorkerConfig
from worker.job import Behaviour


class PrefillActor(WorkerActor):
    """The actor of a prefill worker; see WorkerActor."""

    def make_behaviour(self, config: WorkerConfig) -> Behaviour:
        least_tokens = None if config.model.device == "cpu" else least_chunk_tokens(config.model.served.layout)
        return prefill_behaviour(config.batch, config.block_size, least_tokens)
