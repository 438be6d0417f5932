"""The way of traces out of the router: a bounded queue, and a thread that sends them by OTLP over HTTP."""

import http.client
import logging
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from queue import Empty, Full, Queue

from google.protobuf.message import DecodeError

from wire.pb import otlp_pb2 as otlp

SERVICE = "baton"
PATH = "/v1/traces"
MAX_WAITING = 2048
"""Bound on the traces that wait; later ones are lost."""
MAX_BATCH = 128
"""Traces of one call."""
GATHER_S = 1.0
"""How long a trace waits for others to go with it."""
TIMEOUT_S = 5.0
LAST_SEND_S = 1.0
MAX_ANSWER_BYTES = 64 << 10
WARN_EVERY_S = 60.0

log = logging.getLogger(__name__)

MakeSpans = Callable[[], Iterable[otlp.TraceSpan]]
"""Makes the spans of a trace; called on the exporter's thread."""


class TraceExporter:
    """Sends traces from `start` to `stop`. One that the collector does not take is lost, with a warning a minute."""

    def __init__(self, endpoint: str) -> None:
        """endpoint: http://HOST:PORT of a collector."""
        self._url = endpoint.rstrip("/") + PATH
        self._resource = otlp.Resource(
            attributes=[otlp.KeyValue(key="service.name", value=otlp.AnyValue(string_value=SERVICE))]
        )
        self._traces: Queue[MakeSpans | None] = Queue(MAX_WAITING)
        self._thread = threading.Thread(target=self._run, name="traces", daemon=True)
        self._is_open = True
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        self._num_lost = 0
        self._next_warning_s = 0.0

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Sends the traces that wait; blocks for LAST_SEND_S at most."""
        with suppress(Full):
            self._traces.put_nowait(None)
            self._thread.join(LAST_SEND_S)

    def put(self, make_spans: MakeSpans) -> None:
        """Takes a trace; never waits."""
        try:
            self._traces.put_nowait(make_spans)
        except Full:
            self._lose(1, f"{MAX_WAITING} others wait for the collector")

    def _run(self) -> None:
        while self._is_open:
            traces = list(self._gather())
            try:
                self._send([span for make_spans in traces for span in make_spans()])
            except (OSError, ValueError, http.client.HTTPException, DecodeError) as error:
                self._lose(len(traces), str(error) or type(error).__name__)

    def _gather(self) -> Iterator[MakeSpans]:
        """Waits for a trace, then for others to go with it."""
        until_s: float | None = None
        for _ in range(MAX_BATCH):
            try:
                trace = self._traces.get(timeout=None if until_s is None else max(0.0, until_s - time.monotonic()))
            except Empty:
                return
            if trace is None:
                self._is_open = False
                return
            until_s = until_s or time.monotonic() + GATHER_S
            yield trace

    def _send(self, spans: Sequence[otlp.TraceSpan]) -> None:
        """Raises OSError, ValueError, HTTPException or DecodeError where the collector takes not all of them."""
        if not spans:
            return
        scope = otlp.ScopeSpans(scope=otlp.Scope(name="baton"), spans=spans)
        message = otlp.ExportTraceServiceRequest(
            resource_spans=[otlp.ResourceSpans(resource=self._resource, scope_spans=[scope])]
        )
        headers = {"content-type": "application/x-protobuf"}
        try:
            with self._opener.open(
                urllib.request.Request(self._url, message.SerializeToString(), headers), timeout=TIMEOUT_S
            ) as answer:
                refused = otlp.ExportTraceServiceResponse.FromString(answer.read(MAX_ANSWER_BYTES)).partial_success
        except urllib.error.HTTPError as error:
            with error:
                raise ValueError(f"HTTP {error.code}") from None
        if refused.rejected_spans:
            raise ValueError(f"{refused.rejected_spans} spans were refused: {refused.error_message}")

    def _lose(self, num_traces: int, reason: str) -> None:
        self._num_lost += num_traces
        now_s = time.monotonic()
        if now_s >= self._next_warning_s:
            self._next_warning_s = now_s + WARN_EVERY_S
            log.warning("%d traces did not reach %s: %.200r", self._num_lost, self._url, reason)
            self._num_lost = 0
