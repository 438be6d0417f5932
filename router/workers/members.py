"""The workers that the router knows: their description, assigned work and state. Pure."""

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass, field
from functools import cached_property

from router.workers.line import Line
from wire.errors import PairRefused, WorkerNotFound
from wire.ids import BlockKey, WorkerId, agreed_version
from wire.pb import worker_pb2
from wire.pools import PoolSizes, Role, Worker, WorkerState
from wire.served_model import ServedModel

LONG_STEP_S = 5.0
"""An engine whose step takes longer may hang, or compute a long prompt on a CPU: its worker is chosen last."""


Version = tuple[bytes, bytes]
"""The fingerprint and the KV layout that workers must share to be paired."""


def version_of(model: ServedModel) -> Version:
    return model.fingerprint, model.layout.encode()


@dataclass(kw_only=True)
class Member:
    """A worker of the pools. `num_choices` and `num_tokens` count assigned, unfinished work.

    num_prompt_tokens: prompt tokens that a decode worker got without prefill and has not computed yet. under_way:
    blocks of the prompts of assigned work. prefill_token_s: seconds of prefill a token, by its last status.
    engine_silent_s: time since its engine's last step, by its last status or token, and longer if no status came.
    is_refusing: whether a call on it failed, and it has not answered since that it takes attempts.
    """

    worker: Worker
    info: worker_pb2.WorkerInfo
    line: Line
    state: WorkerState = WorkerState.READY
    is_refusing: bool = False
    num_choices: int = 0
    num_tokens: int = 0
    num_prompt_tokens: int = 0
    engine_silent_s: float = 0.0
    prefill_token_s: float | None = None
    under_way: dict[object, Sequence[BlockKey]] = field(default_factory=dict)

    @property
    def id(self) -> WorkerId:
        return self.worker.id

    @property
    def role(self) -> Role:
        return self.worker.role

    @cached_property
    def version(self) -> Version:
        return self.info.fingerprint, self.info.layout

    @property
    def is_silent(self) -> bool:
        return self.engine_silent_s >= LONG_STEP_S

    def num_under_way(self, keys: Sequence[BlockKey]) -> int:
        """Counts the leading blocks of a prompt that this worker is computing or reading for another prompt."""
        return max((_num_common(keys, others) for others in self.under_way.values()), default=0)

    @contextmanager
    def assigned(self, num_choices: int, num_tokens: int, keys: Sequence[BlockKey] = ()) -> Iterator[None]:
        """Counts work as this worker's within the context. keys: the blocks of its prompt."""
        work = object()
        self.num_choices += num_choices
        self.num_tokens += num_tokens
        self.under_way[work] = keys
        try:
            yield
        finally:
            del self.under_way[work]
            self.num_choices -= num_choices
            self.num_tokens -= num_tokens

    @contextmanager
    def prefilling(self, num_tokens: int) -> Iterator[Callable[[], None]]:
        """Counts tokens of a prompt until the yielded function is called, or the context ends."""
        left = [num_tokens]
        self.num_prompt_tokens += num_tokens

        def end() -> None:
            while left:
                self.num_prompt_tokens -= left.pop()

        try:
            yield end
        finally:
            end()


class Members:
    """The workers of the cluster. Each has a version of the model that the router serves; two of one can be paired.

    versions: the wanted version first, which all workers have in the end. are_complete: whether the workers of these
    versions have been taken in.
    """

    def __init__(self, fingerprint: bytes, layout: bytes) -> None:
        self._whole = self
        self._sizes = PoolSizes(0, 0)
        self.versions: list[Version] = [(fingerprint, layout)]
        self._members: dict[WorkerId, Member] = {}
        self._shown: Version | None = None
        self.are_complete = True

    def __iter__(self) -> Iterator[Member]:
        return iter([one for one in self._members.values() if self._shown in (None, one.version)])

    def __contains__(self, worker_id: WorkerId) -> bool:
        return worker_id in self._members and self._shown in (None, self._members[worker_id].version)

    def __getitem__(self, worker_id: WorkerId) -> Member:
        """Raises WorkerNotFound."""
        if worker_id not in self:
            raise WorkerNotFound("no worker of that id", worker_id=worker_id[:64])
        return self._members[worker_id]

    @property
    def sizes(self) -> PoolSizes:
        """The pools' sizes that the controller told last, of all versions together."""
        return self._whole._sizes

    @sizes.setter
    def sizes(self, sizes: PoolSizes) -> None:
        self._whole._sizes = sizes

    def add(self, member: Member) -> None:
        """Adds a worker. Raises PairRefused if it can be paired with no other."""
        info = member.info
        if (info.worker_id, info.role) != (member.id, member.role.value):
            raise PairRefused("another worker answers at this address", worker_id=member.id)
        oldest = info.oldest_protocol_version or info.protocol_version
        is_understood = agreed_version(oldest, info.protocol_version) is not None
        self._require_equal(member, "protocol version", is_understood)
        self._require_equal(member, "model fingerprint", info.fingerprint in dict(self.versions))
        self._require_equal(member, "KV layout", member.version in self.versions)
        self._members[member.id] = member

    def remove(self, worker_id: WorkerId) -> Member:
        """Raises WorkerNotFound."""
        member = self[worker_id]
        del self._members[worker_id]
        return member

    @property
    def are_ending(self) -> bool:
        """Whether these are the members of a version that no worker to come will have."""
        return self._shown not in (None, self.versions[0])

    def ready(self, role: Role) -> list[Member]:
        """Lists the READY workers."""
        return [member for member in self if member.role is role and member.state is WorkerState.READY]

    def able(self, role: Role) -> list[Member]:
        """Lists the workers that take attempts: READY ones; else, of a version that ends, DRAINING decode workers.

        The controller drains these once the version has no open request. Workers that refuse are left out.
        """
        if (ready := self.ready(role)) or role is Role.PREFILL or not self.are_ending:
            return ready
        of_role = (member for member in self if member.role is role)
        return [member for member in of_role if member.state is WorkerState.DRAINING and not member.is_refusing]

    def only(self, worker_id: WorkerId) -> "Members":
        """Returns members with this worker as the only one of its role; if it prefills, with all decode workers.

        Raises WorkerNotFound for a worker that is not ready.
        """
        if (member := self[worker_id]).state is not WorkerState.READY:
            raise WorkerNotFound("the worker takes no work now", worker_id=worker_id)
        chosen, alike = Members(*member.version), self.of(member.version)
        for one in [member, *(alike.able(Role.DECODE) if member.role is Role.PREFILL else [])]:
            chosen.add(one)
        return chosen

    def of(self, version: Version) -> "Members":
        """Returns a view of the members of one version, as they are at each time."""
        members = copy(self)
        members._shown = version
        return members

    @property
    def has_lost_decode(self) -> bool:
        """Whether no decode worker of the version is left, and none will come."""
        return self.are_ending and self._whole.are_complete and all(one.role is Role.PREFILL for one in self)

    @property
    def num_pool_blocks(self) -> int | None:
        """Blocks of the smallest pool; None without workers."""
        return min((member.info.num_blocks for member in self), default=None)

    @property
    def num_arena_blocks(self) -> dict[str, int]:
        """Blocks of each arena, by its id, as its workers report."""
        return {member.info.node_id: member.info.num_arena_blocks for member in self}

    def check(self) -> list[str]:
        """Lists assigned work and attempts on lines; empty while no request is open."""
        busy = [member.id for member in self if member.num_choices or member.num_tokens or member.num_prompt_tokens]
        under_way = [
            f"{member.line.num_attempts} attempts on the line to worker {member.id}"
            for member in self
            if member.line.num_attempts
        ]
        return [*(f"worker {worker} has work of no request" for worker in busy), *under_way]

    def _require_equal(self, member: Member, what: str, equal: bool) -> None:
        if not equal:
            raise PairRefused(f"worker has another {what} than the router", worker_id=member.id)


def _num_common(keys: Sequence[BlockKey], others: Sequence[BlockKey]) -> int:
    """Counts equal leading keys: keys are chained, so all keys after a different key differ."""
    return bisect_left(range(min(len(keys), len(others))), True, key=lambda place: keys[place] != others[place])
