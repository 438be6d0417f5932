"""The way of one request through the router: prepared, then attempted. `Flow.serve` reads from top to bottom.

    prepare ──▶ attempt ──▶ the answer is whole
                 ▲   │
                 └───┴── a worker is lost, or logits were not finite: another attempt, with all tokens so far

An attempt's own steps are in `attempt.py`. When the client disconnects, the deadline passes or the request is
aborted, `OpenRequest.stop` cancels `serve`, at any await. The way out waits for nothing: hold, assigned work and the
lock of isolated retries are given back, the worker is told to abort, and `Line` drops late updates. `OpenRequest` sends
the last message.
"""

import asyncio
from dataclasses import replace

from router.requests.answer import ChoiceStreams, PromptAnswer
from router.requests.attempt import AdmittedRequest, Attempt, AttemptFailed, PreparedRequest, Services
from router.requests.checks import ValidRequest
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
        self.reply = reply
        self._request = request
        self._services = services
        self._clock = asyncio.get_running_loop().time

    async def serve(self) -> pb.Complete:
        """Serves the request; returns the last message, without its timeline, once the others are in the outbox.

        Raises BatonError.
        """
        prepared = await self._prepare()
        history, step = AttemptHistory(num_tokens_before=prepared.answer.num_tokens), NextStep.RETRY
        while not prepared.answer.has_ended:
            self._request.journal.begin_attempt(self._clock())
            attempt = Attempt(prepared, history, step is NextStep.RETRY_ALONE)
            try:
                await self._run(attempt)
            except AttemptFailed as failure:
                history, step = self._after(attempt, failure.error)
        return prepared.complete

    async def _run(self, attempt: Attempt) -> None:
        """Runs an attempt. An attempt that may be its request's last first waits in `IsolatedRetries`."""
        if attempt.is_alone:
            self._request.journal.begin(Kind.WAIT_ISOLATED, self._clock())
            async with self._services.isolated_retries.alone(self._request.id):
                await attempt.run()
        else:
            await attempt.run()

    async def _prepare(self) -> PreparedRequest:
        """Renders a chat, checks a grammar, tokenizes, names the blocks, begins the answer. Raises BatonError."""
        services, request, clock = self._services, self._request, self._clock
        valid, journal = request.valid, request.journal
        if isinstance(valid.prompt, Chat):
            journal.begin(Kind.RENDER, clock())
            rendered = await services.prompts.render(valid.prompt, request.limits)
            valid = replace(valid, prompt=rendered)
            self.reply.adapt(rendered.adapted)
        journal.begin(Kind.GRAMMAR, clock())
        valid = await services.prompts.check_grammar(valid, request.limits)
        if valid.sampling.response_format is None:
            journal.pass_on()
        prompt = await self._tokenize(valid)
        journal.num_prompt_tokens = len(prompt.prompt_ids)
        if services.quarantine.contains(prompt.keys[-1], clock()):
            raise AttemptsExhausted("workers were lost over this prompt; it is not tried again for a while")
        return self._begin_answer(prompt)

    async def _tokenize(self, valid: ValidRequest) -> PreparedPrompt:
        """Tokenizes and names the blocks. A thread notes its begin; the journal belongs to the event loop."""
        request, begun_s = self._request, list[float]()
        request.journal.begin(Kind.WAIT_TOKENIZER, self._clock())
        try:
            return await self._services.prompts.prepare(
                valid, request.limits, request.root, lambda: begun_s.append(self._clock())
            )
        finally:
            for now_s in begun_s:
                request.journal.begin(Kind.TOKENIZE, now_s)

    def _begin_answer(self, prompt: PreparedPrompt) -> PreparedRequest:
        """Makes the answer, with what the client has of it, and sends the parts of the prompt that need no scores."""
        codec, known = self._services.prompts.codec, self._request.valid.resume
        answer = ChoiceStreams(prompt.sampling, codec, prompt.shown, prompt.frame)
        num_sent = 0
        if known is not None:
            answer.resume(known.choices)
            num_sent = known.prompt_tokens
        prompt_answer = PromptAnswer(prompt.prompt_ids, prompt.sampling, codec, prompt.echo, num_sent)
        for part in prompt_answer.first_parts():
            self.reply.send_prompt(part)
        return PreparedRequest(
            admitted=self._request,
            services=self._services,
            prompt=prompt,
            answer=answer,
            prompt_answer=prompt_answer,
            reply=self.reply,
        )

    def _after(self, attempt: Attempt, error: BatonError) -> tuple[AttemptHistory, NextStep]:
        """Decides the attempt after a failed attempt. Raises the request's error if there is none."""
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
