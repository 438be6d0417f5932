"""The workers that the router knows: who they are, what they have been given, and whether more may be. Pure."""

from collections.abc import Iterator
from dataclasses import dataclass

from router.placement.policies import Load
from router.workers.worker_client import WorkerClient
from wire.errors import PairRefused, WorkerNotFound
from wire.ids import PROTOCOL_VERSION, WorkerId
from wire.pb import worker_pb2
from wire.pools import Role, WorkerState


@dataclass
class Member:
    """One worker. `num_choices` and `num_tokens` are what was sent there and is not over.

    engine_silent_s: how long ago its engine last finished a step, as of its last status; more if that did not come.
    """

    worker_id: WorkerId
    role: Role
    address: str
    info: worker_pb2.WorkerInfo
    client: WorkerClient
    state: WorkerState = WorkerState.READY
    num_choices: int = 0
    num_tokens: int = 0
    engine_silent_s: float = 0.0

    @property
    def load(self) -> Load:
        return Load(self.worker_id, self.num_choices, self.num_tokens, self.engine_silent_s)


class Members:
    """All workers in here run the model and layout that the router serves, so any two can be paired."""

    def __init__(self, fingerprint: bytes, layout: bytes) -> None:
        self._fingerprint = fingerprint
        self._layout = layout
        self._members: dict[WorkerId, Member] = {}

    def __iter__(self) -> Iterator[Member]:
        return iter(tuple(self._members.values()))

    def __contains__(self, worker_id: WorkerId) -> bool:
        return worker_id in self._members

    def __getitem__(self, worker_id: WorkerId) -> Member:
        """Raises WorkerNotFound."""
        if worker_id not in self._members:
            raise WorkerNotFound("no worker of that id", worker_id=worker_id[:64])
        return self._members[worker_id]

    def add(self, member: Member) -> None:
        """Raises PairRefused if the worker would not fit together with the others."""
        info = member.info
        self._require_equal(member, "protocol version", info.protocol_version == PROTOCOL_VERSION)
        self._require_equal(member, "model fingerprint", info.fingerprint == self._fingerprint)
        self._require_equal(member, "KV layout", info.layout == self._layout)
        self._members[member.worker_id] = member

    def remove(self, worker_id: WorkerId) -> Member:
        """Raises WorkerNotFound."""
        member = self[worker_id]
        del self._members[worker_id]
        return member

    def ready(self, role: Role) -> list[Member]:
        return [one for one in self if one.role is role and one.state is WorkerState.READY]

    @property
    def num_pool_blocks(self) -> int | None:
        """Blocks of the smallest pool that a request may meet; None without workers."""
        return min((one.info.num_blocks for one in self), default=None)

    @property
    def num_arena_blocks(self) -> int:
        """Blocks of the node's arena, as its workers say."""
        return max((one.info.num_arena_blocks for one in self), default=0)

    def _require_equal(self, member: Member, what: str, equal: bool) -> None:
        if not equal:
            raise PairRefused(f"worker has another {what} than the router", worker_id=member.worker_id)
