"""Traces of requests as a collector gets them: whole trees, also of requests that lost workers; and bad collectors."""

import asyncio
import socket
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, field, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import pairwise
from queue import Queue

import pytest

from engine.model.hash_model import HashModel
from router.config import TraceSettings
from router.observe import trace_exporter
from router.observe.trace_exporter import TraceExporter
from router.observe.traces import Traces
from tests.gateway.local_gateway import LocalDoor
from tests.harness.cluster import WAIT_S
from tests.harness.fake_cluster import CONFIG, request, running
from tests.harness.faulty_cluster import FaultyCluster
from tests.harness.local_cluster import Sizes
from tests.router.test_router_api import serving
from wire.errors import BatonError
from wire.ids import TRACEPARENT
from wire.layout import KVLayout
from wire.pb import inference_pb2 as pb
from wire.pb import otlp_pb2 as otlp
from wire.sampling import SamplingParams
from wire.trust.key_ring import NO_KEYS

MODEL = HashModel(KVLayout(num_layers=1, num_kv_heads=1, head_dim=4, block_size=4, dtype="float32"), 300)
PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
SECRET = "a text of the client"
ROUNDED_NS = 2
Spans = list[otlp.TraceSpan]


class Collector:
    """A collector on a port of its own; `traces` has the spans of each trace that came."""

    def __init__(self, answer: bytes = b"", status: int = 200) -> None:
        self.bodies: Queue[bytes] = Queue()
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                assert (self.path, self.headers["content-type"]) == ("/v1/traces", "application/x-protobuf")
                collector.bodies.put(self.rfile.read(int(self.headers["content-length"])))
                self.send_response(status)
                self.send_header("content-length", str(len(answer)))
                self.end_headers()
                self.wfile.write(answer)

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.endpoint = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,))

    @property
    def traces(self) -> dict[bytes, Spans]:
        traces: dict[bytes, Spans] = {}
        while not self.bodies.empty():
            for of_resource in otlp.ExportTraceServiceRequest.FromString(self.bodies.get()).resource_spans:
                assert of_resource.resource.attributes[0].value.string_value == "baton"
                for span in of_resource.scope_spans[0].spans:
                    traces.setdefault(span.trace_id, []).append(span)
        return traces

    def __enter__(self) -> "Collector":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Exporters wait for no further trace."""
    monkeypatch.setattr(trace_exporter, "GATHER_S", 0.0)


@pytest.fixture
def collector() -> Iterator[Collector]:
    with Collector() as collector:
        yield collector


def attributes_of(span: otlp.TraceSpan) -> dict[str, object]:
    values = {one.key: getattr(one.value, str(one.value.WhichOneof("value"))) for one in span.attributes}
    return {name: listed(value) if isinstance(value, otlp.ArrayValue) else value for name, value in values.items()}


def listed(value: otlp.ArrayValue) -> list[str]:
    return [one.string_value for one in value.values]


def faults_of(spans: Spans) -> Iterator[str]:
    """Yields the faults of a trace without a caller's span: gaps, spans without parent, attempts without link."""
    root, *others = spans
    by_id = {span.span_id: span for span in spans}
    attempts = [span for span in others if span.name.startswith("attempt ")]
    if len(by_id) != len(spans) or root.parent_span_id or root.kind != otlp.SPAN_KIND_SERVER:
        yield "no tree"
    for span in others:
        parent = by_id.get(span.parent_span_id)
        if parent is None:
            yield f"{span.name} has no parent"
        elif not (
            parent.start_time_unix_nano <= span.start_time_unix_nano
            and span.end_time_unix_nano <= parent.end_time_unix_nano + ROUNDED_NS
        ):
            yield f"{span.name} is outside of {parent.name}"
    for parent in (root, *attempts):
        covered_ns = parent.start_time_unix_nano
        for span in sorted(others, key=lambda one: one.start_time_unix_nano):
            if span.parent_span_id == parent.span_id:
                if span.start_time_unix_nano > covered_ns + ROUNDED_NS:
                    yield f"a gap in {parent.name} before {span.name}"
                covered_ns = max(covered_ns, span.end_time_unix_nano)
        if covered_ns < parent.end_time_unix_nano - ROUNDED_NS:
            yield f"a gap at the end of {parent.name}"
    for earlier, later in pairwise(attempts):
        if [link.span_id for link in later.links] != [earlier.span_id]:
            yield f"{later.name} has no link"
        if earlier.status.code != otlp.STATUS_CODE_ERROR:
            yield f"{earlier.name} did not fail"


async def test_traces_of_requests_that_lost_workers_are_whole(collector: Collector) -> None:
    num_requests, num_kills = 200, 12
    sizes = Sizes(traces=TraceSettings(collector.endpoint))
    async with FaultyCluster.running(MODEL, 2, 2, sizes) as cluster:
        cluster.replace_dead = True

        async def ask(number: int) -> None:
            if number % (num_requests // num_kills) == 5:
                cluster.mortals[cluster.listed[number % len(cluster.listed)]].die_after = 3
            try:
                params = pb.SamplingParams(max_tokens=8)
                await cluster.answer(
                    pb.GenerateRequest(text=f"{SECRET} {number}", request_id=f"r{number}", sampling_params=params)
                )
            except BatonError:
                failed.append(f"r{number}")

        failed: list[str] = []
        for first in range(0, num_requests, 20):
            await asyncio.gather(*(ask(number) for number in range(first, first + 20)))
        assert len(cluster.dead) >= num_kills // 2
    traces = list(collector.traces.values())
    assert sorted(str(attributes_of(spans[0])["gen_ai.response.id"]) for spans in traces) == sorted(
        f"r{number}" for number in range(num_requests)
    )
    assert [(spans[0].name, fault) for spans in traces for fault in faults_of(spans)] == []
    again = [spans for spans in traces if any(span.name == "attempt 2" for span in spans)]
    assert len(again) >= num_kills // 2
    assert failed == []
    assert not any(SECRET in str(spans) for spans in traces)


async def test_a_caller_has_its_trace_go_on_or_not(collector: Collector) -> None:
    config = replace(CONFIG, traces=TraceSettings(collector.endpoint, ratio=0.0))
    async with serving(config) as service:
        for number, header in enumerate((PARENT, PARENT[:-1] + "0", "00-" + "0" * 32 + PARENT[35:], "", PARENT + "-x")):
            metadata = ((TRACEPARENT, header),) if header else ()
            message = request(max_tokens=2)
            message.request_id = f"r{number}"
            async for _ in service.inference.Generate(message, metadata=metadata):
                pass
    ((trace_id, spans),) = collector.traces.items()
    assert trace_id.hex() == PARENT[3:35]
    assert spans[0].parent_span_id.hex() == PARENT[36:52]
    described = attributes_of(spans[0])
    expected = {
        "gen_ai.operation.name": "text_completion",
        "gen_ai.request.model": "fake",
        "gen_ai.request.max_tokens": 2,
        "gen_ai.request.seed": 1,
        "gen_ai.response.id": "r0",
        "gen_ai.response.finish_reasons": ["length"],
        "gen_ai.usage.input_tokens": len("hello, world"),
        "gen_ai.usage.output_tokens": 2,
    }
    assert {name: described.get(name) for name in expected} == expected
    assert {"router.tokenize", "attempt 1"} <= {span.name for span in spans}


async def test_a_header_over_http_is_that_of_the_call(collector: Collector) -> None:
    config = replace(CONFIG, traces=TraceSettings(collector.endpoint, ratio=0.0))
    async with running(1, 1, config) as cluster:
        door = LocalDoor(cluster.router, NO_KEYS)
        body = {"messages": [{"role": "user", "content": SECRET}], "max_tokens": 1}
        for header in (PARENT, "\xff" * 55):
            assert (await door.post("/v1/chat/completions", body, traceparent=header)).status == 200
        await door.client.close()
    ((root, *_),) = collector.traces.values()
    assert (root.name, root.parent_span_id.hex()) == ("chat fake", PARENT[36:52])


async def test_failed_requests_have_traces_without_the_texts_of_errors_that_quote(collector: Collector) -> None:
    async with running(1, 0, replace(CONFIG, traces=TraceSettings(collector.endpoint))) as cluster:
        with pytest.raises(BatonError):
            await cluster.generate(request(max_tokens=2), 0.05)
    (spans,) = collector.traces.values()
    described = attributes_of(spans[0])
    assert (described["error.type"], spans[0].status.code) == ("DEADLINE_EXCEEDED", otlp.STATUS_CODE_ERROR)
    assert list(faults_of(spans)) == []


def test_about_the_ratio_of_requests_is_traced() -> None:
    exporter = TraceExporter("http://127.0.0.1:9")
    traces = Traces(0.25, "m", exporter)
    sampled = Counter(traces.begin("text", SamplingParams(), "") is not None for _ in range(4000))
    assert 800 < sampled[True] < 1200


@contextmanager
def hanging(answer: bytes) -> Iterator[str]:
    """A server that takes connections, sends so much, and no more."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        taken: list[socket.socket] = []

        def serve() -> None:
            with suppress(OSError):
                while True:
                    taken.append(server.accept()[0])
                    taken[-1].sendall(answer)

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.getsockname()[1]}"
        finally:
            server.shutdown(socket.SHUT_RDWR)
            thread.join()
            for one in taken:
                one.close()


@contextmanager
def refusing() -> Iterator[str]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    yield f"http://127.0.0.1:{port}"


@contextmanager
def answering(answer: bytes, status: int = 200) -> Iterator[str]:
    with Collector(answer, status) as collector:
        yield collector.endpoint


PARTIAL = otlp.ExportTraceServiceResponse(
    partial_success=otlp.PartialSuccess(rejected_spans=3, error_message="too\x1bmany")
).SerializeToString()
BAD_COLLECTORS: dict[str, tuple[Callable[[], AbstractContextManager[str]], str]] = {
    "hangs": (lambda: hanging(b""), "timed out"),
    "hangs in its answer": (lambda: hanging(b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\n"), "timed out"),
    "refuses": (refusing, "refused"),
    "answers an error": (lambda: answering(b"", 503), "HTTP 503"),
    "answers no OTLP": (lambda: answering(b"<html>"), "pars"),
    "answers no HTTP": (lambda: hanging(b"\x00\xff garbage\r\n\r\n"), "garbage"),
    "takes a part": (lambda: answering(PARTIAL), "3 spans were refused: too\\x1bmany"),
}


@pytest.mark.parametrize("kind", BAD_COLLECTORS)
async def test_no_request_waits_for_a_bad_collector(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    make, words = BAD_COLLECTORS[kind]
    if words == "timed out":
        monkeypatch.setattr(trace_exporter, "TIMEOUT_S", 0.1)
    warned = asyncio.Event()
    loop = asyncio.get_running_loop()
    monkeypatch.setattr(trace_exporter.log, "warning", told := Told(lambda: loop.call_soon_threadsafe(warned.set)))
    with make() as endpoint:
        async with running(1, 1, replace(CONFIG, traces=TraceSettings(endpoint))) as cluster:
            for _ in range(3):
                await cluster.generate(request(max_tokens=2), WAIT_S)
            async with asyncio.timeout(WAIT_S):
                await warned.wait()
            for _ in range(3):
                await cluster.generate(request(max_tokens=2), WAIT_S)
    assert len(told.lines) == 1, "one warning a minute"
    assert words in told.lines[0]
    assert told.lines[0].isprintable()


def test_a_full_queue_loses_traces_at_once_with_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace_exporter, "MAX_WAITING", 2)
    monkeypatch.setattr(trace_exporter.log, "warning", told := Told(lambda: None))
    exporter = TraceExporter("http://127.0.0.1:9")  # not started: nothing is taken out
    for _ in range(5):
        exporter.put(list)
    assert told.lines == ["1 traces did not reach http://127.0.0.1:9/v1/traces: '2 others wait for the collector'"]


@dataclass
class Told:
    """A log's method that keeps its lines."""

    on_line: Callable[[], object]
    lines: list[str] = field(default_factory=list)

    def __call__(self, line: str, *values: object) -> None:
        self.lines.append(line % values)
        self.on_line()
