"""The engine's core: requests in, tokens and events out, step by step. Without threads or text.

WAITING -> FETCHING -> PREFILL -> DECODE -> ENDED
   ^          \\          |  \\-> HANDING_OFF -> ENDED
   |           \\---------+----> DECODE, if the fetch found all KV
   \\--- preempted, from PREFILL or DECODE; from FETCHING, if a part of the blocks that a policy kept is gone

A sequence is one choice of a request, and the sequences of one request are siblings. The first, the leader, computes or
fetches the prompt's KV; the others wait, draw their first token from its last row, and are then admitted with its
pages. A sequence has a row of `DecodeRows` from its first step in DECODE on. While all sequences have rows, a step just
runs the rows.
"""

from collections import Counter
from collections.abc import Collection, Mapping
from collections.abc import Sequence as Seq

import torch

from engine.decoding import Decoding
from engine.events import (
    EngineStats,
    Event,
    Failed,
    Fetched,
    Finished,
    HandedOff,
    HeldUp,
    HoldOrphaned,
    Preempted,
    Scheduled,
    Scored,
    Started,
    StepOutput,
)
from engine.kv.dropping import HEAVIEST, Chooser
from engine.kv.retention import require_storable
from engine.model.batch import CausalModel
from engine.pages.cache import KVCache
from engine.request import BlocksAhead, EngineRequest, HandOff
from engine.schedule.batcher import Batcher, Phase, Plan
from engine.sequence import Sequence, SequenceTable
from engine.speculation.speculator import Speculator
from engine.step.decode_rows import DecodeRows
from engine.step.prefill_meter import PrefillMeter
from engine.step.runner import Launched, Runner
from engine.step.work import Gains, PromptChunk, Work
from kv_store.device_pool import DevicePool
from kv_store.prefix.costs import Costs
from kv_store.transfers import Transfers
from wire import errors
from wire.errors import BatonError, InvalidRequest, RequestExists
from wire.ids import AttemptId, BlockKey
from wire.sampling import Logprobs

MAX_SCORED_TOKENS = 512
"""Bound on the prompt tokens that a step scores: each needs a row of logits, maybe a megabyte."""
_BEFORE_RUN = (Phase.WAITING, Phase.PREFILL)


class EngineCore:
    """A model that runs many requests together.

    Not thread-safe. `transfers` may use other threads; `step` polls it.
    """

    def __init__(
        self,
        model: CausalModel,
        pool: DevicePool,
        batcher: Batcher,
        transfers: Transfers,
        speculator: Speculator | None = None,
        chooser: Chooser = HEAVIEST,
        meter: PrefillMeter | None = None,
    ) -> None:
        self.model = model
        self.pool = pool
        self._cache = KVCache(pool, transfers)
        self._batcher = batcher
        self._rows = DecodeRows(model, pool.ledger.num_pages)
        self._runner = Runner(model, pool.kv, self._cache, self._rows, chooser)
        self._speculator = speculator or Speculator()
        self._decoding = Decoding(self._rows, self._speculator, self._cache.allocator)
        self._meter = meter or PrefillMeter(Costs(model.layout.block_size))
        self._table = SequenceTable()
        self._num_held: dict[AttemptId, int] = {}
        self._events: list[Event] = []
        self._is_stalled = False
        self._num = Counter[str]()

    @property
    def has_requests(self) -> bool:
        return bool(self.attempts)

    @property
    def attempts(self) -> Collection[AttemptId]:
        """The ids of the engine's requests."""
        return self._table.attempts

    @property
    def can_step(self) -> bool:
        """Whether `step` has work; if not, nothing happens before the next `add`, `abort` or finished transfer."""
        return self.has_requests and not self._is_stalled

    def add(self, request: EngineRequest) -> None:
        """Queues a request. Raises InvalidRequest if it can never run here, RequestExists if its id is taken."""
        self._check(request)
        self._table.add(request, self.model)
        self._is_stalled = False

    def abort(self, attempt_id: AttemptId) -> None:
        """Ends a request without a further event, except HoldOrphaned. Does nothing for an unknown request."""
        self._cache.pass_on_hint(self._close(attempt_id))
        self._is_stalled = False

    def recall(self, attempt_id: AttemptId) -> bool:
        """Ends a request without a further event if it only waits, with pages or without. Returns whether it did."""
        sequences = [*self._table.siblings(attempt_id)]
        if not sequences or any(one.has_started or one.phase not in _BEFORE_RUN for one in sequences):
            return False
        self.abort(attempt_id)
        return True

    def prefetch(self, ahead: BlocksAhead) -> None:
        """Begins to read blocks of a request that may come, into spare pages. Leaves no trace if it does not come."""
        if not self._table.waiting:
            self._cache.prefixes.prefetch(ahead, self._table.running)

    def end(self, attempt_id: AttemptId, index: int) -> bool:
        """Ends a choice without an event; the other choices go on. Returns whether it did.

        Does nothing for an ended choice, or for a hand-off's choice, which ends with its first token anyway.
        """
        choices = (one for one in self._table.siblings(attempt_id) if one.choice.index == index)
        sequence = next(choices, None)
        if sequence is None or isinstance(sequence.request, HandOff):
            return False
        self._end(sequence)
        self._close_if_over(attempt_id)
        self._is_stalled = False
        return True

    def step(self) -> StepOutput:
        """Runs one iteration: finish transfers, plan, launch, launch ahead, reclaim, read, apply. Cheap without work.

        A step with ended transfers only reports them, so that they do not wait for a run. A faulty request fails alone.
        A step that raises reports nothing, then or later; its requests can be aborted.
        """
        output = StepOutput()
        self._events = output.before
        num_finished = self._finish_transfers()
        if output.before:
            self._is_stalled = False
            return output
        work = self._decoding.work(self._table.num_active, self._runner.has_launched_ahead)
        work = work or self._carry_out(self._plan())
        if work is not None:
            work = work if self._runner.has_launched_ahead else self._decoding.with_drafts(work)
            began_s = self._meter.clock()
            with torch.inference_mode():
                launched = self._runner.launch(work)
                self._launch_ahead(work, launched)
                if self._runner.launches_ahead:
                    self._cache.allocator.reclaim()
                gains = self._runner.read(work, launched)
            self._meter.note(work, began_s, has_waited=bool(gains.sequences))
            self._events = output.after
            self._apply(work, gains, output)
        self._is_stalled = not (num_finished or work or output.before)
        return output

    def plan_by(self, batcher: Batcher) -> None:
        """Plans by another batcher from the next step on."""
        self._batcher = batcher

    def stats(self) -> EngineStats:
        num_waiting = 0 if len(self._rows) == self._table.num_active else len(self._table.waiting)
        return EngineStats(
            blocks=self.pool.ledger.counts(),
            num_running=self._table.num_active - num_waiting,
            num_waiting=num_waiting,
            computed_prompt_tokens=self._num["computed"],
            cached_prompt_tokens=self._num["cached"],
            generated_tokens=self._num["generated"],
            num_preemptions=self._num["preempted"],
            num_drafts=self._speculator.num_drafts,
            num_guessed_tokens=self._speculator.num_guessed,
            num_accepted_tokens=self._speculator.num_accepted,
        )

    def drop_cached(self, keys: Seq[BlockKey]) -> int:
        """Takes these blocks, or all, out of the device's index, and counts them. Sequences keep their pages."""
        return self._cache.unindex(keys)

    def check(self) -> list[str]:
        """Lists violated invariants of the pool; empty if none."""
        problems = [*self.pool.ledger.check(), *self._rows.check(int(self._runner.launches_ahead))]
        counts = self.pool.ledger.counts()
        if not self.has_requests and not self._cache.num_in_flight and counts.owned + counts.published:
            problems.append(f"{counts.owned + counts.published} pages have references though no request is here")
        if not self.has_requests and self.pool.num_open:
            problems.append(f"{self.pool.num_open} pages are open though no request is here")
        return problems

    def _check(self, request: EngineRequest) -> None:
        if request.attempt_id in self.attempts:
            raise RequestExists("a request of this id is running", attempt_id=request.attempt_id)
        request.require_runnable(self.model.vocab_size, self.model.max_context_len)
        require_storable(request, self.pool.layout, self.pool.ledger.num_pages)

    def _finish_transfers(self) -> int:
        finished = self._cache.poll()
        for done in finished:
            if isinstance(done, Fetched):
                self._num["cached"] += done.tokens.num_found
                self._events.append(done)
            else:
                self._note_hand_off(done.sequence, done.num_held)
        return len(finished)

    def _note_hand_off(self, sequence: Sequence, num_held: int) -> None:
        attempt_id = sequence.request.attempt_id
        if sequence.phase is Phase.HANDING_OFF:
            self._end(sequence)
            self._num_held[attempt_id] = num_held
            self._close_if_over(attempt_id)
        elif attempt_id not in self.attempts:
            self._events.append(HoldOrphaned(attempt_id))

    def _launch_ahead(self, work: Work, launched: Launched | Exception) -> None:
        if self._runner.launches_ahead and not isinstance(launched, Exception):
            pages = self._decoding.pages_ahead(work, self._table.num_active)
            if pages is not None:
                self._runner.launch_ahead(launched, *pages)

    def _plan(self) -> Plan:
        for jump in self._cache.prefixes.follow(self._table.running):
            self._num["cached"] += jump.num_found
            self._events.append(jump)
        self._table.settle()
        waiting = self._table.admissible
        running = [sequence.candidate for sequence in self._table.running]
        plan = self._batcher.plan(waiting, running, self._cache.allocator.available, self._meter.costs)
        held_up = {candidate.handle for candidate in waiting}.difference(plan.admit)
        for sequence in map(self._table.__getitem__, held_up):
            if sequence.gate is not plan.gate:
                sequence.gate = plan.gate
                self._events.append(HeldUp(sequence.choice.attempt_id, sequence.choice.index, plan.gate))
        return plan

    def _carry_out(self, plan: Plan) -> Work | None:
        """Carries out a plan up to the run; chunks that are decoding rows come first, as the runner needs."""
        for handle in plan.preempt:
            self._preempt(self._table[handle])
        decoding, chunks = self._make_room(plan)
        for handle in plan.admit:
            choice = self._table[handle].choice
            if not self._cache.prefixes.admit(self._table[handle], self._table.siblings(choice.attempt_id)):
                break
            self._events.append(Scheduled(choice.attempt_id, choice.index))
        if len(decoding) < len(self._rows):
            self._rows.bring_first(decoding)
        work = Work(slice(0, len(decoding)), sorted(chunks, key=lambda chunk: not chunk.is_decoding))
        return work if decoding or chunks else None

    def _make_room(self, plan: Plan) -> tuple[list[Sequence], list[PromptChunk]]:
        """Finds pages for the tokens of a plan; returns the decoding sequences and the chunks that got pages."""
        decoding, chunks, num_scorable = [], [], MAX_SCORED_TOKENS
        for handle, num_planned in plan.run.items():
            sequence = self._table[handle]
            boundary = sequence.kv.boundary
            num_tokens = num_planned if boundary is None else min(num_planned, boundary - sequence.num_computed)
            if sequence.wants_scores:
                num_tokens = min(num_tokens, num_scorable)
                num_scorable -= num_tokens
            num_tokens = self._cache.allocator.grow(sequence, num_tokens)
            if not num_tokens:
                continue
            if not sequence.has_started:
                sequence.has_started = True
                self._events.append(Started(sequence.choice.attempt_id, sequence.choice.index))
            if sequence.phase is Phase.DECODE:
                self._rows.put(sequence)
                decoding.append(sequence)
            else:
                siblings = self._table.siblings(sequence.choice.attempt_id)
                chunks.append(PromptChunk.of(sequence, num_tokens, siblings))
        return decoding, chunks

    def _preempt(self, sequence: Sequence) -> None:
        self._leave_rows(sequence)
        self._cache.set_aside(sequence)
        sequence.phase = Phase.WAITING
        self._num["preempted"] += 1
        self._events.append(Preempted(sequence.choice.attempt_id, sequence.choice.index))

    def _apply(self, work: Work, gains: Gains, output: StepOutput) -> None:
        """Applies a run to rows, sequences and pages, in an order in which each step has what it needs.

        rows         count their tokens before any leaves, as drafts and full blocks are known by row
        failures     end their requests before their tokens are reported or their blocks named
        tokens       join their sequences: blocks are named after them
        blocks       that are full are indexed before KV is dropped, or an end gives their pages back
        ends         leave a hand-off's pages to a sibling, and come before requests are closed by hand-offs
        hand-offs    begin, and the other choices continue
        """
        rows = self._rows
        rows.advance(gains.newest(work.num_rows), gains.num_gained)
        self._events += self._speculator.learn(rows, work.drafts, gains.num_gained)
        filled = [rows.sequences[row] for row in rows.full(work.num_rows)]
        for sequence, error in gains.failed.items():
            self._fail(sequence, error)
        gains = gains.left()
        self._tell_scores(gains.scores)
        ending = gains.emit(output)
        self._num["generated"] += len(output.token_ids)
        chunks = [chunk for chunk in work.chunks if chunk.sequence.phase is not Phase.ENDED]
        starts = {one: one.num_computed - 1 for one in filled if one.phase is not Phase.ENDED}
        self._fill(starts, chunks, [chunk.sequence for chunk in chunks if _hands_off(chunk, ending)])
        self._finish([one for one in ending if one.phase is not Phase.ENDED], chunks)
        for sequence in (one for chunk in chunks for one in chunk.sampled if one.phase is not Phase.ENDED):
            self._go_on(sequence)

    def _fill(self, starts: dict[Sequence, int], chunks: list[PromptChunk], handing_off: list[Sequence]) -> None:
        """Indexes the blocks that rows and chunks have filled, writes them through, and drops KV at a boundary."""
        starts |= self._advance(chunks)
        self._cache.cache_filled(starts, handing_off)
        for sequence in starts:
            if sequence.kv.boundary == sequence.num_computed:
                self._drop(sequence)

    def _drop(self, sequence: Sequence) -> None:
        """Drops KV of a sequence at its boundary; an error, such as too little memory, fails this sequence alone."""
        try:
            self._runner.drop(sequence)
        except Exception as failure:  # of whatever kind a model, or what it runs on, may raise
            self._fail(sequence, errors.report(failure, attempt_id=sequence.request.attempt_id))
        else:
            self._rows.drop(sequence)

    def _tell_scores(self, scores: Mapping[Sequence, tuple[Logprobs, ...]]) -> None:
        for sequence, logprobs in scores.items():
            if sequence.phase is not Phase.ENDED:
                choice = sequence.choice
                self._events.append(Scored(choice.attempt_id, choice.index, sequence.num_scored, logprobs))
                sequence.num_scored += len(logprobs)

    def _advance(self, chunks: list[PromptChunk]) -> dict[Sequence, int]:
        """Counts the tokens of chunks as computed; returns the start of each."""
        starts = {chunk.sequence: chunk.sequence.num_computed for chunk in chunks}
        for chunk in chunks:
            sequence, num_prompt = chunk.sequence, chunk.sequence.request.num_prompt
            num_computed = min(chunk.context_len, num_prompt) - min(sequence.num_computed, num_prompt)
            self._num["computed"] += num_computed
            sequence.advance(chunk.num_tokens)
            self._table.charge_prompt(sequence, num_computed)
        return starts

    def _finish(self, ending: list[Sequence], chunks: list[PromptChunk]) -> None:
        """Ends choices. If a hand-off's leader ends at once, an unfinished sibling gets its KV and hands it off."""
        for chunk in chunks:
            leader = chunk.sequence
            heir = next((one for one in chunk.sampled if one not in ending), None)
            if leader in ending and heir is not None and isinstance(leader.request, HandOff):
                heir.kv, leader.kv = leader.kv, heir.kv
        for sequence in ending:
            choice, (reason, stop_token_id) = sequence.choice, sequence.ending.after(sequence.output_ids[-1])
            self._end(sequence)
            self._events.append(Finished(choice.attempt_id, choice.index, reason, stop_token_id))
            self._close_if_over(choice.attempt_id)

    def _go_on(self, sequence: Sequence) -> None:
        """Continues a sequence that has computed all known tokens and gained a token."""
        if isinstance(sequence.request, HandOff):
            self._hand_off(sequence)
            self._close_if_over(sequence.choice.attempt_id)
        elif sequence.phase is not Phase.WAITING:
            sequence.begin_run(sequence.num_computed)

    def _hand_off(self, sequence: Sequence) -> None:
        """Hands off a sequence after its first token; the first sibling writes the prompt for all."""
        attempt_id = sequence.request.attempt_id
        if attempt_id in self._num_held:
            self._end(sequence)
        else:
            self._num_held[attempt_id] = 0
            sequence.phase = Phase.HANDING_OFF
            self._table.retire(sequence)
            self._cache.hand_off(sequence)

    def _close_if_over(self, attempt_id: AttemptId) -> None:
        if any(self._table.siblings(attempt_id)):
            return
        if attempt_id in self._num_held:
            self._events.append(HandedOff(attempt_id, self._num_held[attempt_id]))
        self._cache.pass_on_hint(self._close(attempt_id))

    def _fail(self, sequence: Sequence, error: BatonError) -> None:
        """Ends the request of a failed sequence, unless a sibling's failure has ended it."""
        if sequence.phase is not Phase.ENDED:
            if not isinstance(error, InvalidRequest):  # a grammar's fault says nothing of KV that others share
                self._cache.purge(sequence)
            self._close(sequence.choice.attempt_id)
            self._events.append(Failed(sequence.choice.attempt_id, error))

    def _close(self, attempt_id: AttemptId) -> list[Sequence]:
        """Ends a request's unfinished sequences; returns all its sequences."""
        self._num_held.pop(attempt_id, None)
        sequences = self._table.remove(attempt_id)
        for sequence in sequences:
            self._end(sequence)
        return sequences

    def _leave_rows(self, sequence: Sequence) -> None:
        self._rows.remove(sequence)
        self._speculator.forget(sequence)

    def _end(self, sequence: Sequence) -> None:
        self._leave_rows(sequence)
        self._cache.free(sequence)
        self._table.retire(sequence)
        sequence.phase = Phase.ENDED


def _hands_off(chunk: PromptChunk, ending: Seq[Sequence]) -> bool:
    """Tells whether a hand-off behind this chunk writes all blocks of the prompt, this chunk's too, in one transfer."""
    sequence = chunk.sequence
    goes_on = any(one not in ending for one in chunk.sampled)
    return goes_on and isinstance(sequence.request, HandOff) and sequence.kv.is_plain
