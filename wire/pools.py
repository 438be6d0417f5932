"""The nouns that controller, router and workers share: roles, pools, their workers and the states of these."""

from dataclasses import dataclass
from enum import Enum

from wire.ids import WorkerId


class Role(Enum):
    """The work of a worker, and with it the pool it is in."""

    PREFILL = "prefill"
    DECODE = "decode"


@dataclass(frozen=True)
class PoolSizes:
    """Number of workers of each role."""

    prefill: int = 1
    decode: int = 1

    def __getitem__(self, role: Role) -> int:
        return self.prefill if role is Role.PREFILL else self.decode


class WorkerState(Enum):
    """The stages of a worker's life, and LOST where the router cannot reach it; a BROKEN one ends itself."""

    STARTING = "starting"
    READY = "ready"
    DRAINING = "draining"
    BROKEN = "broken"
    LOST = "lost"


@dataclass(frozen=True)
class Worker:
    """A worker of a pool. It has an address once it serves, until nothing is left to do there."""

    id: WorkerId
    role: Role
    address: str = ""
    state: WorkerState = WorkerState.STARTING
