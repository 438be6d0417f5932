"""What makes a worker a prefill worker."""

from functools import partial

from prefill_worker.batcher import PrefillBatcher
from prefill_worker.lifecycle import PrefillLifecycle
from wire.pools import Role
from worker.behaviour import Behaviour
from worker.config import BatchSettings


def prefill_behaviour(batch: BatchSettings, block_size: int) -> Behaviour:
    """`block_size`: tokens of a block, as the worker's timeline counts them."""
    batcher = PrefillBatcher(batch.max_step_tokens, batch.max_running, batch.patience_tokens)
    return Behaviour(Role.PREFILL, batcher, partial(PrefillLifecycle, block_size=block_size))
