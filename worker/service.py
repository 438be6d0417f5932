"""A worker as the router knows it: the calls of baton.v1.Worker, without gRPC."""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import contextmanager

from engine.core import EngineCore
from engine.request import EngineRequest
from kv_store.block_store import BlockStore
from wire.errors import BatonError, Cancelled, DeadlineExceeded, Unavailable, Unsupported, WorkerLeaving
from wire.ids import RequestId
from wire.pb import worker_pb2
from wire.pools import Role, WorkerState
from worker.async_store import AsyncStore
from worker.behaviour import Behaviour
from worker.call import Call, Calls
from worker.commands import Command
from worker.engine_watch import EngineWatch
from worker.inbox import Inbox
from worker.instructions import Close, Send
from worker.lives import Deliveries
from worker.loop import LoopState, WorkerLoop
from worker.messages import (
    decode_request_from_pb,
    decode_update_to_pb,
    hand_off_from_pb,
    prefill_response_to_pb,
    status_to_pb,
)

log = logging.getLogger(__name__)

MAX_REQUEST_S = 600.0
STOP_TIMEOUT_S = 10.0
CHECK_TIMEOUT_S = 30.0


class WorkerService:
    """Serves the call of its role, and what every worker answers. Belongs to the event loop on which it is started.

    Cancelling the task that awaits `prefill`, or closing the iterator of `decode`, takes the request out of the engine
    before its next step, and so does the end of `timeout_s`. All methods raise BatonErrors only.
    """

    def __init__(
        self,
        info: worker_pb2.WorkerInfo,
        behaviour: Behaviour,
        engine: EngineCore,
        inbox: Inbox[Command],
        store: BlockStore,
        on_broken: Callable[[], None],
        max_silence_s: float,
    ) -> None:
        """max_silence_s: the engine is given up if its thread has not finished a turn for so long.

        on_broken: called on any thread when the worker is of no use any more; again if a thread that hung goes on.
        """
        self._info = info
        self._behaviour = behaviour
        self._store = AsyncStore(store)
        self._calls = Calls()
        self._is_draining = False
        self._event_loop: asyncio.AbstractEventLoop | None = None
        self._on_broken = on_broken
        self._loop = WorkerLoop(engine, inbox, self._deliver, on_broken)
        self._watch = EngineWatch(lambda: self._loop.num_turns, max_silence_s)
        self._watching: asyncio.Task[None] | None = None

    @property
    def state(self) -> WorkerState:
        if self._loop.state is not LoopState.RUNNING:
            return WorkerState.BROKEN
        return WorkerState.DRAINING if self._is_draining else WorkerState.READY

    async def start(self) -> None:
        """Starts the engine's thread. To be called once, before anything else."""
        self._event_loop = asyncio.get_running_loop()
        self._loop.start()
        self._watching = asyncio.create_task(self._watch_engine())

    async def close(self) -> None:
        """Ends all calls with Unavailable, and the engine's thread."""
        if self._watching is not None:
            self._watching.cancel()
        if not await asyncio.to_thread(self._loop.stop, STOP_TIMEOUT_S):
            log.error("the engine's thread is still in a step after %s s", STOP_TIMEOUT_S)
        await self._store.close()

    async def get_info(self, request: worker_pb2.GetInfoRequest) -> worker_pb2.WorkerInfo:
        return self._info

    async def get_status(self, request: worker_pb2.GetWorkerStatusRequest) -> worker_pb2.WorkerStatus:
        problems = [*await self._check_engine(), *await self._store.check()] if request.check else []
        store = await self._store.status()
        return status_to_pb(self._info, self.state.value, self._watch.silent_s, self._loop.stats, store, problems)

    async def prefill(
        self, request: worker_pb2.PrefillRequest, timeout_s: float = MAX_REQUEST_S
    ) -> worker_pb2.PrefillResponse:
        self._require_role(Role.PREFILL)
        with self._serve(hand_off_from_pb(request, self._info.vocab_size), request.attempt, timeout_s) as call:
            answer = await call.take()
        assert answer is not None, "a prefill that ends well has sent its answer"
        return prefill_response_to_pb(request.attempt, answer, self._info.worker_id)

    async def decode(
        self, request: worker_pb2.DecodeRequest, timeout_s: float = MAX_REQUEST_S
    ) -> AsyncGenerator[worker_pb2.DecodeUpdate, None]:
        self._require_role(Role.DECODE)
        with self._serve(decode_request_from_pb(request, self._info.vocab_size), request.attempt, timeout_s) as call:
            while (update := await call.take()) is not None:
                yield decode_update_to_pb(request.attempt, update, self._info.worker_id)

    async def renew(self, request: worker_pb2.RenewRequest) -> worker_pb2.RenewResponse:
        await self._store.renew([RequestId(one) for one in request.request_ids])
        return worker_pb2.RenewResponse()

    async def release(self, request: worker_pb2.ReleaseRequest) -> worker_pb2.ReleaseResponse:
        await self._store.release([RequestId(one) for one in request.request_ids])
        return worker_pb2.ReleaseResponse()

    async def start_drain(self, request: worker_pb2.StartDrainRequest) -> worker_pb2.StartDrainResponse:
        self._is_draining = True
        return worker_pb2.StartDrainResponse()

    async def drain(self, grace_s: float) -> int:
        """Takes no new calls, waits for the open ones, and ends those with WorkerLeaving that outlast the grace.

        Returns how many these were; the router goes on with them elsewhere.
        """
        self._is_draining = True
        try:
            async with asyncio.timeout(grace_s):
                await self._calls.wait_until_none()
        except TimeoutError:
            log.warning("%d requests outlast the grace of %s s", len(self._calls), grace_s)
        left = list(self._calls)
        for call in left:
            self._end(call, WorkerLeaving("the worker is going away"))
        return len(left)

    @contextmanager
    def _serve(self, request: EngineRequest, attempt: int, timeout_s: float) -> Iterator[Call]:
        """A call that lives until its request has ended or the caller leaves the block, at most `timeout_s`."""
        call = self._open(request.request_id, attempt)
        out_of_time = DeadlineExceeded("the request's deadline has passed", request_id=request.request_id)
        timer = asyncio.get_running_loop().call_later(min(timeout_s, MAX_REQUEST_S), self._end, call, out_of_time)
        try:
            self._loop.begin(call, self._behaviour.new_lifecycle(request, time.monotonic()))
            yield call
        finally:
            timer.cancel()
            self._calls.remove(call)
            if not call.closed:
                self._end(call, Cancelled("the caller has gone", request_id=request.request_id))

    def _open(self, request_id: RequestId, attempt: int) -> Call:
        if self.state is not WorkerState.READY:
            refusal = WorkerLeaving if self.state is WorkerState.DRAINING else Unavailable
            raise refusal(f"the worker is {self.state.value}", request_id=request_id)
        call = Call(request_id, attempt)
        earlier = self._calls.open(call)
        if earlier is not None:
            self._end(earlier, Cancelled("a later attempt took its place", request_id=request_id))
        return call

    def _end(self, call: Call, error: BatonError) -> None:
        call.close(error)
        self._loop.withdraw(call, error)

    def _require_role(self, role: Role) -> None:
        if self._behaviour.role is not role:
            raise Unsupported(f"a {self._behaviour.role.value} worker does not serve {role.value} calls")

    async def _watch_engine(self) -> None:
        await self._watch.wait_for_silence()
        log.critical("the engine's thread has not finished a step for %s s: it is given up", self._watch.silent_s)
        self._loop.abandon()
        for call in self._calls:
            call.close(Unavailable("the worker's engine hangs", request_id=call.request_id))
        self._on_broken()

    async def _check_engine(self) -> list[str]:
        try:
            async with asyncio.timeout(CHECK_TIMEOUT_S):
                return await asyncio.wrap_future(self._loop.ask(EngineCore.check))
        except TimeoutError:
            return [f"the engine's thread has been in one step for {CHECK_TIMEOUT_S} s"]
        except Unavailable:
            return ["the engine's thread has ended"]

    def _deliver(self, deliveries: Deliveries) -> None:
        """Runs on the engine's thread: one wake-up of the event loop for all that a step has brought."""
        if deliveries != Deliveries() and self._event_loop is not None and not self._event_loop.is_closed():
            self._event_loop.call_soon_threadsafe(self._apply, deliveries)

    def _apply(self, deliveries: Deliveries) -> None:
        for call, reply in deliveries.replies:
            match reply:
                case Send(update):
                    call.send(update)
                case Close(error):
                    call.close(error)
        if deliveries.released:
            self._store.release_soon(deliveries.released)
