"""The control plane's nouns (roles, pools, workers), and the messages that Ray's calls and `baton up` carry as JSON."""

from dataclasses import dataclass
from enum import Enum

from wire.ids import WorkerId
from wire.served_model import ServedModel


class Role(Enum):
    """The work of a worker, which determines its pool."""

    PREFILL = "prefill"
    DECODE = "decode"

    @property
    def other(self) -> "Role":
        return Role.DECODE if self is Role.PREFILL else Role.PREFILL


@dataclass(frozen=True)
class PoolSizes:
    """Number of workers of each role."""

    prefill: int = 1
    decode: int = 1

    def __getitem__(self, role: Role) -> int:
        return self.prefill if role is Role.PREFILL else self.decode


class WorkerState(Enum):
    """The stages of a worker's life. LOST: the router cannot reach it. BROKEN: the worker ends itself.

    CHANGING: the worker leaves the other pool, and is not READY in its own yet.
    """

    STARTING = "starting"
    READY = "ready"
    CHANGING = "changing"
    DRAINING = "draining"
    BROKEN = "broken"
    LOST = "lost"


@dataclass(frozen=True)
class Worker:
    """A worker of a pool. It has an address from its start until its drain is over."""

    id: WorkerId
    role: Role
    address: str = ""
    state: WorkerState = WorkerState.STARTING


@dataclass(frozen=True)
class Addresses:
    """Addresses of an actor or a cluster, the answer to each start; "" for none, several routers' with commas between.

    public: gRPC of a router or worker, block port of a node's service. local: for clients on this machine, without TLS;
    may be the public address. operator: for the command line. metrics: for Prometheus. http: the gateways'.
    """

    public: str = ""
    local: str = ""
    operator: str = ""
    metrics: str = ""
    http: str = ""


@dataclass(frozen=True)
class HeadAnswer:
    """The answer of Ray's process to `baton up`: Ray's address, later the cluster's, or a failure."""

    ray_address: str = ""
    addresses: Addresses | None = None
    failure: str = ""


def node_name(node_id: str) -> str:
    """Returns the node's name of an arena's id, which is NAME or NAME#TAG."""
    return node_id.partition("#")[0]


@dataclass(frozen=True)
class MemberList:
    """The sizes of the pools, and the workers that the router may use.

    models: the versions of the model that these workers have, the wanted one first; none before the first roll.
    """

    sizes: PoolSizes
    workers: tuple[Worker, ...]
    models: tuple[ServedModel, ...] = ()


@dataclass(frozen=True)
class MembersAnswer:
    """A router's answer to a MemberList. reasons: why it does not use a worker, by worker id.

    needed: the workers that alone can go on with answers of an open request, whose version no other decode worker has;
    such a worker is drained once no router needs it.
    """

    reasons: dict[WorkerId, str]
    needed: tuple[WorkerId, ...] = ()


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
    """Tenants' shares of an arena, by the hex digests of their namespace roots.

    The roots of one tenant in several versions of the model have commas between: they have one share together.
    """

    by_digest: dict[str, float]


@dataclass(frozen=True)
class Drained:
    """Work left at the end of a drain's grace. unfinished: attempts of a worker, which go back to the router.

    unfetched: requests that hold blocks of a node. unwritten: blocks of a node without a copy in a cold tier.
    """

    unfinished: int = 0
    unfetched: int = 0
    unwritten: int = 0
