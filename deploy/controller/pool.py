"""A pool as it stands, and what follows for its workers: a fold over them, read by orders, plans and reports. Pure."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from wire.ids import WorkerId
from wire.pools import Role, Worker, WorkerState


@dataclass(frozen=True)
class Pool:
    """The workers of a role. size: the requested number. surge: the number of workers that a roll adds for a while.

    vacating: ids of workers whose places others take, for their node drains.
    """

    role: Role
    size: int
    surge: int
    workers: Sequence[Worker]
    vacating: Collection[WorkerId]

    @property
    def staying(self) -> list[Worker]:
        """The workers that keep their places, in the order in which they joined the pool."""
        return [one for one in self.workers if one.id not in self.vacating and one.state is not WorkerState.DRAINING]

    @property
    def ready(self) -> list[Worker]:
        return [one for one in self.staying if one.state is WorkerState.READY]

    @property
    def surplus(self) -> int:
        """The number of workers to give up; negative for workers that are missing."""
        return len(self.staying) - self.size - self.surge

    @property
    def is_as_asked(self) -> bool:
        """Whether the pool has its size, all of its workers are READY, and none drains."""
        return len(self.workers) == len(self.ready) == self.size

    def given(self, other: "Pool") -> list[Worker]:
        """Returns surplus workers that fill places of the other pool: CHANGING workers, then the youngest READY ones.

        A CHANGING worker goes back when it is READY, and is neither drained nor replaced before. A pool that keeps
        workers keeps a READY one.
        """
        changing = (one for one in self.staying if one.state is WorkerState.CHANGING)
        spare = reversed(self.ready[min(1, self.size) :])
        return [*changing, *spare][: max(0, min(self.surplus, -other.surplus))]

    def dismissed(self, given: Sequence[Worker]) -> list[Worker]:
        """Returns the workers to drain: vacating workers, and surplus workers, the youngest first, READY workers last.

        The last READY decode worker whose place another takes waits until another is READY. given: to the other pool.
        """
        going = [one for one in self.workers if one.id in self.vacating and one.state is not WorkerState.DRAINING]
        none_is_ready = self.role is Role.DECODE and not self.ready
        kept = [one for one in going if one.state is WorkerState.READY][:1] if none_is_ready else given
        ranked = sorted(self.staying, key=lambda one: one.state is not WorkerState.READY)
        surplus = [one for one in reversed(ranked) if one not in given][: max(0, self.surplus - len(given))]
        return [one for one in (*going, *surplus) if one not in kept]


def leaving(worker: Worker) -> Worker:
    """Returns the worker as DRAINING; a CHANGING worker leaves the pool that it comes from."""
    role = worker.role.other if worker.state is WorkerState.CHANGING else worker.role
    return replace(worker, role=role, state=WorkerState.DRAINING)
