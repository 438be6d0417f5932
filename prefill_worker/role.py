"""What makes a worker a prefill worker."""

from functools import partial

from prefill_worker.batcher import PrefillBatcher
from prefill_worker.lifecycle import PrefillLifecycle
from worker.config import BatchSettings
from worker.role import Role, RoleName


def prefill_role(batch: BatchSettings, block_size: int) -> Role:
    """`block_size`: tokens of a block, as the worker's timeline counts them."""
    batcher = PrefillBatcher(batch.max_step_tokens, batch.max_running, batch.patience_tokens)
    return Role(RoleName.PREFILL, batcher, partial(PrefillLifecycle, block_size=block_size))
