"""Maintenance of `Members`: opens lines to the workers that the controller lists, and reopens broken lines."""

import asyncio
import logging
from collections.abc import Callable, Sequence

from router.workers.controller_port import ControllerPort
from router.workers.line import Connect, Line
from router.workers.members import Member, Members
from wire.errors import BatonError, Unavailable, WorkerLeaving
from wire.ids import WorkerId
from wire.pools import Worker, WorkerState

log = logging.getLogger(__name__)

JOIN_TIMEOUT_S = 10.0
PROBE_TIMEOUT_S = 1.0
PROBE_EVERY_S = 1.0
_FIT_STATES = {state.value: state for state in (WorkerState.READY, WorkerState.DRAINING)}


class Membership:
    """The maintenance of members. connect: opens a connection to an address. on_change: called after each change."""

    def __init__(self, members: Members, connect: Connect, port: ControllerPort, on_change: Callable[[], None]) -> None:
        self._members = members
        self._connect = connect
        self._port = port
        self._on_change = on_change
        self._setting = asyncio.Lock()
        self._probes: dict[WorkerId, asyncio.Task[None]] = {}

    async def set(self, listed: Sequence[Worker]) -> dict[WorkerId, str]:
        """Makes these workers the members. Returns refused workers with reasons; they may be listed again.

        A DRAINING worker gets no new work. Lines to workers that are no longer listed, or with another role, end, and
        their requests go to other workers.
        """
        async with self._setting:
            await self._drop_all_but(listed)
            new = [worker for worker in listed if worker.id not in self._members]
            reasons = await asyncio.gather(*(self._join(worker) for worker in new))
            for worker in listed:
                if worker.id in self._members:
                    self._take_state(worker)
            self._members.are_complete = True
            self._on_change()
        return {worker.id: reason for worker, reason in zip(new, reasons, strict=True) if reason is not None}

    def mark_lost(self, worker_id: WorkerId) -> None:
        """Gives a worker no more work until it answers that it takes attempts: its line or a call on it failed.

        A DRAINING worker keeps its state.
        """
        if worker_id not in self._members or worker_id in self._probes:
            return
        member = self._members[worker_id]
        member.is_refusing = True
        if member.state is not WorkerState.DRAINING:
            member.state = WorkerState.LOST
            self._on_change()
        self._probes[worker_id] = asyncio.create_task(self._probe(member))

    async def close(self) -> None:
        """Forgets all workers and ends all lines to them."""
        await self.set(())

    def check(self) -> list[str]:
        """Lists violated invariants: no task may remain for a worker that is no member."""
        return [f"a probe of {one}, which is no member" for one in self._probes if one not in self._members]

    def _take_state(self, worker: Worker) -> None:
        """Marks a DRAINING member; asks one that drained and is listed as READY: it may drain by itself, or be back."""
        member = self._members[worker.id]
        if worker.state is WorkerState.DRAINING:
            member.state = WorkerState.DRAINING
        elif member.state is WorkerState.DRAINING:
            member.state = WorkerState.LOST
            self.mark_lost(worker.id)

    async def _drop_all_but(self, listed: Sequence[Worker]) -> None:
        kept = {(worker.id, worker.address, worker.role) for worker in listed}
        for member in self._members:
            if (member.id, member.worker.address, member.role) in kept:
                continue
            self._members.remove(member.id)
            probe = self._probes.pop(member.id, None)
            if probe is not None:
                probe.cancel()
            await member.line.close(_farewell(member))

    async def _join(self, worker: Worker) -> str | None:
        """Adds a worker; returns the reason if it is refused."""
        line = self._open(worker)
        try:
            self._members.add(Member(worker=worker, info=await line.questions.info(JOIN_TIMEOUT_S), line=line))
        except BatonError as error:
            log.warning("worker %s is not taken in: %s", worker.id, error.message)
            await line.close(error)
            return error.message
        if not line.is_open:
            self.mark_lost(worker.id)
        return None

    def _open(self, worker: Worker) -> Line:
        return Line(self._connect(worker.address), lambda _: self.mark_lost(worker.id))

    async def _probe(self, member: Member) -> None:
        """Probes a lost worker until it answers or is no longer listed; reports it to the controller once."""
        is_reported = False
        while (state := await self._ask_state(member)) is WorkerState.LOST:
            if member.state is WorkerState.LOST:
                is_reported = is_reported or await self._report(member.id)
            await asyncio.sleep(PROBE_EVERY_S)
        log.info("worker %s answers again, and is %s", member.id, state.value)
        if member.state is WorkerState.LOST:
            member.state = state
        member.is_refusing = state is WorkerState.DRAINING
        del self._probes[member.id]
        self._on_change()

    async def _ask_state(self, member: Member) -> WorkerState:
        """Asks a worker for its state, on a new line if need be. BROKEN and an ended line count as LOST."""
        if not member.line.is_open:
            await member.line.close(Unavailable("the line has ended"))
            member.line = self._open(member.worker)
        try:
            status = await member.line.questions.status(False, PROBE_TIMEOUT_S)
        except BatonError:
            return WorkerState.LOST
        is_itself = member.line.is_open and (status.worker_id, status.role) == (member.id, member.role.value)
        return _FIT_STATES.get(status.state, WorkerState.LOST) if is_itself else WorkerState.LOST

    async def _report(self, worker_id: WorkerId) -> bool:
        log.warning("worker %s is lost", worker_id)
        try:
            await self._port.worker_lost(worker_id)
        except BatonError as error:
            log.warning("the controller was not told of worker %s: %s", worker_id, error.message)
            return False
        return True


def _farewell(member: Member) -> BatonError:
    """Returns the error for attempts on a worker that is no longer listed; for a DRAINING worker it is no accident."""
    if member.state is WorkerState.DRAINING:
        return WorkerLeaving("the worker has left", worker_id=member.id)
    return Unavailable("the worker is no longer there", worker_id=member.id)
