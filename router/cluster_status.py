"""The state of the whole cluster, put together from what its workers say."""

import asyncio
from collections.abc import Sequence

from router.dispatch import Dispatcher
from router.hold_keeper import HoldKeeper
from router.members import Member, Members, WorkerState
from wire.errors import BatonError
from wire.pb import cluster_pb2, worker_pb2

ASK_TIMEOUT_S = 5.0


class StatusReader:
    """Asks all workers at once, and notes with each member how long its engine has been silent.

    One that does not answer is told of as a problem, and its engine is not known to have turned meanwhile.
    """

    def __init__(self, members: Members, dispatcher: Dispatcher, holds: HoldKeeper) -> None:
        self._members = members
        self._dispatcher = dispatcher
        self._holds = holds

    async def read(self, request: cluster_pb2.GetStatusRequest) -> cluster_pb2.ClusterStatus:
        """Everything but names, addresses and events. With `check`, workers and router verify their invariants."""
        ask = worker_pb2.GetWorkerStatusRequest(check=request.check)
        workers = await asyncio.gather(*(_ask(member, ask) for member in self._members))
        problems = [f"{worker.worker_id}: {problem}" for worker in workers for problem in worker.problems]
        status = cluster_pb2.ClusterStatus(
            workers=workers,
            num_running=self._dispatcher.num_running,
            num_queued=self._dispatcher.num_queued,
            problems=[*problems, *(self._violations() if request.check else [])],
        )
        _add_tiers(status, workers)
        return status

    def _violations(self) -> list[str]:
        """What the router should not have when no request is open."""
        if self._dispatcher.num_running + self._dispatcher.num_queued:
            return []
        busy = [member.worker_id for member in self._members if member.num_choices or member.num_tokens]
        leaks = [f"router: worker {worker} has work of no request" for worker in busy]
        if self._holds.num_blocks:
            leaks.append(f"router: {self._holds.num_blocks} blocks held for no request")
        return leaks


async def _ask(member: Member, request: worker_pb2.GetWorkerStatusRequest) -> worker_pb2.WorkerStatus:
    try:
        status = await member.client.get_status(request, ASK_TIMEOUT_S)
        member.engine_silent_s = status.engine_silent_s
    except BatonError as error:
        member.engine_silent_s += ASK_TIMEOUT_S
        status = worker_pb2.WorkerStatus(
            worker_id=member.worker_id, role=member.role.value, pid=member.info.pid, problems=[error.message]
        )
    if member.state is not WorkerState.READY:
        status.state = member.state.value
    return status


def _add_tiers(status: cluster_pb2.ClusterStatus, workers: Sequence[worker_pb2.WorkerStatus]) -> None:
    """The workers of a node share its arena, of which the first speaks for all; each has its own line to Redis."""
    telling = [worker for worker in workers if worker.HasField("host")]
    for worker in telling[:1]:
        status.host.CopyFrom(worker.host)
    states = {worker.redis.state for worker in telling}
    status.redis.state = next((state for state in ("broken", "up", "off") if state in states), "")
    for name in ("hits", "misses", "errors", "corrupt"):
        setattr(status.redis, name, sum(getattr(worker.redis, name) for worker in telling))
    status.redis.written = max((worker.redis.written for worker in telling), default=0)
