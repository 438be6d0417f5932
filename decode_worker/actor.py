"""A decode worker as a Ray actor."""

from functools import partial

from decode_worker.batcher import DecodeBatcher
from decode_worker.job import DecodeJob
from engine.request import EngineRequest
from wire.pools import Role
from worker.actor import WorkerActor
from worker.config import BatchSettings, WorkerConfig
from worker.job import Behaviour


def decode_behaviour(batch: BatchSettings, block_size: int) -> Behaviour:
    """Puts a decode worker's batcher and jobs together. `block_size`: tokens of a block, for the timeline."""
    batcher = DecodeBatcher(batch.max_step_tokens, batch.max_running, batch.max_chunk_tokens)
    return Behaviour(Role.DECODE, batcher, EngineRequest, partial(DecodeJob, block_size=block_size))


class DecodeActor(WorkerActor):
    """The actor of a decode worker; see WorkerActor."""

    def make_behaviour(self, config: WorkerConfig) -> Behaviour:
        return decode_behaviour(config.batch, config.pool.block_size)
