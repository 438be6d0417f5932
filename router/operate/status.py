"""The status of the whole cluster, from its workers' reports, and the events between two statuses."""

import asyncio
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence

from router.requests.dispatch import Dispatcher
from router.workers.controller_port import ControllerEvent
from router.workers.members import Member, Members
from wire.convert import accounts_of, arenas_of, status_of
from wire.errors import BatonError
from wire.pb import cluster_pb2, worker_pb2
from wire.pools import Role, WorkerState
from wire.tier import BLOCK_STATES, READ_COUNTS, Tier, advice

ASK_TIMEOUT_S = 5.0
TIER_STATES = {
    "broken": "does not answer, workers go on without it",
    "full": "is full and refuses blocks",
    "read-only": "refuses blocks, workers read what it has",
    "up": "is up again",
}
"""States of tiers, the worst first, with the event of entering each."""
READ_EVERY_S = 2.0
RECENT_S = 0.25
MAX_EVENTS = 20
LONG_SILENCE_S = 10.0
"""Silence of a worker's engine from which there is an event."""


class StatusReader:
    """Asks all workers at once; notes each member's engine silence and learned prefill time.

    A worker that does not answer becomes a problem, and its engine counts as silent.
    """

    def __init__(self, members: Members, dispatcher: Dispatcher, check: Callable[[], list[str]]) -> None:
        """check: lists violated invariants of the router itself."""
        self._members = members
        self._dispatcher = dispatcher
        self._check = check

    async def read(self, request: cluster_pb2.GetStatusRequest) -> cluster_pb2.ClusterStatus:
        """Reads the status without names, addresses and events. With `check`, all processes verify their invariants."""
        workers = await asyncio.gather(*(_ask(member, request.check) for member in self._members))
        pools = [_pool(role, self._members) for role in Role]
        problems = [f"{worker.worker_id}: {problem}" for worker in workers for problem in worker.problems]
        problems += [_shortage(pool) for pool in pools if pool.num_ready < pool.size]
        status = cluster_pb2.ClusterStatus(
            workers=workers,
            pools=pools,
            num_running=self._dispatcher.num_running,
            num_queued=self._dispatcher.num_queued,
            problems=[*problems, *(self._check() if request.check else [])],
        )
        status.tiers.extend(_summed(tier, workers) for tier in Tier if tier is not Tier.DEVICE)
        return status


async def _ask(member: Member, check: bool) -> worker_pb2.WorkerStatus:
    try:
        status = await member.line.questions.status(check, ASK_TIMEOUT_S)
        member.engine_silent_s = status.engine_silent_s
        if status.HasField("prefill_token_s"):
            member.prefill_token_s = status.prefill_token_s
    except BatonError as error:
        member.engine_silent_s += ASK_TIMEOUT_S
        info = member.info
        status = worker_pb2.WorkerStatus(
            worker_id=member.id, role=info.role, pid=info.pid, node_id=info.node_id, problems=[error.message]
        )
    if member.state is not WorkerState.READY:
        status.state = member.state.value
    return status


def _pool(role: Role, members: Members) -> cluster_pb2.PoolStatus:
    return cluster_pb2.PoolStatus(role=role.value, size=members.sizes[role], num_ready=len(members.ready(role)))


def _shortage(pool: cluster_pb2.PoolStatus) -> str:
    return f"the {pool.role} pool has {pool.num_ready} of {pool.size} workers: the last events tell why"


def _summed(tier: Tier, workers: Sequence[worker_pb2.WorkerStatus]) -> worker_pb2.TierStatus:
    """Sums the workers' statuses of a tier.

    Pages, holds and the service's counts belong to a node and are added once for each node; workers' own counts are
    added for each worker. The tier's state is the worst among workers.
    """
    of_workers = [status for worker in workers for status in worker.tiers if status.tier == tier]
    of_nodes = list(accounts_of(tier, workers).values())
    if not of_nodes:
        return worker_pb2.TierStatus(tier=tier)
    summed = worker_pb2.TierStatus()
    summed.CopyFrom(next((status for status in of_nodes if status.counts), of_nodes[0]))
    states = {status.state for status in of_workers}
    summed.state = next((state for state in (*TIER_STATES, "off") if state in states), "")
    for name in list(summed.counts):
        accounts = of_workers if name in READ_COUNTS else of_nodes
        summed.counts[name] = sum(status.counts.get(name, 0) for status in accounts)
    if summed.HasField("blocks"):
        for name in (*BLOCK_STATES, "total"):
            setattr(summed.blocks, name, sum(getattr(status.blocks, name) for status in of_nodes))
    return summed


class StatusWatch:
    """Reads the status every few seconds between `start` and `stop`. `clock` is monotonic, in seconds."""

    def __init__(self, statuses: StatusReader, clock: Callable[[], float], read_every_s: float = READ_EVERY_S) -> None:
        self.last = cluster_pb2.ClusterStatus()
        self._statuses = statuses
        self._clock = clock
        self._read_every_s = read_every_s
        self._events: deque[tuple[float, str]] = deque(maxlen=MAX_EVENTS)
        self._task: asyncio.Task[None] | None = None
        self._reading: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.create_task(self._run())

    async def stop(self) -> None:
        for task in filter(None, (self._task, self._reading)):
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def recent(self) -> cluster_pb2.ClusterStatus:
        """Reads the status, once for all callers. If that takes over RECENT_S, returns a copy of the last status."""
        if self._reading is None or self._reading.done():
            self._reading = asyncio.create_task(self.read())
        await asyncio.wait([self._reading], timeout=RECENT_S)
        status = cluster_pb2.ClusterStatus()
        status.CopyFrom(self.last)
        return status

    @property
    def events(self) -> list[ControllerEvent]:
        """The last changes, newest last."""
        now_s = self._clock()
        return [ControllerEvent(now_s - at_s, text) for at_s, text in self._events]

    async def _run(self) -> None:
        while True:
            await self.read()
            await asyncio.sleep(self._read_every_s)

    async def read(self) -> None:
        """Reads the status now."""
        status = await self._statuses.read(cluster_pb2.GetStatusRequest())
        self._events.extend((self._clock(), text) for text in changes(self.last, status))
        self.last = status


def changes(before: cluster_pb2.ClusterStatus, after: cluster_pb2.ClusterStatus) -> Iterator[str]:
    """Yields the changes between two statuses that concern an operator."""
    for old, new in ((status_of(tier, before.tiers), status_of(tier, after.tiers)) for tier in Tier):
        if old.state in TIER_STATES and new.state in TIER_STATES and old.state != new.state:
            way_out = advice(new.tier, new.state)
            yield f"tier {new.tier} {TIER_STATES[new.state]}{way_out and f': {way_out}'}"
        if old.state and (num_forged := new.counts["forged"] - old.counts["forged"]) > 0:
            yield f"tier {new.tier} had forged blocks ({num_forged}), not used: somebody writes there who must not"
    arenas = arenas_of(before.workers)
    for node_id, arena in arenas_of(after.workers).items():
        if node_id in arenas and arenas[node_id].epoch and arena.epoch not in ("", arenas[node_id].epoch):
            where = f" of node {node_id}" if node_id else ""
            yield f"the directory of tier {arena.tier}{where} is a new one: every block in it is a miss"
    yield from _changes_of_silence(_silences(before), _silences(after))


def _changes_of_silence(before: Mapping[str, float], after: Mapping[str, float]) -> Iterator[str]:
    for worker_id, silent_s in after.items():
        was_long = before.get(worker_id, 0.0) >= LONG_SILENCE_S
        if silent_s >= LONG_SILENCE_S and not was_long:
            yield f"{worker_id} is silent for {silent_s:.0f} s: its engine is in a long step, or hangs"
        if was_long and silent_s < LONG_SILENCE_S:
            yield f"{worker_id} is not silent any more: its engine has finished a step"


def _silences(status: cluster_pb2.ClusterStatus) -> dict[str, float]:
    """Maps each worker that answered to its engine's silence in seconds."""
    return {worker.worker_id: worker.engine_silent_s for worker in status.workers if worker.HasField("blocks")}
