"""The last requests that ended, as the operator lists them."""

import pytest

from router.observe.journal import RequestJournal
from router.observe.recent_requests import MAX_KEPT, MAX_LISTED, Paces, RecentRequests, causes_of
from tests.harness.cluster import until
from tests.harness.fake_cluster import FakeCluster, request, running
from tests.router.test_request_metrics import record
from wire.errors import InvalidRequest, RequestNotFound, Unavailable
from wire.ids import QualifiedId
from wire.pb import cluster_pb2, worker_pb2
from wire.pb import inference_pb2 as pb


def listed(recent: RecentRequests, **asked: str | int) -> list[cluster_pb2.EndedRequest]:
    return list(recent.list(cluster_pb2.ListRequestsRequest(**asked)).requests)  # type: ignore[arg-type]


def timeline(*spans: pb.Span) -> pb.Timeline:
    return pb.Timeline(spans=spans, total_ms=sum(span.duration_ms for span in spans))


def generated(worker: str, ms_a_token: float) -> pb.Timeline:
    counts = {"tokens": 20}
    return timeline(pb.Span(name="decode.generate", worker=worker, duration_ms=20 * ms_a_token, counts=counts))


def test_only_the_last_are_kept_and_listed() -> None:
    recent = RecentRequests(lambda: 5.0)
    for _ in range(MAX_KEPT + 5):
        recent.add(record())
    newest = MAX_KEPT + 5
    assert [one.number for one in listed(recent)] == list(range(newest - MAX_LISTED + 1, newest + 1))
    assert [one.number for one in listed(recent, limit=2)] == [newest - 1, newest]
    assert [one.number for one in listed(recent, after=newest - 1)] == [newest]
    assert not listed(recent, after=newest)
    assert len(listed(recent, request_id="r-1")) == MAX_LISTED
    with pytest.raises(RequestNotFound):
        listed(recent, request_id="r-2")


def test_the_causes_of_the_last_hour_are_summed() -> None:
    now = [0.0]
    recent = RecentRequests(lambda: now[0])
    ended = record()
    misses = [worker_pb2.MissRun(cause="evicted", blocks=3), worker_pb2.MissRun(cause="partial", blocks=1)]
    ended.source = worker_pb2.PromptSource(misses=misses)
    for now[0] in (30.0, 45.0, 30 * 60.0):
        recent.add(ended)
    assert recent.uncached_blocks == {"evicted": 9, "partial": 3}
    [*_, last] = listed(recent)
    assert [(run.cause, run.blocks) for run in last.misses] == [("evicted", 3), ("partial", 1)]
    now[0] = 61 * 60.0
    assert recent.uncached_blocks == {"evicted": 3, "partial": 1}
    now[0] = 3 * 3600.0
    assert recent.uncached_blocks == {}


async def test_a_request_that_failed_is_listed_with_its_timeline_and_without_its_prompt() -> None:
    async with running(1, 1) as cluster:
        await cluster.generate(request(max_tokens=3))
        cluster.workers["p0"].refusal = InvalidRequest("stop", "hello")
        with pytest.raises(InvalidRequest):
            await cluster.generate(request(max_tokens=3))
        cluster.workers["p0"].refusal = None
        await aborted(cluster)
        good, bad, ended = listed(cluster.router.dispatcher.recent)
    assert (good.outcome, good.reason, good.output_tokens, good.timeline.prefill_worker) == ("OK", "", 3, "p0")
    assert good.timeline.decode_worker == "d0"
    assert (bad.outcome, bad.reason, bad.message) == ("INVALID_ARGUMENT", "INVALID_REQUEST", "stop")
    assert (ended.outcome, ended.message) == ("CANCELLED", "the operator aborted the request")
    assert ended.timeline.spans[-1].name in ("decode.call", "router")
    for one in (good, bad, ended):
        assert one.timeline.total_ms > 0
        assert "hello" not in str(one)


async def aborted(cluster: FakeCluster) -> None:
    cluster.workers["d0"].may_go.clear()
    opened = cluster.open(request(max_tokens=9))
    await anext(aiter(opened.outbox))
    await cluster.router.dispatcher.abort_any(opened.request_id)  # type: ignore[arg-type]
    cluster.workers["d0"].may_go.set()


def test_an_error_that_may_quote_the_request_has_only_its_parameter() -> None:
    for error, told in ((InvalidRequest("stop", "secret"), "stop"), (Unavailable("gone"), "gone")):
        journal = RequestJournal(QualifiedId("r"), 0.0)
        journal.end(error, 1.0)
        assert (journal.outcome, journal.reason, journal.message) == (error.status.grpc, error.reason, told)


async def test_a_lost_worker_is_the_first_cause() -> None:
    async with running(1, 2) as cluster:
        for worker in ("d0", "d1"):
            cluster.workers[worker].may_go.clear()
        opened = cluster.open(request(max_tokens=40))
        await anext(aiter(opened.outbox))
        await until(lambda: any(cluster.workers[name].open_calls for name in ("d0", "d1")))
        [lost] = [name for name in ("d0", "d1") if cluster.workers[name].open_calls]
        cluster.transports[lost].kill()
        cluster.workers[{"d0": "d1", "d1": "d0"}[lost]].may_go.set()
        async for _ in opened.outbox:
            pass
        [ended] = listed(cluster.router.dispatcher.recent)
        cluster.workers[lost].may_go.set()
    assert (ended.outcome, ended.attempts) == ("OK", 2)
    [failed] = [span for span in ended.timeline.spans if span.error]
    assert (failed.name, failed.worker, failed.error) == ("decode.call", lost, "UNAVAILABLE")
    assert ended.causes[0].endswith(f"lost {lost}: it went away")


def test_a_worker_is_slow_beside_others() -> None:
    paces = Paces()
    for worker, ms in (("d0", 5.0), ("d1", 4.0), ("d2", 40.0)):
        paces.add(generated(worker, ms))
    [cause] = causes_of(generated("d2", 40.0), paces)
    assert cause == "800 ms: generated 20 tokens at d2, 8.9 times as slowly as other workers"
    [cause] = causes_of(generated("d0", 5.0), paces)
    assert cause == "100 ms: generated 20 tokens at d0"
    [cause] = causes_of(generated("d2", 40.0), Paces())
    assert cause == "800 ms: generated 20 tokens at d2"


def test_a_span_of_an_unknown_name_is_a_cause_too() -> None:
    [cause] = causes_of(timeline(pb.Span(name="decode.{worker.x}", worker="d0", duration_ms=7.0)), Paces())
    assert cause == "7 ms: was at d0"
