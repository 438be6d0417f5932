"""What makes a worker a decode worker."""

from functools import partial

from decode_worker.batcher import DecodeBatcher
from decode_worker.lifecycle import DecodeLifecycle
from worker.config import BatchSettings
from worker.role import Role, RoleName


def decode_role(batch: BatchSettings, block_size: int) -> Role:
    """`block_size`: tokens of a block, as the worker's timeline counts them."""
    batcher = DecodeBatcher(batch.max_step_tokens, batch.max_running, batch.max_chunk_tokens)
    return Role(RoleName.DECODE, batcher, partial(DecodeLifecycle, block_size=block_size))
