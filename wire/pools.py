"""The words that controller, router and workers share: roles, pool sizes, listed workers."""

from dataclasses import dataclass
from enum import Enum

from wire.ids import WorkerId


class Role(Enum):
    """What a worker does, and with it the pool it is in."""

    PREFILL = "prefill"
    DECODE = "decode"


@dataclass(frozen=True)
class PoolSizes:
    """Number of workers of each role."""

    prefill: int
    decode: int

    def __getitem__(self, role: Role) -> int:
        return self.prefill if role is Role.PREFILL else self.decode


@dataclass(frozen=True)
class ListedWorker:
    """A worker as the controller lists it for the router."""

    worker_id: WorkerId
    role: Role
    address: str
    draining: bool = False
