"""Admits requests, knows the open ones, and writes down the end of each."""

import asyncio
import logging
import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

from router.config import StreamBounds
from router.observe.record import OK, RequestRecord, outcome_of
from router.requests.admission import Admission
from router.requests.flow import Flow, Order, Services
from router.requests.outbox import Outbox
from router.requests.validator import Limits, ValidPrompt, encode, require_known, require_may_fit, valid_text, validate
from text.codec import TextCodec
from wire import errors
from wire.errors import BatonError, Cancelled, DeadlineExceeded, Overloaded, RequestNotFound, Unavailable
from wire.ids import NamespaceRoot, RequestId
from wire.pb import inference_pb2 as pb

log = logging.getLogger(__name__)

MAX_TOKENIZING = 64
"""Texts of Tokenize at a time, each of which may have as many bytes as a message."""
TOKENIZE_AGAIN_S = 1.0
LAST_WORD_S = 0.05
"""How long before its deadline a request ends: its client is to hear why, before its own gRPC gives up."""


class OpenRequest:
    """A request under way: a task that serves it, and one last message or error in its outbox when the task is done.

    The first reason to stop it is kept here, since a cancellation may lose one on its way; all that the end of a
    request entails hangs on the task's end, since a task that is cancelled before its first step never runs.
    """

    def __init__(
        self,
        order: Order,
        services: Services,
        outbox: Outbox,
        on_first_token: Callable[[RequestId], None],
        on_end: Callable[[RequestId], None],
    ) -> None:
        """on_first_token, on_end: called with the request's id, the latter once."""
        self.outbox = outbox
        self.request_id = order.request_id
        self._metrics = services.metrics
        self._on_end = on_end
        self._reason: BatonError | None = None
        self._loop = asyncio.get_running_loop()
        self._flow = Flow(order, services, outbox, lambda: on_first_token(order.request_id), self.stop)
        self._task = asyncio.create_task(self._flow.serve())
        self._task.add_done_callback(self._ended)
        self._life_s = order.life_s
        self._deadline = self._loop.call_at(order.deadline_s, lambda: self.stop(self._out_of_time()))

    def stop(self, reason: BatonError) -> None:
        """Ends the request with this error, unless it has an end already."""
        if self._reason is None and not self._task.done():
            self._reason = reason
            self._task.cancel()

    async def ended(self) -> None:
        """Returns when the request is over, which is soon after `stop`: nothing is waited for on its way out."""
        await asyncio.wait([self._task])

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._deadline.cancel()
        self._on_end(self.request_id)
        error, flow = self._error_of(task), self._flow
        del self._flow  # it refers to this object: the two, and the text, would stay until garbage is looked for
        summary = flow.summary
        timeline = flow.timeline.finish(self._loop.time())
        if error is None:
            complete = flow.complete
            complete.timeline.CopyFrom(timeline)
            complete.timeline.prefill_worker = summary.prefill_worker or ""
            complete.timeline.decode_worker = summary.decode_worker or ""
            self.outbox.complete(pb.GenerateResponse(request_id=self.request_id, complete=complete))
        else:
            self.outbox.fail(error)
        outcome = OK if error is None else outcome_of(error)
        record = RequestRecord(self.request_id, outcome, summary, flow.timing.ttft_s, timeline)
        self._metrics.ended(record)
        log.info("request ended", extra=record.values)

    def _error_of(self, task: asyncio.Task[None]) -> BatonError | None:
        """Returns the error that a request ended with; None if it is whole. A bug of ours becomes an incident."""
        try:
            task.result()  # unlike `exception`, this takes the frames of `Flow` out of the task
        except asyncio.CancelledError:
            return self._reason or Cancelled("the router is stopping")
        except DeadlineExceeded:  # by the worker's own timer
            return self._out_of_time()
        except BatonError as error:
            return error.with_traceback(None)
        except Exception as error:
            return errors.report(error, request_id=self.request_id)
        return None

    def _out_of_time(self) -> DeadlineExceeded:
        at, life_s = self._flow.timeline.at, float(f"{self._life_s:.2g}")
        return DeadlineExceeded(
            f"the deadline of {life_s:g} s passed at {at}: give a longer one, or see `baton status`"
        )


class Dispatcher:
    """All open requests: checks and admits each, starts its task, forgets it at its end.

    limits: what fits into the cluster as it is now. root: the namespace root of all requests.
    """

    def __init__(
        self,
        services: Services,
        root: NamespaceRoot,
        admission: Admission,
        bounds: StreamBounds,
        limits: Callable[[], Limits],
    ) -> None:
        self.root = root
        self._services = services
        self._admission = admission
        self._bounds = bounds
        self._limits = limits
        self._open: dict[RequestId, OpenRequest] = {}
        self._num_tokenizing = 0

    @property
    def num_queued(self) -> int:
        return self._admission.num_queued

    @property
    def num_running(self) -> int:
        return self._admission.num_running

    @property
    def tool_format(self) -> str:
        """The format of tool calls in the model's answers; "" if its template knows no tools."""
        return self._services.renderer.tool_format

    @contextmanager
    def arriving(self) -> Iterator[None]:
        """While a request is on its way. Raises Overloaded at once if none may come in, whatever it is."""
        with self._refusals_counted():
            self._admission.require_room()
            yield

    def open(self, request: pb.GenerateRequest, time_left_s: float | None) -> OpenRequest:
        """Starts a request, or raises InvalidRequest or Overloaded at once. None: it has no deadline."""
        with self._refusals_counted():
            return self._begin(request, time_left_s)

    async def tokenize(self, request: pb.TokenizeRequest) -> pb.TokenizeResponse:
        """Returns the tokens of a text. Raises InvalidRequest, Unsupported, DeadlineExceeded, or Overloaded at once."""
        services, limits = self._services, self._limits()
        prompt = valid_text(request)
        require_may_fit(prompt, services.codec, limits)
        if self._num_tokenizing >= MAX_TOKENIZING:
            raise Overloaded("as many texts are being tokenized as may be", TOKENIZE_AGAIN_S)
        self._num_tokenizing += 1
        try:
            async with asyncio.timeout(self._bounds.max_deadline_s):
                rendered = await services.render(prompt, limits)
                return await services.threads.run(len(rendered), partial(_tokens_of, rendered, services.codec))
        except TimeoutError as error:
            raise DeadlineExceeded("the text was not tokenized in time") from error
        finally:
            self._num_tokenizing -= 1

    def detokenize(self, request: pb.DetokenizeRequest) -> pb.DetokenizeResponse:
        """Returns the text of token ids. Raises InvalidRequest."""
        require_known(request.token_ids, self._limits())
        return pb.DetokenizeResponse(text=self._services.codec.decode(request.token_ids))

    async def abort(self, request_id: RequestId) -> None:
        """Ends a request with Cancelled; returns when its id is free again. Raises RequestNotFound."""
        request = self._open.get(request_id)
        if request is None:
            raise RequestNotFound("no request of that id is running")
        request.stop(Cancelled("the request was aborted", request_id=request_id))
        await request.ended()

    def stop(self) -> None:
        """Ends all requests with Unavailable."""
        for request in tuple(self._open.values()):
            request.stop(Unavailable("the router is stopping"))

    def check(self) -> list[str]:
        """Violated invariants: requests that are open and not admitted, or the other way round."""
        problems = self._admission.check()
        if len(self._open) != self.num_queued + self.num_running:
            problems.append(f"{len(self._open)} requests are open, {self.num_queued + self.num_running} admitted")
        return problems

    def _begin(self, request: pb.GenerateRequest, time_left_s: float | None) -> OpenRequest:
        now_s = asyncio.get_running_loop().time()
        limits = self._limits()
        valid = validate(request, limits)
        require_may_fit(valid.prompt, self._services.codec, limits)
        request_id = valid.request_id or RequestId(secrets.token_hex(12))
        self._admission.admit(request_id, request.ByteSize())
        max_s = self._bounds.max_deadline_s
        life_s = max_s if time_left_s is None else min(time_left_s, max_s)
        deadline_s = now_s + life_s - min(LAST_WORD_S, life_s / 10)
        order = Order(request_id, valid, limits, self.root, now_s, life_s, deadline_s)
        outbox = Outbox(self._bounds.max_buffered_events)
        opened = OpenRequest(order, self._services, outbox, self._admission.started, self._leave)
        self._open[request_id] = opened
        return opened

    def _leave(self, request_id: RequestId) -> None:
        self._admission.leave(request_id)
        del self._open[request_id]

    @contextmanager
    def _refusals_counted(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            self._services.metrics.refused(error)
            raise


def _tokens_of(prompt: ValidPrompt, codec: TextCodec) -> pb.TokenizeResponse:
    token_ids = encode(prompt, codec)
    return pb.TokenizeResponse(token_ids=token_ids, tokens=[codec.token_bytes(token_id) for token_id in token_ids])
