"""The way of one request through the router: `Flow.serve` reads from top to bottom.

    prepare ──▶ attempt ─┬─▶ wait for room ──▶ prefill ─┬─▶ choose decode ──▶ stream ──▶ the answer is whole
                   ▲     └───────── decode alone ───────┘           │
                   └── another attempt, with all tokens so far ◀── a worker is lost

An attempt goes to decode alone where the router expects that to be cheaper, and always once the client has a token,
after logits that were not finite, or where there is no prefill pool.
When the client goes, the deadline passes or the request is aborted, `OpenRequest.stop` cancels `serve`, at any await.
Nothing is waited for on the way out: hold, assigned work and the lock of isolated retries are given back, the
worker is told to abort, and `Line` drops updates that come late. `OpenRequest` sends the last message.
"""

import asyncio
from dataclasses import replace

from router.observe.record import RequestSummary
from router.observe.timeline import TimelineRecorder
from router.requests.answer import ChoiceStreams, PromptAnswer
from router.requests.attempt import AdmittedRequest, Attempt, AttemptFailed, PreparedRequest, Services
from router.requests.outbox import ReplyWriter
from router.requests.prompt import PreparedPrompt
from router.requests.replay import MAX_ATTEMPTS, AttemptHistory, NextStep, next_step
from text.chat import Chat
from wire.errors import AttemptsExhausted, BatonError, NonFiniteLogits
from wire.journal import Kind
from wire.pb import inference_pb2 as pb


class Flow:
    """A request from its message to the last of its answer. Belongs to the running event loop."""

    def __init__(self, request: AdmittedRequest, services: Services, reply: ReplyWriter) -> None:
        self.timeline = TimelineRecorder(request.arrived_s)
        self.summary = RequestSummary()
        self.reply = reply
        self._request = request
        self._services = services
        self._clock = asyncio.get_running_loop().time

    async def serve(self) -> pb.Complete:
        """Returns the last message, without its timeline, once the others are in the outbox. Raises BatonError."""
        self.timeline.record_span(Kind.CHECK, self._clock())
        prepared = await self._prepare()
        history, step = AttemptHistory(), NextStep.RETRY
        while not prepared.answer.has_ended:
            self.summary.num_attempts = history.number
            self.timeline.begin_attempt()
            attempt = Attempt(prepared, history, step is NextStep.RETRY_ALONE)
            try:
                await self._run(attempt)
            except AttemptFailed as failure:
                history, step = self._after(attempt, failure.error)
        return prepared.complete

    async def _run(self, attempt: Attempt) -> None:
        """Runs an attempt. The one that may be its request's last waits for its turn in `IsolatedRetries`."""
        if attempt.is_alone:
            self.timeline.set_current_span(Kind.WAIT_ISOLATED)
            async with self._services.isolated_retries.alone(self._request.id):
                self._record_span(Kind.WAIT_ISOLATED)
                await attempt.run()
        else:
            await attempt.run()

    async def _prepare(self) -> PreparedRequest:
        """Renders a chat, checks a grammar, tokenizes, names the blocks, begins the answer. Raises BatonError."""
        services, request, clock = self._services, self._request, self._clock
        valid = request.valid
        if isinstance(valid.prompt, Chat):
            self.timeline.set_current_span(Kind.RENDER)
            rendered = await services.prompts.render(valid.prompt, request.limits)
            valid = replace(valid, prompt=rendered)
            self.reply.adapt(rendered.adapted)
            self._record_span(Kind.RENDER)
        self.timeline.set_current_span(Kind.GRAMMAR)
        valid = await services.prompts.check_grammar(valid, request.limits)
        if valid.sampling.response_format is not None:
            self._record_span(Kind.GRAMMAR)

        self.timeline.set_current_span(Kind.WAIT_TOKENIZER)
        prompt = await services.prompts.prepare(valid, request.limits, request.root, self._begin_tokenizing)
        self._record_span(Kind.TOKENIZE)
        self.summary.num_prompt_tokens = len(prompt.prompt_ids)
        if services.quarantine.contains(prompt.keys[-1], clock()):
            raise AttemptsExhausted("workers were lost over this prompt; it is not tried again for a while")
        return self._begin_answer(prompt)

    def _begin_answer(self, prompt: PreparedPrompt) -> PreparedRequest:
        """Makes the empty answer, and sends the parts of the prompt that the client wants and that need no scores."""
        codec = self._services.prompts.codec
        answer = ChoiceStreams(prompt.sampling, codec, prompt.shown, prompt.frame)
        prompt_answer = PromptAnswer(prompt.prompt_ids, prompt.sampling, codec, prompt.echo)
        for part in prompt_answer.first_parts():
            self.reply.send_prompt(part)
        return PreparedRequest(
            self._request, self._services, prompt, answer, prompt_answer, self.reply, self.timeline, self.summary
        )

    def _after(self, attempt: Attempt, error: BatonError) -> tuple[AttemptHistory, NextStep]:
        """Decides what follows a failed attempt. Raises the error that the request ends with, if it ends."""
        history, request = attempt.history, attempt.request
        if request.answer.has_ended:
            return history, NextStep.RETRY
        if isinstance(error, NonFiniteLogits) and attempt.has_read_cache and history.reads_cache:
            return history.without_cache(), NextStep.RETRY
        following = history.after(error, request.answer.num_tokens)
        step = next_step(error, following)
        if step is NextStep.FAIL:
            raise error
        if step is NextStep.GIVE_UP:
            self._services.quarantine.add(request.prompt.keys[-1], self._clock())
            raise AttemptsExhausted(f"{MAX_ATTEMPTS} workers were lost while they served this request")
        return following, step

    def _begin_tokenizing(self) -> None:
        self._record_span(Kind.WAIT_TOKENIZER)
        self.timeline.set_current_span(Kind.TOKENIZE)

    def _record_span(self, kind: Kind) -> None:
        self.timeline.record_span(kind, self._clock())
