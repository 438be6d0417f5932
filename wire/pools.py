"""The control plane's nouns: roles, pools, workers; and the messages that calls of Ray and `baton up` carry as JSON."""

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


@dataclass(frozen=True)
class Addresses:
    """Addresses of an actor, or of a cluster: the answer to each start; "" for none.

    public: gRPC of router or worker, block port of a node's service. local: where clients on this machine need no TLS;
    the public address, where that is so there. operator: the command line's. metrics: Prometheus'. http: OpenAI's.
    """

    public: str = ""
    local: str = ""
    operator: str = ""
    metrics: str = ""
    http: str = ""


@dataclass(frozen=True)
class HeadAnswer:
    """Answer of the process of Ray to `baton up`: Ray's address, later the cluster's; or a failure in place of one."""

    ray_address: str = ""
    addresses: Addresses | None = None
    failure: str = ""


@dataclass(frozen=True)
class MemberList:
    """The sizes of the pools, and the workers that the router may use."""

    sizes: PoolSizes
    workers: tuple[Worker, ...]


@dataclass(frozen=True)
class RefusedWorkers:
    """The router's reasons not to use members, by worker id."""

    reasons: dict[WorkerId, str]


@dataclass(frozen=True)
class SizesAsked:
    """An order of `baton scale`; None leaves a pool as it is."""

    prefill: int | None = None
    decode: int | None = None


@dataclass(frozen=True)
class OrderNumbers:
    """The numbers of the orders that the controller has taken, by role."""

    numbers: dict[str, int]


@dataclass(frozen=True)
class Shares:
    """Tenants' shares of an arena, by the hex digests of their namespace roots."""

    by_digest: dict[str, float]


@dataclass(frozen=True)
class Drained:
    """Numbers left at the end of the grace. unfinished: attempts of a worker, which go back to the router.

    unfetched: requests that hold blocks of a node. unwritten: blocks of a node without a copy in a cold tier.
    """

    unfinished: int = 0
    unfetched: int = 0
    unwritten: int = 0
