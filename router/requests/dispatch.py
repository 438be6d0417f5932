"""Lets requests in, and knows those that are under way."""

import asyncio
import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

from router.config import StreamBounds
from router.requests.admission import Admission
from router.requests.events import Stopped
from router.requests.outbox import Outbox
from router.requests.session import Session
from router.requests.steps import Order, Services
from router.requests.validator import Limits, validate
from wire.errors import Cancelled, RequestNotFound, Unavailable
from wire.ids import RequestId
from wire.pb import inference_pb2 as pb


class Dispatcher:
    """`limits` tells what fits into the cluster as it is now."""

    def __init__(
        self, services: Services, admission: Admission, bounds: StreamBounds, limits: Callable[[], Limits]
    ) -> None:
        self._services = services
        self._admission = admission
        self._bounds = bounds
        self._limits = limits
        self._sessions: dict[RequestId, Session] = {}

    @property
    def num_queued(self) -> int:
        return self._admission.num_queued

    @property
    def num_running(self) -> int:
        return self._admission.num_running

    @contextmanager
    def arriving(self) -> Iterator[None]:
        """While a request is on its way. Raises Overloaded at once if none may come in, whatever it is."""
        with self._refusals_counted():
            self._admission.require_room()
            yield

    def open(self, request: pb.GenerateRequest, time_left_s: float | None) -> Session:
        """Starts a request, or raises at once what is wrong with it, or Overloaded. None: it has no deadline."""
        with self._refusals_counted():
            return self._open(request, time_left_s)

    def _open(self, request: pb.GenerateRequest, time_left_s: float | None) -> Session:
        now_s = asyncio.get_running_loop().time()
        limits = self._limits()
        valid = validate(request, limits)
        request_id = valid.request_id or RequestId(secrets.token_hex(12))
        self._admission.admit(request_id, request.ByteSize())
        max_s = self._bounds.max_deadline_s
        life_s = max_s if time_left_s is None else min(time_left_s, max_s)
        session = Session(
            Order(request_id, valid, limits, now_s, now_s + life_s),
            self._services,
            Outbox(self._bounds.max_buffered_events),
            on_first_token=partial(self._admission.started, request_id),
            on_end=partial(self._leave, request_id),
        )
        self._sessions[request_id] = session
        session.start()
        return session

    def abort(self, request_id: RequestId) -> None:
        """Ends a request with Cancelled. Raises RequestNotFound."""
        session = self._sessions.get(request_id)
        if session is None:
            raise RequestNotFound("no request of that id is running")
        session.on(Stopped(Cancelled("the request was aborted", request_id=request_id)))

    def stop(self) -> None:
        """Ends all requests with Unavailable."""
        for session in tuple(self._sessions.values()):
            session.on(Stopped(Unavailable("the router is stopping")))

    @contextmanager
    def _refusals_counted(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            self._services.metrics.refused(error)
            raise

    def _leave(self, request_id: RequestId) -> None:
        self._admission.leave(request_id)
        del self._sessions[request_id]
