"""The roll of the pools' workers to a new revision, one worker at a time. Pure: each event returns the next `Roll`.

    begun ──▶ surge: one more worker, of the wanted revision ──▶ it is READY and announced: an outdated worker drains
                 ▲        │                                            │
                 └────────┼──────── outdated workers are left ◀────────┘──▶ none is left: done
                          └─ the first of its role fails, or three in a row: back to the revision before

Going back is the same roll, towards the revision before, without a way back. Workers that are lost, hired or dismissed
meanwhile change nothing: each step looks for outdated workers anew.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from wire.errors import InvalidRequest, Unavailable
from wire.ids import WorkerId
from wire.pools import PoolSizes, Role, Worker, WorkerState

MAX_FAILED_STARTS = 3
"""Failed starts in a row after which an order for workers, or a roll, ends."""


@dataclass(frozen=True, kw_only=True)
class Roll:
    """The revision of each worker, and the roll to the wanted revision, if one is under way. Part of PoolsRecord.

    wanted: the revision of new workers. last: the last given number. before: the revision to go back to; None if no
    roll is under way, or it goes back. surge: the role that may have one more worker. proven: the roles that have had a
    READY worker of the wanted revision. failed, failure: the last revision that was taken back, and the reason.
    revisions: by worker, without zeros.
    """

    wanted: int = 0
    last: int = 0
    before: int | None = None
    surge: Role | None = None
    proven: tuple[Role, ...] = ()
    failed: int = 0
    failure: str = ""
    revisions: dict[str, int] = field(default_factory=dict)

    def of(self, worker_id: WorkerId) -> int:
        """Returns the revision of a worker."""
        return self.revisions.get(worker_id, 0)

    def outdated(self, workers: Sequence[Worker]) -> list[Worker]:
        """Returns the workers of another revision than the wanted one; DRAINING workers are replaced already."""
        return [one for one in workers if one.state is not WorkerState.DRAINING and self.of(one.id) != self.wanted]

    def begun(self, workers: Sequence[Worker]) -> "Roll":
        """Returns the roll of these workers to a new revision, whose number is `wanted`.

        Raises InvalidRequest if another roll is under way.
        """
        if self.before is not None:
            raise InvalidRequest("roll", f"a roll to revision {self.wanted} is under way: see `baton status`")
        if self.outdated(workers):
            raise InvalidRequest("roll", f"workers go back to revision {self.wanted} now: see `baton status`")
        number = self.last + 1
        return replace(self, wanted=number, last=number, before=self.wanted, proven=(), surge=None)

    def stepped(self, workers: Sequence[Worker], vacating: Sequence[Worker] = ()) -> "Roll":
        """Returns the roll as it goes on: without a surge while workers start or drain, or if no worker is outdated.

        vacating: workers that go and are replaced without the roll; they serve by their revision to their end.
        """
        revisions: dict[str, int] = {one.id: self.of(one.id) for one in (*workers, *vacating) if self.of(one.id)}
        left = Counter(one.role for one in self.outdated(workers))
        are_at_rest = bool(workers) and all(one.state is WorkerState.READY for one in workers)
        if not left:
            return replace(self, revisions=revisions, surge=None, before=None if are_at_rest else self.before)
        if self.surge in left or not are_at_rest:
            return replace(self, revisions=revisions, surge=self.surge if self.surge in left else None)
        return replace(self, revisions=revisions, surge=max(Role, key=lambda role: left[role]))

    def replaced(self, workers: Sequence[Worker], sizes: PoolSizes) -> Worker | None:
        """Returns the outdated worker whose replacement is READY; None while there is none."""
        present = [one for one in workers if one.role is self.surge and one.state is WorkerState.READY]
        outdated = self.outdated(present)
        return outdated[0] if self.surge is not None and outdated and len(present) > sizes[self.surge] else None

    def hired(self, worker_id: WorkerId) -> "Roll":
        """Returns the roll with a worker of the wanted revision."""
        return replace(self, revisions={**self.revisions, worker_id: self.wanted}) if self.wanted else self

    def became_ready(self, worker: Worker) -> "Roll":
        is_first = self.of(worker.id) == self.wanted and worker.role not in self.proven
        return replace(self, proven=(*self.proven, worker.role)) if is_first else self

    def failed_start(self, worker: Worker, num_failures: int, reason: str) -> "Roll":
        """Returns the roll after failed starts in a row: taken back, or going on, as pools do.

        The first worker of a role has one try, later workers of it have MAX_FAILED_STARTS.
        """
        is_new = self.before is not None and self.of(worker.id) == self.wanted
        if not is_new or (worker.role in self.proven and num_failures < MAX_FAILED_STARTS):
            return self
        return self.taken_back(reason)

    def taken_back(self, reason: str) -> "Roll":
        """Returns the roll back to the revision before. Only for a roll under way."""
        assert self.before is not None
        failure = f"revision {self.wanted} is taken back, and revision {self.before} serves on: {reason}"
        return replace(self, wanted=self.before, before=None, surge=None, failed=self.wanted, failure=failure)

    def has_done(self, number: int) -> bool:
        """Tells whether the roll to a revision is over. Raises Unavailable, with the reason, if it was taken back."""
        if number == self.failed:
            raise Unavailable(self.failure)
        return number < self.wanted or (number == self.wanted and self.before is None)
