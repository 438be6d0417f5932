"""What the pools are, and what has to be done so that they become what they should be. Pure: events in, actions out.

starting -> ready -> draining -> gone
    \\----------\\-----------\\---> lost, and replaced unless it was to go anyway
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum

from wire.errors import InvalidRequest, WorkerNotFound
from wire.ids import WorkerId
from wire.pools import PoolSizes, Role

MAX_PAUSE_S = 30.0


class Stage(Enum):
    """How far a worker has come."""

    STARTING = "starting"
    READY = "ready"
    DRAINING = "draining"


@dataclass(frozen=True)
class Worker:
    """A worker from the decision to start it until it is gone. `address`: where it serves, while it does."""

    worker_id: WorkerId
    role: Role
    stage: Stage = Stage.STARTING
    address: str | None = None


@dataclass(frozen=True)
class Start:
    """Start a worker."""

    worker_id: WorkerId
    role: Role


@dataclass(frozen=True)
class Drain:
    """Let a worker finish what it has, then stop it."""

    worker_id: WorkerId


@dataclass(frozen=True)
class Stop:
    """End a worker that has no requests yet."""

    worker_id: WorkerId


Action = Start | Drain | Stop


class Pools:
    """Both pools. Has no clock: `now_s` are readings of one monotonic clock.

    workers: those that there are already. num_named: of each role, how many names have been given: none is given twice.
    """

    def __init__(
        self, sizes: PoolSizes, workers: Sequence[Worker] = (), num_named: Mapping[Role, int] | None = None
    ) -> None:
        self.sizes = sizes
        self._workers = {worker.worker_id: worker for worker in workers}
        self._num_named = Counter[Role](num_named or {})
        self._num_failures = Counter[Role]()
        self._paused_until_s: dict[Role, float] = {}

    def __iter__(self) -> Iterator[Worker]:
        return iter(tuple(self._workers.values()))

    def __contains__(self, worker_id: WorkerId) -> bool:
        return worker_id in self._workers

    def __getitem__(self, worker_id: WorkerId) -> Worker:
        """Raises WorkerNotFound."""
        if worker_id not in self._workers:
            raise WorkerNotFound("no worker of that id", worker_id=worker_id[:64])
        return self._workers[worker_id]

    def num_named(self, role: Role) -> int:
        return self._num_named[role]

    @property
    def are_as_asked(self) -> bool:
        """Whether each pool has its size, all workers are ready, and none is left that should go."""
        return all(worker.stage is Stage.READY for worker in self) and all(
            len(self._of(role)) == self.sizes[role] for role in Role
        )

    def resize(self, prefill: int | None, decode: int | None) -> None:
        """Raises InvalidRequest, and changes nothing, for sizes that cannot be. None leaves a pool as it is."""
        self.sizes = _resized(self.sizes, prefill, decode)

    def release(self, worker_id: WorkerId) -> Drain | None:
        """Shrinks a worker's pool by that worker; None if it drains already. WorkerNotFound, InvalidRequest."""
        worker = self[worker_id]
        if worker.stage is Stage.DRAINING:
            return None
        if worker.role is Role.PREFILL:
            self.resize(max(0, self.sizes.prefill - 1), None)
        else:
            self.resize(None, self.sizes.decode - 1)
        self._set_stage(worker, Stage.DRAINING)
        return Drain(worker_id)

    def became_ready(self, worker_id: WorkerId, address: str) -> None:
        """Ends what was held against its role. A worker that was to go meanwhile still goes."""
        worker = self[worker_id]
        self._num_failures[worker.role] = 0
        if worker.stage is Stage.STARTING:
            self._workers[worker_id] = replace(worker, stage=Stage.READY, address=address)

    def finished(self, worker_id: WorkerId) -> None:
        """A draining worker serves nobody any more."""
        self._workers[worker_id] = replace(self[worker_id], address=None)

    def forget(self, worker_id: WorkerId) -> None:
        """A worker is gone, and nothing is held against its role."""
        self._workers.pop(worker_id, None)

    def lost(self, worker_id: WorkerId, now_s: float) -> None:
        """A worker died, or did not start. If that happens again and again, the next start waits longer each time."""
        worker = self._workers.pop(worker_id, None)
        if worker is not None and worker.stage is Stage.STARTING:
            self._num_failures[worker.role] += 1
            pause_s = min(MAX_PAUSE_S, 2.0 ** (self._num_failures[worker.role] - 1))
            self._paused_until_s[worker.role] = now_s + pause_s

    def plan(self, now_s: float) -> list[Action]:
        """What to do now; the books have it as done. Nothing, if all is as asked or under way."""
        return [action for role in Role for action in self._plan(role, now_s)]

    def _plan(self, role: Role, now_s: float) -> list[Action]:
        surplus = len(self._of(role)) - self.sizes[role]
        if surplus > 0:
            return [self._dismiss(worker) for worker in self._dispensable(role)[:surplus]]
        if now_s < self._paused_until_s.get(role, now_s):
            return []
        return [self._hire(role) for _ in range(-surplus)]

    def _of(self, role: Role) -> list[Worker]:
        """Workers that count for a pool's size."""
        return [worker for worker in self if worker.role is role and worker.stage is not Stage.DRAINING]

    def _dispensable(self, role: Role) -> list[Worker]:
        """Those that can go, the one that knows least first: not yet ready, then the youngest."""
        return sorted(self._of(role), key=lambda worker: worker.stage is not Stage.READY)[::-1]

    def _hire(self, role: Role) -> Start:
        worker_id = WorkerId(f"{role.value}-{self._num_named[role]}")
        self._num_named[role] += 1
        self._workers[worker_id] = Worker(worker_id, role)
        return Start(worker_id, role)

    def _dismiss(self, worker: Worker) -> Drain | Stop:
        self._set_stage(worker, Stage.DRAINING)
        return Stop(worker.worker_id) if worker.stage is Stage.STARTING else Drain(worker.worker_id)

    def _set_stage(self, worker: Worker, stage: Stage) -> None:
        self._workers[worker.worker_id] = replace(worker, stage=stage)


def _resized(sizes: PoolSizes, prefill: int | None, decode: int | None) -> PoolSizes:
    """Raises InvalidRequest for what no cluster can work with."""
    resized = PoolSizes(sizes.prefill if prefill is None else prefill, sizes.decode if decode is None else decode)
    if resized.prefill < 0:
        raise InvalidRequest("prefill", "must not be negative")
    if resized.decode < 1:
        raise InvalidRequest("decode", "at least one decode worker must stay")
    return resized
