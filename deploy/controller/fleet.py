"""The workers of a cluster: keeps them as the pools should be, and the router informed of them."""

import asyncio
import logging
import time
from collections.abc import Callable, Sequence

from deploy.actors.liveness import LOOK_EVERY_S, Watch
from deploy.actors.worker_host import WorkerHost
from deploy.controller import pool_record
from deploy.controller.event_log import EventLog
from deploy.controller.pools import Action, Drain, Pools, Stage, Start, Worker
from deploy.controller.roll import Roll, RouterPort
from deploy.controller.supervision import repeat
from deploy.controller.tasks import Tasks
from deploy.processes.record import Record
from wire.errors import BatonError, DeadlineExceeded, Unavailable
from wire.ids import WorkerId
from wire.pools import PoolSizes, Role

log = logging.getLogger(__name__)


class Fleet:
    """One task of `run` looks after the workers; starting and dismissing them takes tasks of their own."""

    def __init__(
        self,
        pools: Pools,
        host: WorkerHost,
        router: RouterPort,
        events: EventLog,
        record: Record,
        drain_grace_s: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._pools = pools
        self._host = host
        self._roll = Roll(pools, router, events)
        self._events = events
        self._record = record
        self._is_recorded = True
        self._drain_grace_s = drain_grace_s
        self._clock = clock
        self._watches: dict[WorkerId, Watch] = {}
        self._failures: list[str] = []
        self._tasks = Tasks()
        self._burials = {role: Tasks() for role in Role}
        self._wake = asyncio.Event()
        self._changed = asyncio.Condition()

    @property
    def is_settled(self) -> bool:
        """Whether the pools are as asked, and the router has all of their workers."""
        return self._pools.are_as_asked and self._roll.is_announced

    async def take_over(self) -> None:
        """Goes on with the workers that an earlier controller has left. Those that died meanwhile are replaced."""
        workers = list(self._pools)
        are_there = [await self._host.adopt(worker.worker_id) for worker in workers]
        for worker, is_there in zip(workers, are_there, strict=True):
            if not is_there:
                self._pools.forget(worker.worker_id)
                self._events.note(f"worker {worker.worker_id} was lost")
            elif worker.stage is Stage.STARTING:
                self._tasks.begin(self._carry_out(Start(worker.worker_id, worker.role)))
            elif worker.stage is Stage.DRAINING:
                self._tasks.begin(self._carry_out(Drain(worker.worker_id)))

    async def run(self) -> None:
        """Until cancelled."""
        await repeat("the care for the workers", self._step, self._events)

    async def settle(self, timeout_s: float, max_failures: int) -> PoolSizes:
        """Returns when all is as asked. Unavailable, with the reason, once so many more workers did not start."""
        num_allowed = len(self._failures) + max_failures
        try:
            async with asyncio.timeout(timeout_s), self._changed:
                await self._changed.wait_for(lambda: self.is_settled or len(self._failures) >= num_allowed)
        except TimeoutError as error:
            raise DeadlineExceeded("the pools do not have the size asked for yet") from error
        if not self.is_settled:
            raise Unavailable(self._failures[-1])
        return self._pools.sizes

    def resize(self, prefill: int | None, decode: int | None) -> None:
        """What the pools are to become from now on. Raises InvalidRequest."""
        self._pools.resize(prefill, decode)
        self._write_record()
        self._events.note(f"scaling to {self._pools.sizes.prefill} prefill, {self._pools.sizes.decode} decode")
        self._wake.set()

    async def drain(self, worker_id: WorkerId, timeout_s: float) -> None:
        """Returns when the worker is gone. WorkerNotFound, InvalidRequest if it cannot be spared, DeadlineExceeded."""
        action = self._pools.release(worker_id)
        self._write_record()
        if action is not None:
            self._tasks.begin(self._carry_out(action))
        try:
            async with asyncio.timeout(timeout_s), self._changed:
                await self._changed.wait_for(lambda: worker_id not in self._pools)
        except TimeoutError as error:
            raise DeadlineExceeded("the worker is still draining", worker_id=worker_id) from error

    async def suspect(self, worker_id: WorkerId) -> None:
        """Somebody cannot reach this worker."""
        if worker_id in self._pools:
            await self._look(worker_id)

    def introduce(self) -> None:
        """Tells the router of all workers, as one that knows of none."""
        self._roll.has_changed()
        self._wake.set()

    async def end(self) -> None:
        """Ends all workers, whatever they do."""
        self._tasks.cancel()
        for worker in self._pools:
            self._bury(worker)
        await asyncio.gather(*(burials.wait() for burials in self._burials.values()))

    async def _step(self) -> None:
        self._wake.clear()
        if not self._is_recorded:
            self._write_record()
        self._carry_out_all(self._pools.plan(self._clock()))
        if not self._roll.is_announced:
            await self._roll.announce()
        await self._notify()
        await self._sleep()
        await asyncio.gather(*(self._look(worker.worker_id) for worker in self._pools))

    def _carry_out_all(self, actions: Sequence[Action]) -> None:
        if actions:
            self._tell_of_change()
        for action in actions:
            self._tasks.begin(self._carry_out(action))

    async def _carry_out(self, action: Action) -> None:
        if isinstance(action, Start):
            await self._start(action)
        else:
            await self._dismiss(action)
        self._wake.set()
        await self._notify()

    async def _start(self, action: Start) -> None:
        """In the place of one that died only when that one's process is gone. Whatever fails is a failed start."""
        await self._burials[action.role].wait()
        if not self._is_at(action.worker_id, Stage.STARTING):
            return  # it was stopped meanwhile
        began_s = self._clock()
        try:
            address = await self._host.start(action.worker_id, action.role)
        except Exception as error:
            log.info("worker %s did not start", action.worker_id, exc_info=error)
            if self._is_at(action.worker_id, Stage.STARTING):  # else it was stopped meanwhile
                reason = error.message if isinstance(error, BatonError) else repr(error)
                self._failures.append(f"worker {action.worker_id} did not start: {reason}")
                self._lose(action.worker_id, self._failures[-1])
            return
        if self._is_at(action.worker_id, Stage.STARTING):
            self._pools.became_ready(action.worker_id, address)
            self._tell_of_change()
            self._events.note(f"worker {action.worker_id} is ready after {self._clock() - began_s:.1f} s")

    async def _dismiss(self, action: Action) -> None:
        worker_id = action.worker_id
        if isinstance(action, Drain):
            await self._roll.announce()
            await self._let_finish(worker_id)
            self._pools.finished(worker_id)
            await self._roll.announce()
        await self._host.end(worker_id)
        self._pools.forget(worker_id)
        self._watches.pop(worker_id, None)
        self._tell_of_change()
        self._events.note(f"worker {worker_id} has left")

    async def _let_finish(self, worker_id: WorkerId) -> None:
        try:
            num_unfinished = await self._host.drain(worker_id, self._drain_grace_s)
        except BatonError as error:
            self._events.note(f"worker {worker_id} was lost while draining: {error.message}")
            return
        if num_unfinished:
            self._events.note(f"worker {worker_id} handed over {num_unfinished} requests")

    async def _look(self, worker_id: WorkerId) -> None:
        """At one that is ready: whoever starts or dismisses one finds out."""
        if not self._is_at(worker_id, Stage.READY):
            return
        life = await self._host.look(worker_id)
        trouble = self._watches.setdefault(worker_id, Watch()).judge(life, self._clock())
        if trouble is not None and self._is_at(worker_id, Stage.READY):
            self._lose(worker_id, f"worker {worker_id} {trouble}")

    def _lose(self, worker_id: WorkerId, reason: str) -> None:
        """A worker is dead, or as good as."""
        worker = self._pools[worker_id]
        self._events.note(reason)
        self._watches.pop(worker_id, None)
        self._pools.lost(worker_id, self._clock())
        self._tell_of_change()
        self._bury(worker)
        self._wake.set()

    def _bury(self, worker: Worker) -> None:
        """Its process may take its time to end, and nobody but who takes its place waits for that."""
        self._burials[worker.role].begin(self._host.end(worker.worker_id))

    def _tell_of_change(self) -> None:
        self._roll.has_changed()
        self._write_record()

    def _write_record(self) -> None:
        """If that fails, work goes on, and it is tried again."""
        is_recorded = self._record.write(pool_record.encode(self._pools))
        if self._is_recorded and not is_recorded:
            self._events.note("the pools cannot be written down: a controller that takes over now will not know them")
        self._is_recorded = is_recorded

    def _is_at(self, worker_id: WorkerId, stage: Stage) -> bool:
        return worker_id in self._pools and self._pools[worker_id].stage is stage

    async def _sleep(self) -> None:
        try:
            async with asyncio.timeout(LOOK_EVERY_S):
                await self._wake.wait()
        except TimeoutError:
            return

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()
