"""A prefill worker as a Ray actor."""

from functools import partial

from engine.request import HandOff
from prefill_worker.batcher import PrefillBatcher
from prefill_worker.job import PrefillJob
from wire.pools import Role
from worker.actor import WorkerActor
from worker.config import BatchSettings, WorkerConfig
from worker.job import Behaviour


def prefill_behaviour(batch: BatchSettings, block_size: int) -> Behaviour:
    """Puts a prefill worker's batcher and jobs together. `block_size`: tokens of a block, for the timeline."""
    batcher = PrefillBatcher(batch.max_step_tokens, batch.max_running, batch.patience_tokens)
    return Behaviour(Role.PREFILL, batcher, HandOff, partial(PrefillJob, block_size=block_size))


class PrefillActor(WorkerActor):
    """The actor of a prefill worker; see WorkerActor."""

    def make_behaviour(self, config: WorkerConfig) -> Behaviour:
        return prefill_behaviour(config.batch, config.pool.block_size)
