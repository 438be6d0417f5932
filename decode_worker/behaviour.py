"""What makes a worker a decode worker."""

from functools import partial

from decode_worker.batcher import DecodeBatcher
from decode_worker.lifecycle import DecodeLifecycle
from wire.pools import Role
from worker.behaviour import Behaviour
from worker.config import BatchSettings


def decode_behaviour(batch: BatchSettings, block_size: int) -> Behaviour:
    """`block_size`: tokens of a block, as the worker's timeline counts them."""
    batcher = DecodeBatcher(batch.max_step_tokens, batch.max_running, batch.max_chunk_tokens)
    return Behaviour(Role.DECODE, batcher, partial(DecodeLifecycle, block_size=block_size))
