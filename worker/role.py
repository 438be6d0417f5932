"""What makes a worker a prefill or a decode worker."""

from dataclasses import dataclass
from enum import Enum

from engine.batcher import Batcher
from worker.lifecycle import NewLifecycle


class RoleName(Enum):
    """As in WorkerInfo and WorkerStatus."""

    PREFILL = "prefill"
    DECODE = "decode"


@dataclass(frozen=True)
class Role:
    """How steps are put together, and what a request's life looks like. A worker serves the one call of its role."""

    name: RoleName
    batcher: Batcher
    new_lifecycle: NewLifecycle
