"""The way of one request through the router: `Flow.serve` reads from top to bottom.

    prepare ──▶ attempt: wait for room ──▶ prefill ──▶ choose decode ──▶ stream ──▶ the answer is whole
                   ▲                          │             │              │
                   └── another attempt, with all tokens so far ◀── its worker is lost

Once the client has a token, an attempt goes straight to a decode worker, which fetches published blocks and computes
the rest. So does the one attempt that follows where cached KV may have led to no number: it reads none.

When the client goes, the deadline passes or the request is aborted, `OpenRequest.stop` cancels `serve`, at any await.
Nothing is waited for on the way out: hold, assigned work and a turn alone are given back, the worker is told to abort,
and `Line` drops updates that come late. `OpenRequest` sends the last message.
"""

import asyncio
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from itertools import count

from router.observe.metrics import RequestMetrics, TokenTiming
from router.observe.record import RequestSummary
from router.observe.timeline import Timeline
from router.placement.placement import Placement
from router.requests.answer import Answer, PromptAnswer
from router.requests.outbox import Outbox
from router.requests.public_prefixes import NO_PREFIXES, PublicPrefixes
from router.requests.replay import MAX_ATTEMPTS, Attempts, NextStep, Quarantine, Suspects, next_step
from router.requests.tokenizing import PieceCache, TokenizerThreads
from router.requests.validator import Limits, Prepared, ValidPrompt, ValidRequest, prepare
from router.workers.holds import Hold, Holds
from router.workers.line import Take
from router.workers.members import Member
from router.workers.membership import PROBE_TIMEOUT_S
from text.chat import Chat, NoRenderer, Renderer
from text.codec import TextCodec
from wire.convert import sampling_to_pb, tiers_from_pb, tiers_to_pb
from wire.errors import (
    AttemptsExhausted,
    BatonError,
    Cancelled,
    NoNumber,
    Overloaded,
    Unavailable,
    WireError,
    WorkerLeaving,
    reached,
)
from wire.ids import AttemptId, NamespaceRoot, QualifiedId, RequestId, WorkerId, attempt_id
from wire.pb import inference_pb2 as pb
from wire.pb import worker_pb2
from wire.pools import WorkerState

MAX_TINY_LEN = 256
"""A prompt of so many characters or tokens is prepared on the event loop: a thread would take longer to begin."""
MAX_ADDED_CHARS_PER_TOKEN = 4
"""By so many characters for each token of the context a chat template may make a conversation longer."""
MAX_NUMBER = (1 << 32) - 1
"""The last number that a message can carry; the first is 1."""


@dataclass(frozen=True)
class Services:
    """The parts that all requests share. `mark_lost` is told of a worker that broke off an attempt.

    attempt_numbers: without repetition, for a client may use an id again while workers still know its first use.
    """

    codec: TextCodec
    threads: TokenizerThreads
    placement: Placement
    holds: Holds
    suspects: Suspects
    quarantine: Quarantine
    mark_lost: Callable[[WorkerId], None]
    metrics: RequestMetrics
    renderer: Renderer = field(default_factory=NoRenderer)
    known: PieceCache = field(default_factory=PieceCache)
    prefixes: PublicPrefixes = NO_PREFIXES
    attempt_numbers: Iterator[int] = field(default_factory=lambda: (number % MAX_NUMBER + 1 for number in count()))

    async def render(self, prompt: ValidPrompt, limits: Limits) -> ValidPrompt:
        """Renders a chat; returns any other prompt as it is. Raises InvalidRequest or Unsupported."""
        if not isinstance(prompt, Chat):
            return prompt
        max_added_chars = MAX_ADDED_CHARS_PER_TOKEN * limits.max_context_len
        return await prompt.render(self.renderer, self.codec.special_tokens, max_added_chars)


@dataclass(frozen=True)
class Order:
    """A request that was let in. `root` is its tenant's; times are of the event loop's clock.

    name: the request id, unique over all tenants.

    life_s: the deadline as the client gave it, or the longest there is. deadline_s: a moment before it is over.
    """

    request_id: RequestId
    name: QualifiedId
    valid: ValidRequest
    limits: Limits
    root: NamespaceRoot
    arrived_s: float
    life_s: float
    deadline_s: float


class AttemptFailed(Exception):
    """An attempt ended with this error of its worker, or of the line to it."""

    def __init__(self, error: BatonError) -> None:
        super().__init__(error.message)
        self.error = error


class Flow:
    """A request from its tokens to the last of its answer. Belongs to the running event loop.

    on_first_token: called before the first chunk is sent. stop: ends the request with an error.
    """

    def __init__(
        self,
        order: Order,
        services: Services,
        outbox: Outbox,
        on_first_token: Callable[[], None],
        stop: Callable[[BatonError], None],
    ) -> None:
        self.timeline = Timeline(order.arrived_s)
        self.timing = TokenTiming(services.metrics, order.arrived_s)
        self._order = order
        self._services = services
        self._outbox = outbox
        self._on_first_token = on_first_token
        self._stop = stop
        self._loop = asyncio.get_running_loop()
        self._attempts = Attempts()
        self._is_alone = False
        self._attempt_id = attempt_id(order.name, 0)
        self._prepared: Prepared | None = None
        self._answer: Answer | None = None
        self._prompt_answer: PromptAnswer | None = None
        self._cached: Mapping[str, int] | None = None
        self._has_read_cache = False
        self._prefill_worker: WorkerId | None = None
        self._decode_worker: WorkerId | None = None

    async def serve(self) -> None:
        """Returns when the whole answer is in the outbox, but for the last message. Raises BatonError otherwise."""
        self.timeline.end_span("check", self._loop.time())
        await self._prepare()
        step = NextStep.RETRY
        while not self.answer.has_ended:
            self._is_alone = step is NextStep.RETRY_ALONE
            self.timeline.begin_span("wait_trial")
            try:
                async with self._services.suspects.alone(self._order.name) if self._is_alone else nullcontext():
                    if self._is_alone:
                        self._end_span("wait_trial")
                    await self._attempt()
            except AttemptFailed as failure:
                step = self._after(failure.error)

    async def _prepare(self) -> None:
        """Renders a chat, tokenizes, names the blocks: in a thread, or on the event loop if the prompt is tiny."""
        services, order, clock = self._services, self._order, self._loop.time
        valid = order.valid
        if isinstance(valid.prompt, Chat):
            self.timeline.begin_span("render")
            valid = replace(valid, prompt=await services.render(valid.prompt, order.limits))
            self._end_span("render")

        def work() -> tuple[float, Prepared]:
            self.timeline.begin_span("tokenize")
            return clock(), prepare(valid, services.codec, order.limits, order.root, services.known, services.prefixes)

        self.timeline.begin_span("wait_tokenizer")
        length = len(valid.prompt)
        began_s, self._prepared = work() if length <= MAX_TINY_LEN else await services.threads.run(length, work)
        self.timeline.end_span("wait_tokenizer", began_s)
        self._end_span("tokenize")
        if services.quarantine.holds(self.prepared.keys[-1], self._loop.time()):
            raise AttemptsExhausted("workers were lost over this prompt; it is not tried again for a while")
        prepared = self.prepared
        self._answer = Answer(prepared.sampling, services.codec, prepared.shown)
        self._prompt_answer = PromptAnswer(prepared.prompt_ids, prepared.sampling, services.codec, prepared.echo)
        for part in self._prompt_answer.first_parts():
            self._send_prompt(part)

    async def _attempt(self) -> None:
        """Goes through prefill and decode; leaves prefill out where a token is out or decode is done sooner."""
        self._attempt_id = attempt_id(self._order.name, next(self._services.attempt_numbers))
        self._has_read_cache = False
        if not self.answer.num_tokens:
            self._prefill_worker = self._cached = None
        keys, num_prompt = self.prepared.keys, len(self.prepared.prompt_ids)
        placement, holds = self._services.placement, self._services.holds
        is_fresh = self._attempts.reads_cache and not self.answer.num_tokens
        if not is_fresh or not placement.uses_prefill(keys, num_prompt):
            await self._decode(None)
            return
        node_id = placement.prefill_node(keys, num_prompt, lambda node_id: holds.budgets[node_id].has_room)
        self.timeline.begin_span("wait_room")
        async with holds.hold(self._attempt_id, self.prepared.held_keys, node_id) as hold:
            self._end_span("wait_room")
            member = placement.choose_prefill(keys, num_prompt, hold.node_id)
            if member is not None:
                await self._prefill(member, hold)
                if not self.answer.has_ended:
                    await self._decode(hold)
        if member is None:  # the node has lost its prefill workers meanwhile
            await self._decode(None)

    async def _prefill(self, member: Member, hold: Hold) -> None:
        """Lets a worker publish the prompt's blocks under a hold, and takes one first token per choice."""
        self._prefill_worker = member.id
        with member.assigned(self.prepared.sampling.n, len(self.prepared.prompt_ids)):
            await self._run("prefill", member, hold.keep)

    async def _decode(self, hold: Hold | None) -> None:
        """Lets a worker decode the unfinished choices. The hold ends when their blocks are fetched."""
        num_prompt = len(self.prepared.prompt_ids)
        self.timeline.begin_span("wait_decode")
        num_new = num_prompt if hold is None else 0
        member = await self._services.placement.choose_decode(self.prepared.keys, num_new)
        self._end_span("wait_decode")
        self._decode_worker = member.id
        choices = self.answer.unfinished
        num_tokens = sum(num_prompt + len(choice.output.ids) for choice in choices)
        with member.assigned(len(choices), num_tokens), member.prefilling(num_new) as end_prefilling:
            await self._run("decode", member, end_prefilling if hold is None else hold.release)
        if not self.answer.has_ended:
            raise AttemptFailed(WireError("a worker ended an attempt before every choice had ended"))

    async def _run(self, name: str, member: Member, on_prompt: Callable[[], None]) -> None:
        """Runs the attempt on a worker. on_prompt: called when prefill has published its blocks, or decode has them."""
        if self._is_alone:
            await self._require_answer(member)
        spans: list[pb.Span] = []
        call = self.timeline.sent(name, member.id, self._loop.time())
        try:
            await member.line.run(self._begin(member), self._take(on_prompt, spans, member.line.end_choices))
        except (Unavailable, Cancelled) as error:
            is_leaving = isinstance(error, Unavailable) and member.state is WorkerState.DRAINING
            self._services.mark_lost(member.id)
            raise AttemptFailed(WorkerLeaving(error.message) if is_leaving else error) from error
        except BatonError as error:
            raise AttemptFailed(error) from error
        finally:
            self.timeline.ended(call, self._loop.time(), spans)

    async def _require_answer(self, member: Member) -> None:
        """Asks a worker for a sign of life: to meet one that is dead already must not be a request's last attempt."""
        try:
            await member.line.status(False, PROBE_TIMEOUT_S)
        except BatonError as error:
            self._services.mark_lost(member.id)
            raise AttemptFailed(WorkerLeaving(error.message)) from error

    def _begin(self, member: Member) -> worker_pb2.Begin:
        public = self.prepared.public
        return worker_pb2.Begin(
            id=self._attempt_id,
            namespace_root=self._order.root,
            prompt=pb.TokenIds(ids=self.prepared.prompt_ids),
            sampling_params=sampling_to_pb(self.prepared.sampling),
            choices=self.answer.unfinished,
            time_left_s=max(self._order.deadline_s - self._loop.time(), 0.001),
            block_addresses=self._services.placement.sources(self.prepared.keys, member),
            computes_all=not self._attempts.reads_cache,
            num_scored=self.prompt_answer.num_scored,
            public_root=public.root if public else b"",
            num_public_blocks=public.num_blocks if public else 0,
            kv_policy=str(self._order.valid.dropping or ""),
        )

    def _take(
        self, on_prompt: Callable[[], None], spans: list[pb.Span], end_choices: Callable[[AttemptId, list[int]], None]
    ) -> Take:
        """Makes the function that takes the updates of an attempt. It runs on the line's task and never waits."""

        def take(update: worker_pb2.Update) -> bool:
            if update.HasField("prompt"):
                cached = tiers_from_pb(update.prompt.cached_tokens)
                self._has_read_cache |= bool(cached)
                if self._cached is None:
                    self._cached = cached
                on_prompt()
            if update.HasField("scores"):
                self._send_prompt(self.prompt_answer.accept(update.scores))
            if update.choices and self.prompt_answer.num_scored:
                raise WireError("a worker sent a token before the log-probabilities of the prompt")
            for chunk in self.answer.accept(update.choices):
                self._send(chunk)
            if self._is_alone and not self._attempts.is_in_vain(self.answer.num_tokens):
                self._services.suspects.clear(self._order.name)
            spans.extend(update.end.spans)
            stopped = self.answer.take_stopped()
            if stopped and not (update.HasField("end") or self.answer.worker_goes_on):
                end_choices(self._attempt_id, stopped)
            return not self.answer.worker_goes_on

        return take

    def _send(self, chunk: pb.Chunk) -> None:
        if self.timing.first_token_s is None:
            self._on_first_token()
        self.timing.gained(chunk.index, len(chunk.token_ids), self._loop.time())
        self._put(pb.GenerateResponse(request_id=self._order.request_id, chunk=chunk))

    def _send_prompt(self, part: pb.PromptPart | None) -> None:
        if part is not None:
            self._put(pb.GenerateResponse(request_id=self._order.request_id, prompt=part))

    def _put(self, response: pb.GenerateResponse) -> None:
        if not self._outbox.put(response):
            told = "tokens wait for a client that reads more slowly than they come"
            self._stop(Overloaded(reached(self._outbox.max_tokens, told, "router.max_buffered_tokens")))

    def _after(self, error: BatonError) -> NextStep:
        """Decides what follows a failed attempt. Raises the error that the request ends with, if it ends."""
        if self.answer.has_ended:
            return NextStep.RETRY
        if isinstance(error, NoNumber) and self._has_read_cache and self._attempts.reads_cache:
            self._attempts = self._attempts.without_cache()
            return NextStep.RETRY
        following = self._attempts.after(error, self.answer.num_tokens)
        step = next_step(error, following)
        if step is NextStep.FAIL:
            raise error
        if step is NextStep.GIVE_UP:
            self._services.quarantine.add(self.prepared.keys[-1], self._loop.time())
            raise AttemptsExhausted(f"{MAX_ATTEMPTS} workers were lost while they served this request")
        self._attempts = following
        return step

    @property
    def prepared(self) -> Prepared:
        assert self._prepared is not None, "not prepared yet"
        return self._prepared

    @property
    def answer(self) -> Answer:
        assert self._answer is not None, "not prepared yet"
        return self._answer

    @property
    def prompt_answer(self) -> PromptAnswer:
        assert self._prompt_answer is not None, "not prepared yet"
        return self._prompt_answer

    @property
    def complete(self) -> pb.Complete:
        """The last message of an answer that is whole, but for its timeline."""
        return pb.Complete(
            choices=self.answer.finishes,
            usage=pb.Usage(
                prompt_tokens=len(self.prepared.prompt_ids),
                completion_tokens=self.answer.num_tokens,
                cached_tokens=tiers_to_pb(self._cached or {}),
                guessed_tokens=self.timeline.count("tokens_guessed"),
                accepted_tokens=self.timeline.count("tokens_accepted"),
            ),
            seed=self.prepared.sampling.seed,
        )

    @property
    def summary(self) -> RequestSummary:
        """How far the request has come."""
        return RequestSummary(
            0 if self._prepared is None else len(self._prepared.prompt_ids),
            0 if self._answer is None else self._answer.num_tokens,
            self._cached,
            self._prefill_worker,
            self._decode_worker,
            self._attempts.number,
        )

    def _end_span(self, name: str) -> None:
        self.timeline.end_span(name, self._loop.time())
