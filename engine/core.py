"""The engine's core: requests in, events out, one step at a time. No threads of its own, no text.

WAITING -> FETCHING -> RUNNING -> ENDED
   ^                   |     \\-> HANDING_OFF -> ENDED
   \\--- preempted -----/
"""

from collections import Counter
from collections.abc import Iterable

from engine.events import (
    Abandoned,
    Emitted,
    EngineStats,
    Event,
    Failed,
    Fetched,
    Finished,
    HandedOff,
    HeldUp,
    Preempted,
    Scheduled,
    Started,
)
from engine.kv_cache import KVCache
from engine.model.batch import Model
from engine.request import EngineRequest, HandOff
from engine.roster import Roster
from engine.runner import Chunk, Gain, Runner
from engine.sampler import Drawn
from engine.schedule.batcher import Batcher, Gate, Plan
from engine.sequence import Sequence, State
from kv_store.device_pool import DevicePool
from kv_store.transfers import Transfers
from wire.errors import BatonError, InvalidRequest, RequestExists
from wire.ids import RequestId


class EngineCore:
    """A model that runs many requests at once.

    Not thread-safe: one thread calls it. `transfers` may work on others; `step` polls it.
    """

    def __init__(self, model: Model, pool: DevicePool, batcher: Batcher, transfers: Transfers) -> None:
        self.model = model
        self.pool = pool
        self._cache = KVCache(pool, transfers)
        self._batcher = batcher
        self._runner = Runner(model, pool.kv, self._cache)
        self._roster = Roster()
        self._num_held: dict[RequestId, int] = {}
        self._events: list[Event] = []
        self._is_stalled = False
        self._num = Counter[str]()

    @property
    def has_requests(self) -> bool:
        return self._roster.num_requests > 0

    @property
    def can_step(self) -> bool:
        """False: nothing will happen before the next `add`, `abort` or finished transfer."""
        return self.has_requests and not self._is_stalled

    def add(self, request: EngineRequest) -> None:
        """Queues a request. InvalidRequest if it can never run here, RequestExists if its id is taken."""
        self._check(request)
        self._roster.add(request, self.pool.layout.block_size)
        self._is_stalled = False

    def abort(self, request_id: RequestId) -> None:
        """Ends a request without a further event, except Abandoned. Does nothing if there is none."""
        self._close(request_id)
        self._is_stalled = False

    def step(self) -> list[Event]:
        """Runs one iteration: finish transfers, plan, run, sample, report. Cheap without work.

        The ends of transfers are reported at once, by a step that does no more, so that they need not wait for a run.
        A faulty request fails alone. A step that raises reports nothing, then or later; its requests can be aborted.
        """
        self._events = []
        num_finished = self._finish_transfers()
        if self._events:
            self._is_stalled = False
            return self._events
        plan = self._plan()
        chunks = self._make_room(plan)
        if chunks:
            self._collect(chunks, self._runner.run(chunks))
        self._is_stalled = not (num_finished or chunks or self._events)
        return self._events

    def stats(self) -> EngineStats:
        return EngineStats(
            blocks=self.pool.ledger.counts(),
            num_running=len(self._roster.running),
            num_waiting=len(self._roster.waiting),
            computed_prompt_tokens=self._num["computed"],
            cached_prompt_tokens=self._num["cached"],
            generated_tokens=self._num["generated"],
            num_preemptions=self._num["preempted"],
        )

    def check(self) -> list[str]:
        """Lists the faults of the pool's books; an empty list is a clean bill."""
        problems = self.pool.ledger.check()
        counts = self.pool.ledger.counts()
        if not self.has_requests and not self._cache.num_in_flight and counts.owned + counts.published:
            problems.append(f"{counts.owned + counts.published} pages have references though no request is here")
        return problems

    def _check(self, request: EngineRequest) -> None:
        if request.request_id in self._roster:
            raise RequestExists("a request of this id is running", request_id=request.request_id)
        request.require_runnable(self.model.vocab_size, self.model.max_context_len)
        num_tokens, capacity = request.max_len, self.pool.ledger.num_pages * self.pool.layout.block_size
        if num_tokens > capacity:
            raise InvalidRequest("max_tokens", f"{num_tokens} tokens exceed what the pool holds ({capacity})")

    def _finish_transfers(self) -> int:
        finished = self._cache.poll()
        for done in finished:
            if isinstance(done, Fetched):
                self._num["cached"] += done.tokens.num_found
                self._events.append(done)
            else:
                self._note_published(done.sequence, done.num_held)
        return len(finished)

    def _note_published(self, sequence: Sequence, num_held: int) -> None:
        request_id = sequence.request.request_id
        if sequence.state is State.HANDING_OFF:
            self._end(sequence)
            self._num_held[request_id] = num_held
            self._close_if_over(request_id)
        elif request_id not in self._roster:
            self._events.append(Abandoned(request_id))

    def _plan(self) -> Plan:
        waiting = self._roster.admissible
        running = [sequence.candidate for sequence in self._roster.running]
        plan = self._batcher.plan(waiting, running, self._cache.pages)
        self._tell_held_up({candidate.handle for candidate in waiting}.difference(plan.admit), plan.gate)
        return plan

    def _tell_held_up(self, handles: Iterable[int], gate: Gate) -> None:
        for sequence in map(self._roster.__getitem__, handles):
            if sequence.gate is not gate:
                sequence.gate = gate
                self._events.append(HeldUp(sequence.request.request_id, sequence.choice, gate))

    def _make_room(self, plan: Plan) -> list[Chunk]:
        """Carries out a plan up to the run; chunks of one token come first, as the runner wants them."""
        for handle in plan.preempt:
            self._preempt(self._roster[handle])
        chunks = [Chunk(self._roster[handle], num_tokens) for handle, num_tokens in plan.run.items()]
        chunks = [chunk for chunk in chunks if self._cache.grow(chunk.sequence, chunk.num_tokens)]
        for handle in plan.admit:
            if not self._cache.admit(self._roster[handle]):
                break
            sequence = self._roster[handle]
            self._events.append(Scheduled(sequence.request.request_id, sequence.choice))
        for chunk in chunks:
            self._note_turn(chunk.sequence)
        return sorted(chunks, key=lambda chunk: chunk.num_tokens > 1)

    def _note_turn(self, sequence: Sequence) -> None:
        if not sequence.has_started:
            sequence.has_started = True
            self._events.append(Started(sequence.request.request_id, sequence.choice))

    def _preempt(self, sequence: Sequence) -> None:
        self._cache.set_aside(sequence)
        sequence.state = State.WAITING
        self._num["preempted"] += 1
        self._events.append(Preempted(sequence.request.request_id, sequence.choice))

    def _collect(self, chunks: list[Chunk], gains: list[Gain]) -> None:
        for chunk, gain in zip(chunks, gains, strict=True):
            sequence = chunk.sequence
            if sequence.state is State.ENDED:
                continue
            if isinstance(gain, BatonError):
                self._cache.withdraw(sequence)
                self._fail(sequence.request.request_id, gain)
                continue
            self._count_prompt(sequence, chunk)
            self._cache.advance(sequence, chunk.num_tokens)
            if gain is not None and gain.token_id is not None:
                self._emit(sequence, gain.token_id, gain)

    def _count_prompt(self, sequence: Sequence, chunk: Chunk) -> None:
        num_prompt = sequence.num_prompt
        self._num["computed"] += min(chunk.context_len, num_prompt) - min(sequence.num_computed, num_prompt)

    def _emit(self, sequence: Sequence, token_id: int, drawn: Drawn) -> None:
        request_id, position = sequence.request.request_id, len(sequence.output_ids)
        sequence.append(token_id)
        end = sequence.end(self.model)
        self._num["generated"] += 1
        self._events.append(Emitted(request_id, sequence.choice, position, token_id, drawn.logprobs))
        if end is not None:
            self._end(sequence)
            self._events.append(Finished(request_id, sequence.choice, end.reason, end.stop_token_id))
        elif isinstance(sequence.request, HandOff):
            self._hand_off(sequence)
        self._close_if_over(request_id)

    def _hand_off(self, sequence: Sequence) -> None:
        """Hands off a sequence after its first token; the first sibling to do so publishes the prompt for all."""
        request_id = sequence.request.request_id
        if request_id in self._num_held:
            self._end(sequence)
        else:
            self._num_held[request_id] = 0
            sequence.state = State.HANDING_OFF
            self._cache.hand_off(sequence)

    def _close_if_over(self, request_id: RequestId) -> None:
        if any(self._roster.siblings(request_id)):
            return
        if request_id in self._num_held:
            self._events.append(HandedOff(request_id, self._num_held[request_id]))
        self._close(request_id)

    def _fail(self, request_id: RequestId, error: BatonError) -> None:
        self._close(request_id)
        self._events.append(Failed(request_id, error))

    def _close(self, request_id: RequestId) -> None:
        self._num_held.pop(request_id, None)
        for sequence in self._roster.remove(request_id):
            self._end(sequence)

    def _end(self, sequence: Sequence) -> None:
        self._cache.free(sequence)
        sequence.state = State.ENDED
