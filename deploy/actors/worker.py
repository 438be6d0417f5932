"""A worker of either pool as a Ray actor: the place where the roles' behaviours meet one process."""

from decode_worker.behaviour import decode_behaviour
from prefill_worker.behaviour import least_chunk_tokens, prefill_behaviour
from wire.pools import Role
from worker.actor import WorkerActor
from worker.config import WorkerConfig
from worker.job import Behaviour


class PoolWorker(WorkerActor):
    """The actor of a worker, which begins in its configuration's role and may change it; see WorkerActor."""

    def make_behaviour(self, config: WorkerConfig, role: Role) -> Behaviour:
        if role is Role.DECODE:
            return decode_behaviour(config.batch, config.block_size)
        least_tokens = None if config.model.device == "cpu" else least_chunk_tokens(config.model.served.layout)
        return prefill_behaviour(config.batch, config.block_size, least_tokens)
