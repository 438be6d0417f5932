"""The exporter of traces: a bounded queue, and a thread that sends them by OTLP over HTTP."""

import http.client
import logging
import threading
import time
import urllib.error
import urllib.request
from collections import deque
from collections.abc import Callable, Iterable, Sequence

from google.protobuf.message import DecodeError

from wire.pb import otlp_pb2 as otlp

SERVICE = "baton"
PATH = "/v1/traces"
MAX_WAITING = 2048
"""Bound on the waiting traces; further traces are lost."""
MAX_BATCH = 128
"""Traces of one call."""
GATHER_S = 1.0
"""Time that a trace waits for others, so that the thread wakes once for all of them."""
TIMEOUT_S = 5.0
LAST_SEND_S = 1.0
MAX_ANSWER_BYTES = 64 << 10
WARN_EVERY_S = 60.0

log = logging.getLogger(__name__)

MakeSpans = Callable[[], Iterable[otlp.TraceSpan]]
"""A function that makes the spans of a trace, called on the exporter's thread."""


class TraceExporter:
    """Sends traces from `start` to `stop`. A trace that the collector refuses is lost, with a warning a minute."""

    def __init__(self, endpoint: str) -> None:
        """endpoint: http://HOST:PORT of a collector."""
        self._url = endpoint.rstrip("/") + PATH
        self._resource = otlp.Resource(
            attributes=[otlp.KeyValue(key="service.name", value=otlp.AnyValue(string_value=SERVICE))]
        )
        self._traces: deque[MakeSpans] = deque()
        self._are_waiting, self._is_stopping = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="traces", daemon=True)
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        self._num_lost = 0
        self._next_warning_s = 0.0

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Sends the waiting traces; blocks for LAST_SEND_S at most."""
        self._is_stopping.set()
        self._are_waiting.set()
        self._thread.join(LAST_SEND_S)

    def put(self, make_spans: MakeSpans) -> None:
        """Takes a trace; never waits."""
        if len(self._traces) >= MAX_WAITING:
            self._lose(1, f"{MAX_WAITING} others wait for the collector")
            return
        self._traces.append(make_spans)
        if not self._are_waiting.is_set():
            self._are_waiting.set()

    def _run(self) -> None:
        while not self._is_stopping.is_set():
            self._are_waiting.wait()
            self._is_stopping.wait(GATHER_S)
            self._are_waiting.clear()
            while self._traces:
                self._send_batch([self._traces.popleft() for _ in range(min(MAX_BATCH, len(self._traces)))])

    def _send_batch(self, traces: Sequence[MakeSpans]) -> None:
        try:
            self._send([span for make_spans in traces for span in make_spans()])
        except (OSError, ValueError, http.client.HTTPException, DecodeError) as error:
            self._lose(len(traces), str(error) or type(error).__name__)

    def _send(self, spans: Sequence[otlp.TraceSpan]) -> None:
        """Sends traces. Raises OSError, ValueError, HTTPException or DecodeError unless all are taken."""
        if not spans:
            return
        message = otlp.ExportTraceServiceRequest()  # filled in place: a message within another is a copy
        scope = message.resource_spans.add(resource=self._resource).scope_spans.add()
        scope.scope.name = "baton"
        scope.spans.extend(spans)
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
