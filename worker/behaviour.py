"""What makes a worker a prefill or a decode worker."""

from dataclasses import dataclass

from engine.schedule.batcher import Batcher
from wire.pools import Role
from worker.lifecycle import NewLifecycle


@dataclass(frozen=True)
class Behaviour:
    """How steps are put together, and what a request's life looks like. A worker serves the one call of its role."""

    role: Role
    batcher: Batcher
    new_lifecycle: NewLifecycle
