"""The state of the whole cluster, put together from what its workers say."""

import asyncio
from collections.abc import Iterable

from router.requests.dispatch import Dispatcher
from router.workers.hold_keeper import HoldKeeper
from router.workers.members import Member, Members
from wire.errors import BatonError
from wire.pb import cluster_pb2, worker_pb2
from wire.pools import WorkerState
from wire.tier import Tier

ASK_TIMEOUT_S = 5.0
COUNTED_BY_WORKERS = ("hits", "misses", "errors", "corrupt")


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
        status.tiers.extend(_summed(tier, workers) for tier in Tier if tier is not Tier.DEVICE)
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


def _summed(tier: Tier, workers: Iterable[worker_pb2.WorkerStatus]) -> worker_pb2.TierStatus:
    """A tier of the node as its workers tell of it.

    The first speaks for what they share, pages and what is held; what each counts for itself is added up, but blocks
    written, which are the node's. A tier that any worker finds broken is broken.
    """
    told = [status for worker in workers for status in worker.tiers if status.tier == tier]
    if not told:
        return worker_pb2.TierStatus(tier=tier)
    summed = worker_pb2.TierStatus()
    summed.CopyFrom(told[0])
    states = {status.state for status in told}
    summed.state = next((state for state in ("broken", "up", "off") if state in states), "")
    for name in COUNTED_BY_WORKERS:
        if name in summed.counts:
            summed.counts[name] = sum(status.counts[name] for status in told)
    if "written" in summed.counts:
        summed.counts["written"] = max(status.counts["written"] for status in told)
    return summed
