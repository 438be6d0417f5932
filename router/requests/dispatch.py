"""The dispatcher: admits requests, keeps the open requests, and records the end of each."""

import asyncio
import logging
import secrets
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace
from functools import partial

from router.config import StreamBounds
from router.moves import PromptMoves
from router.observe.demand import Demand
from router.observe.journal import RequestJournal
from router.requests.admission import Admission, Quotas
from router.requests.attempt import AdmittedRequest, Services
from router.requests.checks import require_known, require_may_fit, valid_text, validate
from router.requests.flow import Flow
from router.requests.outbox import Outbox, ReplyWriter
from router.requests.prompt import PreparedPrompt
from router.requests.tokenizing import NO_PREFIXES
from router.requests.versions import ModelVersion, ModelVersions
from text.answer.formats import AnswerFormats
from wire import errors
from wire.errors import BatonError, Cancelled, DeadlineExceeded, RequestNotFound, RouterLeaving
from wire.ids import PUBLIC, REQUEST_ID, NamespaceRoot, QualifiedId, RequestId, WorkerId, qualified, tenant_of
from wire.load.limit import Limit
from wire.pb import inference_pb2 as pb
from wire.served_model import ServedModel
from wire.trust.key_ring import ANYONE, Key

log = logging.getLogger(__name__)

MAX_TOKENIZING = 64
"""Bound on Tokenize calls at a time; each may have a text of a whole message."""
ROOT_BYTES = 32
LAST_WORD_S = 0.05
"""Time before its deadline at which a request ends, so that the client gets the reason before its own gRPC gives up."""


class OpenRequest:
    """An open request: a task that serves it, and a last message or error in its outbox when the task is done.

    The first reason to stop it is kept here, since a cancellation may lose it on the way. Everything at a request's end
    is a callback of the task, since a task that is cancelled before its first step never runs.
    """

    def __init__(
        self,
        request: AdmittedRequest,
        services: Services,
        outbox: Outbox,
        on_first_token: Callable[[QualifiedId], None],
        on_end: Callable[[QualifiedId, int], None],
    ) -> None:
        """on_first_token, on_end: called with the request's id, the latter once, with its tokens."""
        self.outbox = outbox
        self.request_id = request.client_id
        self._id = request.id
        self._compare = partial(services.costs.compare, block_size=services.placement.block_size)
        self.journal = request.journal
        learn = partial(services.forecast.learn, tenant=request.tenant)
        self._folds: list[Callable[[RequestJournal], None]] = [services.metrics.ended, services.recent.add]
        self._folds += [services.demand.add, learn]
        if request.trace is not None:
            self._folds.append(request.trace.end)
        self._on_end = on_end
        self._reason: BatonError | None = None
        self._loop = asyncio.get_running_loop()
        reply = ReplyWriter(
            request.client_id,
            outbox,
            request.journal,
            partial(services.metrics.gained, request.journal),
            lambda: on_first_token(request.id),
            self.stop,
            request.limits.model.version_hex,
        )
        self._task: asyncio.Task[pb.Complete] = asyncio.create_task(Flow(request, services, reply).serve())
        self._task.add_done_callback(self._ended)
        self._life_s = request.life_s
        self._deadline = self._loop.call_at(request.deadline_s, self.stop, DeadlineExceeded("the deadline has passed"))

    def stop(self, reason: BatonError) -> None:
        """Ends the request with this error, unless it has ended already."""
        if self._reason is None and not self._task.done():
            self._reason = reason
            self._task.cancel()

    async def ended(self) -> None:
        """Waits until the request is over, soon after `stop`, for it waits for nothing on the way out."""
        await asyncio.wait([self._task])

    def _ended(self, task: asyncio.Task[pb.Complete]) -> None:
        self._deadline.cancel()
        ended, journal = self._outcome_of(task), self.journal
        journal.end(ended, self._loop.time())
        self._compare(journal)
        num_answered = journal.num_resumed_tokens + journal.num_output_tokens
        self._on_end(self._id, journal.num_prompt_tokens + num_answered)
        if isinstance(ended, BatonError):
            ended.timeline = journal.timeline
            self.outbox.fail(ended)
        else:
            ended.timeline.CopyFrom(journal.timeline)
            self.outbox.complete(pb.GenerateResponse(request_id=self.request_id, complete=ended))
        for fold in self._folds:
            fold(journal)
        log.info("request ended", extra=journal.values)

    def _outcome_of(self, task: asyncio.Task[pb.Complete]) -> pb.Complete | BatonError:
        """Returns a request's last message, or its error. A bug becomes an incident."""
        try:
            return task.result()  # unlike `exception`, this takes the frames of `Flow` out of the task
        except asyncio.CancelledError:
            error = self._reason or Cancelled("the router is stopping")
        except BatonError as raised:
            error = raised.with_traceback(None)
        except Exception as bug:
            return errors.report(bug, request_id=self._id)
        return self._out_of_time() if isinstance(error, DeadlineExceeded) else error  # a worker's own timer's, too

    def _out_of_time(self) -> DeadlineExceeded:
        at, life_s = self.journal.at, float(f"{self._life_s:.2g}")
        return DeadlineExceeded(
            f"the deadline of {life_s:g} s passed at {at}: give a longer one, or see `baton status`"
        )


class Dispatcher:
    """The open requests: checks and admits each, starts its task, forgets it at its end.

    Each request is of one version of the model, from its begin to its end.
    """

    def __init__(self, services: Services, versions: ModelVersions, admission: Admission, bounds: StreamBounds) -> None:
        self._versions = versions
        self.recent, self._services = services.recent, services
        self._admission = admission
        self._quotas = Quotas(admission.retry_after_s)
        self._bounds = bounds
        self._open: dict[QualifiedId, OpenRequest] = {}
        self._tokenizing = Limit(MAX_TOKENIZING, "texts are being tokenized")

    @property
    def num_queued(self) -> int:
        return self._admission.num_queued

    @property
    def num_running(self) -> int:
        return self._admission.num_running

    @property
    def demand(self) -> Demand:
        """The demand of all requests so far, open requests included."""
        return self._services.demand.read(request.journal for request in self._open.values())

    @property
    def model(self) -> ServedModel:
        """The wanted version of the model."""
        return self._versions.wanted.model

    def root_of(self, tenant: str) -> NamespaceRoot:
        """Derives the root of a tenant's block names, of the wanted version."""
        return self._versions.wanted.root_of(tenant)

    @property
    def needed(self) -> tuple[WorkerId, ...]:
        """The workers that alone can decode for a version with open requests, and that no worker to come will have."""
        _, *ending = self._versions
        return tuple(member.id for version in ending for member in version.needed)

    @property
    def formats(self) -> AnswerFormats:
        """The formats of the model's answers in chats."""
        return self._services.prompts.renderer.formats

    @contextmanager
    def arriving(self, caller: Key = ANYONE) -> Iterator[None]:
        """Counts a refusal of an arriving request. Raises Overloaded at once if its caller's cannot be admitted."""
        with self._refusals_counted():
            self._admission.require_room(caller.tenant, _weight_of(caller))
            yield

    def open(
        self, request: pb.GenerateRequest, time_left_s: float | None, caller: Key = ANYONE, traceparent: str = ""
    ) -> OpenRequest:
        """Starts a request. Raises InvalidRequest or Overloaded at once. time_left_s: None without a deadline."""
        with self._refusals_counted():
            version = self._versions.choose(request.resume.fingerprint)
            services, root = self._services_of(version), version.root_of(caller.tenant)
            return self._begin(request, time_left_s, services, version, root, caller, traceparent)

    def open_on(self, worker_id: WorkerId, request: pb.GenerateRequest, time_left_s: float | None) -> OpenRequest:
        """Starts a request on one worker, under a newly drawn root, so that no cache has its blocks.

        Raises the errors of `open`, and WorkerNotFound.
        """
        services = self._services
        prompts = replace(services.prompts, prefixes=NO_PREFIXES)
        pinned = replace(services, placement=services.placement.only(worker_id), prompts=prompts, moves=PromptMoves())
        root = NamespaceRoot(secrets.token_bytes(ROOT_BYTES))
        return self._begin(request, time_left_s, pinned, self._versions.of(worker_id), root, ANYONE)

    async def name_blocks(self, request: pb.GenerateRequest, tenant: str) -> list[PreparedPrompt]:
        """Tokenizes a prompt and names its blocks as a tenant's in each version, for the operator.

        Raises the errors of `tokenize`.
        """
        named = []
        async with self._in_time():
            for version in self._versions:
                prompts, limits = self._services_of(version).prompts, version.limits
                valid = validate(request, limits)
                require_may_fit(valid.prompt, prompts.codec, limits)
                named.append(await prompts.prepare(valid, limits, version.root_of(tenant), lambda: None))
        return named

    async def tokenize(self, request: pb.TokenizeRequest, caller: Key = ANYONE) -> pb.TokenizeResponse:
        """Returns the tokens of a text. Raises InvalidRequest, Unsupported, DeadlineExceeded, or at once Overloaded."""
        prompts, limits = self._services.prompts, self._versions.wanted.limits
        prompt = valid_text(request)
        require_may_fit(prompt, prompts.codec, limits)
        clock = asyncio.get_running_loop().time
        with self._tokenizing.taken():
            self._quotas.require_room(caller, clock())
            self._quotas.enter(caller, clock())
            try:
                async with self._in_time():
                    return await prompts.tokenize(prompt, limits, self.root_of(caller.tenant))
            finally:
                self._quotas.leave(caller, 0, clock())

    def detokenize(self, request: pb.DetokenizeRequest) -> pb.DetokenizeResponse:
        """Returns the text of token ids. Raises InvalidRequest."""
        require_known(request.token_ids, self.model)
        return pb.DetokenizeResponse(text=self._services.prompts.codec.decode(request.token_ids))

    async def abort(self, request_id: RequestId, caller: Key = ANYONE) -> None:
        """Ends a request with Cancelled; waits until its id is free again.

        Raises RequestNotFound, also for another tenant's request.
        """
        is_id = REQUEST_ID.fullmatch(request_id) is not None  # else it could be another tenant's
        await self._abort(qualified(caller.tenant, request_id) if is_id else None, "the request was aborted")

    async def abort_any(self, request_id: QualifiedId) -> None:
        """Ends a request of any tenant as `abort` does, for the operator. Raises RequestNotFound."""
        await self._abort(request_id, "the operator aborted the request")

    async def _abort(self, request_id: QualifiedId | None, reason: str) -> None:
        request = self._open.get(request_id) if request_id is not None else None
        if request is None:
            raise RequestNotFound("no request of that id is running")
        request.stop(Cancelled(reason, request_id=request.request_id))
        await request.ended()

    def stop(self) -> None:
        """Ends all requests with Unavailable."""
        for request in tuple(self._open.values()):
            request.stop(RouterLeaving("the router is stopping"))

    def check(self) -> list[str]:
        """Lists violated invariants: open requests must be the admitted requests."""
        problems = self._admission.check()
        if len(self._open) != self.num_queued + self.num_running:
            problems.append(f"{len(self._open)} requests are open, {self.num_queued + self.num_running} admitted")
        return problems + self._quotas.check(len(self._open) + self._tokenizing.num_used)

    def _begin(
        self,
        request: pb.GenerateRequest,
        time_left_s: float | None,
        services: Services,
        version: ModelVersion,
        root: NamespaceRoot,
        caller: Key,
        traceparent: str = "",
    ) -> OpenRequest:
        now_s, limits = asyncio.get_running_loop().time(), version.limits
        valid = validate(request, limits)
        require_may_fit(valid.prompt, self._services.prompts.codec, limits)
        request_id = valid.request_id or RequestId(secrets.token_hex(12))
        qualified_id = qualified(caller.tenant, request_id)
        self._quotas.require_room(caller, now_s)
        self._admission.admit(qualified_id, request.ByteSize(), _weight_of(caller))
        max_s = self._bounds.max_deadline_s
        life_s = max_s if time_left_s is None else min(time_left_s, max_s)
        deadline_s = now_s + life_s - min(LAST_WORD_S, life_s / 10)
        trace = None if services.traces is None else services.traces.begin(valid.prompt, valid.sampling, traceparent)
        journal = RequestJournal(qualified_id, now_s)
        journal.key_id = caller.id
        admitted = AdmittedRequest(
            id=qualified_id,
            client_id=request_id,
            valid=valid,
            limits=limits,
            root=root,
            journal=journal,
            life_s=life_s,
            deadline_s=deadline_s,
            weight=_weight_of(caller),
            trace=trace,
        )
        outbox = Outbox(self._bounds.max_buffered_tokens)
        opened = OpenRequest(admitted, services, outbox, self._started, partial(self._leave, caller, version))
        self._quotas.enter(caller, now_s)
        services.shares.enter(admitted.tenant)
        version.num_open += 1
        self._open[qualified_id] = opened
        return opened

    def _services_of(self, version: ModelVersion) -> Services:
        """Returns the parts for requests of a version: its workers are placed, and public prefixes have its names.

        They last as long as the version.
        """
        if version.services is None:
            services, prompts = self._services, self._services.prompts
            prefixes = replace(prompts.prefixes, root=version.root_of(PUBLIC))
            placement = services.placement.among(version.members)
            version.services = replace(services, placement=placement, prompts=replace(prompts, prefixes=prefixes))
        return version.services

    def _started(self, request_id: QualifiedId) -> None:
        """Ends a request's wait in the queue."""
        if self._admission.started(request_id):
            self._services.shares.begin_stream(tenant_of(request_id))

    def _leave(self, caller: Key, version: ModelVersion, request_id: QualifiedId, num_tokens: int) -> None:
        self._started(request_id)
        self._admission.leave(request_id)
        version.num_open -= 1
        self._services.shares.end_stream(tenant_of(request_id))
        self._quotas.leave(caller, num_tokens, asyncio.get_running_loop().time())
        del self._open[request_id]

    @asynccontextmanager
    async def _in_time(self) -> AsyncIterator[None]:
        """Bounds the time to tokenize a text. Raises DeadlineExceeded."""
        try:
            async with asyncio.timeout(max_s := self._bounds.max_deadline_s):
                yield
        except TimeoutError as error:
            raise DeadlineExceeded(
                f"the text was not tokenized within {max_s:g} s, the limit (router.max_deadline_s)"
            ) from error

    @contextmanager
    def _refusals_counted(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            self._services.metrics.refused(error)
            raise


def _weight_of(caller: Key) -> float:
    """Returns the weight of a caller's tenant in fair shares."""
    return caller.allowance.weight or 1.0
