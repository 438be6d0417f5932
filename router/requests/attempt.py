"""An attempt at a request, under one id: prefill and decode, or decode alone.

    route ─┬─▶ wait for room ──▶ prefill ─┬─▶ choose decode ──▶ stream ──▶ every choice has ended
           └────────── decode alone ──────┘

A prompt that waits at its prefill worker may be recalled for another one (`router/moves.py`): a new attempt follows.
An attempt goes to decode alone where the router expects that to be cheaper, or without a prefill pool. Once the client
has a token it always does: the decode worker fetches published blocks and computes the rest. So does the attempt after
NaN or infinite logits, if cached KV was read; it reads no cached KV.
"""

import asyncio
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from router.disaggregation import PrefillReason
from router.moves import PromptMoves, QueuedPrompt
from router.observe.counterfactual import RequestCosts
from router.observe.demand import DemandMeter
from router.observe.journal import RequestJournal
from router.observe.metrics import RequestMetrics
from router.observe.recent_requests import RecentRequests
from router.observe.traces import RequestTrace, Traces
from router.other_namespaces import OtherNamespaces
from router.placement import Placement, Route
from router.requests.answer import ChoiceStreams, PromptAnswer
from router.requests.checks import ServingLimits, ValidRequest
from router.requests.forecast import Forecast, PromptAhead, deferral_s
from router.requests.outbox import ReplyWriter
from router.requests.prompt import PreparedPrompt, PromptPreparer
from router.requests.read_ahead import ReadAhead
from router.requests.replay import AttemptHistory, IsolatedRetries, Quarantine
from router.workers.holds import Claim, HoldBudgets
from router.workers.line import Take
from router.workers.members import Member
from router.workers.membership import PROBE_TIMEOUT_S
from text.grammar import in_sources
from wire.convert import sampling_to_pb, tiers_to_pb
from wire.errors import (
    BatonError,
    Cancelled,
    InvalidRequest,
    PromptReturned,
    Unavailable,
    WireError,
    WorkerLeaving,
)
from wire.ids import AttemptId, NamespaceRoot, QualifiedId, RequestId, WorkerId, attempt_id, attempt_numbers
from wire.journal import Kind
from wire.load.fairness import OUTPUT_COST, FairShares, deferred_between
from wire.pb import inference_pb2 as pb
from wire.pb import worker_pb2
from wire.pools import Role, WorkerState


@dataclass(frozen=True, kw_only=True)
class Services:
    """The parts that all requests share. mark_lost: takes the id of a lost worker. traces: None if off.

    attempt_numbers: unique numbers, for a client may reuse an id while workers still know its first use.
    """

    prompts: PromptPreparer
    placement: Placement
    holds: HoldBudgets
    isolated_retries: IsolatedRetries
    quarantine: Quarantine
    mark_lost: Callable[[WorkerId], None]
    metrics: RequestMetrics
    namespaces: OtherNamespaces
    demand: DemandMeter
    traces: Traces | None = None
    costs: RequestCosts = field(default_factory=RequestCosts)
    recent: RecentRequests = field(default_factory=RecentRequests)
    shares: FairShares = field(default_factory=FairShares)
    forecast: Forecast = field(default_factory=Forecast)
    moves: PromptMoves = field(default_factory=PromptMoves)
    attempt_numbers: Iterator[int] = field(default_factory=attempt_numbers)


@dataclass(frozen=True, kw_only=True)
class AdmittedRequest:
    """An admitted request. root: its tenant's. weight: its key's, in fair shares. Times are by the event loop's clock.

    tenant: its name in fair shares, one for all versions of the model; a request on one worker has a name of its own.
    id: the client's id, qualified by its tenant. journal: the request's, from its arrival on. life_s: the client's
    deadline, or the longest possible. deadline_s: a moment before its end. trace: None without a trace.
    """

    id: QualifiedId
    client_id: RequestId
    valid: ValidRequest
    limits: ServingLimits
    root: NamespaceRoot
    tenant: str
    journal: RequestJournal
    life_s: float
    deadline_s: float
    weight: float = 1.0
    trace: RequestTrace | None = None

    def charge(self, shares: FairShares, num_tokens: int) -> None:
        """Charges its tenant for generated tokens."""
        shares.charge_output(self.tenant, OUTPUT_COST * num_tokens / self.weight)


@dataclass(frozen=True, kw_only=True)
class PreparedRequest:
    """A request with known tokens, and its answer so far, which all attempts share."""

    admitted: AdmittedRequest
    services: Services
    prompt: PreparedPrompt
    answer: ChoiceStreams
    prompt_answer: PromptAnswer
    reply: ReplyWriter

    @property
    def journal(self) -> RequestJournal:
        return self.admitted.journal

    @property
    def complete(self) -> pb.Complete:
        """Makes the last message of a complete answer, without its timeline."""
        return pb.Complete(
            choices=self.answer.finishes,
            usage=pb.Usage(
                prompt_tokens=len(self.prompt.prompt_ids),
                completion_tokens=self.answer.num_tokens,
                cached_tokens=tiers_to_pb(self.journal.cached),
                guessed_tokens=self.journal.total("tokens_guessed"),
                accepted_tokens=self.journal.total("tokens_accepted"),
                reasoning_tokens=self.answer.num_reasoning_tokens,
            ),
            seed=self.prompt.sampling.seed,
        )

    def note_source(self, source: worker_pb2.PromptSource) -> None:
        """Notes the sources of the prompt's KV, and begins to name the first missing block in other namespaces."""
        self.journal.source = worker_pb2.PromptSource()
        self.journal.source.CopyFrom(source)  # it keeps the line's message, else, with the updates of others
        prepared = self.prompt
        present = self.admitted.limits.model.namespace
        self.services.namespaces.begin(self.journal, prepared.prompt_ids, prepared.public, present)


class AttemptFailed(Exception):
    """An attempt ended with an error of its worker, or of the line to it."""

    def __init__(self, error: BatonError) -> None:
        super().__init__(error.message)
        self.error = error


def _do_nothing() -> None:
    """Does nothing about a prompt that is not counted."""


def _leave_alone(num_blocks: int) -> None:
    """Does nothing about stored blocks."""


class Attempt:
    """An attempt at the unfinished choices. is_alone: it may be the last; see IsolatedRetries.

    has_read_cache: some worker found KV of the prompt in a tier.
    """

    def __init__(self, request: PreparedRequest, history: AttemptHistory, is_alone: bool) -> None:
        self.id = attempt_id(request.admitted.id, next(request.services.attempt_numbers))
        self.request = request
        self.history = history
        self.is_alone = is_alone
        self.has_read_cache = False
        self._clock = asyncio.get_running_loop().time
        self._computed: Callable[[], object] = _do_nothing

    async def run(self) -> None:
        """Runs until every choice has ended. Raises AttemptFailed, or Overloaded if it could not end in time."""
        request = self.request
        placement, admitted = request.services.placement, request.admitted
        is_fresh = not request.answer.num_tokens
        keys, num_prompt = request.prompt.keys, len(request.prompt.prompt_ids)
        route = placement.route(keys, num_prompt, request.services.holds.full_nodes)
        if is_fresh:
            request.journal.plan(route.reason)
        prompt = PromptAhead(admitted.tenant, route.num_new_tokens, admitted.weight)
        forecast, left_s = request.services.forecast, admitted.deadline_s - self._clock()
        if is_fresh and self.history.number == 1:
            speeds = placement.token_s(route)
            expected_s = forecast.require_in_time(prompt, request.prompt.sampling, speeds, left_s)
            request.journal.expect(expected_s, self._clock())
        with forecast.queued(prompt) as self._computed:
            await self._run(route, is_fresh)

    async def _run(self, route: Route, is_fresh: bool) -> None:
        request, journal, num_prompt = self.request, self.request.journal, route.num_prompt_tokens
        placement, holds = request.services.placement, request.services.holds
        if route.prefill_node is None or not (is_fresh and self.history.reads_cache):
            await self._decode(route)
            return
        request.reply.begin(num_prompt)
        journal.begin(Kind.WAIT_ROOM, self._clock())
        admitted = request.admitted
        claim = Claim(admitted.tenant, self._cost(route), admitted.valid.priority)
        async with holds.hold(self.id, request.prompt.held_keys, route.prefill_node, claim):
            journal.leave(self._clock())
            member = placement.choose_prefill(route)
            if member is not None:
                rest = route.through(member.id)
                ahead = ReadAhead(self.id, request.admitted.root, request.prompt, rest, placement)
                prefill = await self._prefill(route, member, ahead)
                if not request.answer.has_ended:
                    placement.hand_off.learn(prefill, await self._decode(replace(rest, prefetched=ahead.sent)))
        if member is None:  # the node has lost its prefill workers meanwhile
            journal.plan(PrefillReason.ABSENT)
            await self._decode(route)

    async def _prefill(self, route: Route, member: Member, ahead: ReadAhead) -> Sequence[pb.Span]:
        """Has a worker publish the prompt's blocks under a hold; its last update brings a token for each choice.

        A decode worker reads them meanwhile, unless the first token is the last.
        """
        sampling, services = self.request.prompt.sampling, self.request.services
        keep, work = services.holds.keep, member.assigned(sampling.n, route.num_new_tokens, route.keys)
        queued = services.moves.queued(self._queued(route, member))
        with queued, work, ahead.running() as on_stored:
            goes_on = sampling.max_tokens > 1
            return await self._run_on(route, member, Role.PREFILL, keep, on_stored if goes_on else _leave_alone)

    def _queued(self, route: Route, member: Member) -> QueuedPrompt:
        """Describes the prompt at a prefill worker; a prompt that has moved, or is tried alone, stays there."""
        return QueuedPrompt(
            member=member,
            num_tokens=route.num_new_tokens,
            priority=self.request.admitted.valid.priority,
            missing=route.num_missing,
            recall=partial(member.line.recall, self.id),
            may_move=not (self.history.is_moved or self.is_alone),
            is_deferred=deferred_between(*self._deferral_s(route, member), self._clock),
        )

    def _cost(self, route: Route) -> float:
        """Returns the cost of the prompt for its tenant: none if the prompt has moved, for it was charged before."""
        return 0.0 if self.history.is_moved else route.num_new_tokens / self.request.admitted.weight

    async def _decode(self, route: Route) -> Sequence[pb.Span]:
        """Has a worker decode the unfinished choices. The hold, if any, ends when their blocks are fetched."""
        answer, services, journal = self.request.answer, self.request.services, self.request.journal
        services.shares.charge(self.request.admitted.tenant, self._cost(route))
        journal.begin(Kind.WAIT_DECODE, self._clock())
        member = await services.placement.choose_decode(route)
        self.request.reply.begin(route.num_prompt_tokens)
        journal.leave(self._clock())

        def fetched(attempt: AttemptId) -> None:
            end_prefilling()
            services.holds.release(attempt)

        choices = answer.unfinished
        num_tokens = sum(route.num_prompt_tokens + len(choice.output.ids) for choice in choices)
        work = member.assigned(len(choices), num_tokens, route.keys)
        with work, member.prefilling(route.num_new_tokens) as end_prefilling:
            spans = await self._run_on(route, member, Role.DECODE, fetched)
        if not answer.has_ended:
            raise AttemptFailed(WireError("a worker ended an attempt before every choice had ended"))
        return spans

    async def _run_on(
        self,
        route: Route,
        member: Member,
        role: Role,
        on_prompt: Callable[[AttemptId], None],
        on_stored: Callable[[int], None] = _leave_alone,
    ) -> Sequence[pb.Span]:
        """Runs the attempt on a worker; returns the spans of the call.

        on_prompt: called when prefill has published the blocks, or decode has them. on_stored: takes the number of
        first blocks that prefill has published by now.
        """
        if self.is_alone:
            await self._require_answer(member)
        journal, told, error = self.request.journal, list[pb.Span](), ""
        journal.call(role, member.id, self._clock())
        try:
            await member.line.run(self._begin(route, member, role), self._taker(member, on_prompt, on_stored, told))
        except BatonError as broken:
            failure = self._failure(member, broken)
            error = failure.error.reason
            raise failure from broken
        finally:
            spans = journal.end_call(self._clock(), told, error)
        return spans

    def _failure(self, member: Member, error: BatonError) -> AttemptFailed:
        """Returns the failure for a call's error, and marks a worker that broke off the call as lost."""
        if isinstance(error, InvalidRequest):
            sources = self.request.prompt.frame.sources(self.request.admitted.valid.sampling.response_format)
            return AttemptFailed(in_sources(error, sources))
        if isinstance(error, PromptReturned) or not isinstance(error, Unavailable | Cancelled):
            return AttemptFailed(error)
        is_leaving = isinstance(error, Unavailable) and member.state is WorkerState.DRAINING
        self.request.services.mark_lost(member.id)
        return AttemptFailed(WorkerLeaving(error.message) if is_leaving else error)

    async def _require_answer(self, member: Member) -> None:
        """Asks a worker for a sign of life: a dead worker must not use up a request's last attempt."""
        try:
            await member.line.questions.status(False, PROBE_TIMEOUT_S)
        except BatonError as error:
            self.request.services.mark_lost(member.id)
            raise AttemptFailed(WorkerLeaving(error.message)) from error

    def _begin(self, route: Route, member: Member, role: Role) -> worker_pb2.Begin:
        request, admitted, prepared = self.request, self.request.admitted, self.request.prompt
        public, services, is_prefill = prepared.public, request.services, role is Role.PREFILL
        after_s, until_s = self._deferral_s(route, member) if is_prefill else (0.0, 0.0)
        return worker_pb2.Begin(
            id=self.id,
            namespace_root=admitted.root,
            prompt=prepared.ids_to_send,
            sampling_params=sampling_to_pb(prepared.sampling),
            choices=request.answer.unfinished,
            time_left_s=max(admitted.deadline_s - self._clock(), 0.001),
            block_addresses=services.placement.block_addresses(route, member),
            computes_all=not self.history.reads_cache,
            num_scored=request.prompt_answer.num_scored,
            public_root=public.root if public else b"",
            num_public_blocks=public.num_blocks if public else 0,
            kv_policy=str(admitted.valid.dropping or ""),
            session=admitted.valid.session,
            keep_s=admitted.valid.keep_s,
            weight=admitted.weight,
            priority=admitted.valid.priority,
            output_cost=services.shares.output_cost(admitted.tenant) if is_prefill else 0.0,
            deferred_after_s=after_s,
            deferred_until_s=until_s,
        )

    def _deferral_s(self, route: Route, member: Member) -> tuple[float, float]:
        """Returns the seconds from now between which a prefill worker defers the prompt, (0.0, 0.0) for never.

        A worker that has learned no speed counts like the slowest of the others. A prompt that is tried alone is not
        deferred: others wait for it.
        """
        admitted, forecast, now_s = self.request.admitted, self.request.services.forecast, self._clock()
        token_s = member.prefill_token_s or max(self.request.services.placement.token_s(route), default=0.0)
        left_s = admitted.deadline_s - now_s - forecast.answer_s(admitted.tenant, self.request.prompt.sampling)
        age_s, computes_s = admitted.journal.age_s(now_s), route.num_missing(member.id) * token_s
        found = None if self.is_alone else deferral_s(forecast.limit_s, age_s, computes_s, left_s)
        return found or (0.0, 0.0)

    def _taker(
        self,
        member: Member,
        on_prompt: Callable[[AttemptId], None],
        on_stored: Callable[[int], None],
        spans: list[pb.Span],
    ) -> Take:
        """Makes the function that takes an attempt's updates, on the line's task, without waiting."""
        answer, tells_first = self.request.answer, self.request.journal.source is None

        def take(update: worker_pb2.Update) -> bool:
            if update.choices:
                member.engine_silent_s = 0.0  # a token is news of a step, sooner than the next status is
            if update.HasField("prompt"):
                self.has_read_cache |= bool(update.prompt.cached_tokens)
                if tells_first:
                    self.request.note_source(update.prompt)
                on_prompt(self.id)
            if update.num_stored_blocks:
                on_stored(update.num_stored_blocks)
            self._pass_on(update)
            spans.extend(update.end.spans)
            stopped = answer.take_stopped()
            if stopped and not (update.HasField("end") or answer.worker_goes_on):
                member.line.end_choices(self.id, stopped)
            return not answer.worker_goes_on

        return take

    def _pass_on(self, update: worker_pb2.Update) -> None:
        """Sends the gain of an update to the client. Raises WireError for an invalid update."""
        request = self.request
        if update.HasField("scores") and (part := request.prompt_answer.accept(update.scores)) is not None:
            request.reply.send_prompt(part)
        if update.choices and request.prompt_answer.num_scored:
            raise WireError("a worker sent a token before the log-probabilities of the prompt")
        if update.choices:
            self._computed()
        for chunk in request.answer.accept(update.choices):
            request.admitted.charge(request.services.shares, len(chunk.token_ids))
            request.reply.send(chunk)
        if self.is_alone and not self.history.is_in_vain(request.answer.num_tokens):
            request.services.isolated_retries.clear(request.admitted.id)
