"""Keeps `Members` true: connects to workers that the controller lists, and finds out about those that do not answer."""

import asyncio
import logging
from collections.abc import Callable, Sequence

from router.workers.controller_port import ControllerPort
from router.workers.members import Member, Members
from router.workers.worker_client import WorkerClient
from wire.errors import BatonError, PairRefused, Unavailable, WorkerLeaving
from wire.ids import WorkerId
from wire.pb import worker_pb2
from wire.pools import Worker, WorkerState

log = logging.getLogger(__name__)

JOIN_TIMEOUT_S = 10.0
DRAIN_TIMEOUT_S = 5.0
PROBE_TIMEOUT_S = 1.0
PROBE_EVERY_S = 1.0
_STATES = {"ready": WorkerState.READY, "draining": WorkerState.DRAINING}
"""What workers say of themselves. One that says anything else is of no use."""


class Membership:
    """`connect` makes a client for an address; `on_change` is called after every change of the members."""

    def __init__(
        self,
        members: Members,
        connect: Callable[[str], WorkerClient],
        port: ControllerPort,
        on_change: Callable[[], None],
    ) -> None:
        self._members = members
        self._connect = connect
        self._port = port
        self._on_change = on_change
        self._setting = asyncio.Lock()
        self._probes: dict[WorkerId, asyncio.Task[None]] = {}

    async def set(self, listed: Sequence[Worker]) -> dict[WorkerId, str]:
        """Makes these the members. Returns those that were not taken, with the reason; they may be listed again.

        Calls to workers that are no longer listed end, and their requests go on elsewhere.
        """
        async with self._setting:
            await self._drop_all_but(listed)
            new = [one for one in listed if one.id not in self._members]
            reasons = await asyncio.gather(*(self._join(one) for one in new))
            for one in listed:
                if one.state is WorkerState.DRAINING and one.id in self._members:
                    self._members[one.id].state = WorkerState.DRAINING
            self._on_change()
        return {one.id: reason for one, reason in zip(new, reasons, strict=True) if reason is not None}

    async def start_drain(self, worker_id: WorkerId) -> None:
        """No new work goes to this worker, and it takes none. Raises WorkerNotFound, or Unavailable if it is lost."""
        member = self._members[worker_id]
        member.state = WorkerState.DRAINING
        self._on_change()
        await member.client.start_drain(DRAIN_TIMEOUT_S)

    def suspect(self, worker_id: WorkerId) -> None:
        """A call to this worker broke: nothing is sent there until it has answered again.

        Nothing more is sent to one that drains, and that it does is remembered: its requests have met with no accident.
        """
        if worker_id not in self._members or worker_id in self._probes:
            return
        member = self._members[worker_id]
        if member.state is WorkerState.DRAINING:
            return
        member.state = WorkerState.LOST
        self._on_change()
        self._probes[worker_id] = asyncio.create_task(self._probe(member))

    async def close(self) -> None:
        """Forgets all workers and ends all calls to them."""
        await self.set(())

    async def _drop_all_but(self, listed: Sequence[Worker]) -> None:
        places = {(one.id, one.address) for one in listed}
        for member in self._members:
            if (member.worker_id, member.address) in places:
                continue
            self._members.remove(member.worker_id)
            probe = self._probes.pop(member.worker_id, None)
            if probe is not None:
                probe.cancel()
            await member.client.close(_farewell(member))

    async def _join(self, one: Worker) -> str | None:
        client = self._connect(one.address)
        try:
            info = await client.get_info(JOIN_TIMEOUT_S)
            _require_same(one, info)
            self._members.add(Member(one.id, one.role, one.address, info, client))
        except BatonError as error:
            log.warning("worker %s is not taken in: %s", one.id, error.message)
            await client.close(error)
            return error.message
        return None

    async def _probe(self, member: Member) -> None:
        """Asks a lost worker until it answers or is no longer listed; tells the controller of it once."""
        is_reported = False
        while (state := await self._ask_state(member)) is WorkerState.LOST:
            is_reported = is_reported or await self._report(member.worker_id)
            await asyncio.sleep(PROBE_EVERY_S)
        log.info("worker %s answers again, and is %s", member.worker_id, state.value)
        member.state = state
        del self._probes[member.worker_id]
        self._on_change()

    async def _ask_state(self, member: Member) -> WorkerState:
        try:
            status = await member.client.get_status(worker_pb2.GetWorkerStatusRequest(), PROBE_TIMEOUT_S)
        except BatonError:
            return WorkerState.LOST
        return _STATES.get(status.state, WorkerState.LOST)

    async def _report(self, worker_id: WorkerId) -> bool:
        log.warning("worker %s is lost", worker_id)
        try:
            await self._port.worker_lost(worker_id)
        except BatonError as error:
            log.warning("the controller was not told of worker %s: %s", worker_id, error.message)
            return False
        return True


def _farewell(member: Member) -> BatonError:
    """What is told to calls that are still open. One that was draining has had no accident."""
    if member.state is WorkerState.DRAINING:
        return WorkerLeaving("the worker has left", worker_id=member.worker_id)
    return Unavailable("the worker is no longer there", worker_id=member.worker_id)


def _require_same(listed: Worker, info: worker_pb2.WorkerInfo) -> None:
    if (info.worker_id, info.role) != (listed.id, listed.role.value):
        raise PairRefused("another worker answers at this address", worker_id=listed.id)
