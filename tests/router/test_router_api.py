"""The public service over real gRPC, before fake workers."""

import asyncio
import gc
import urllib.request
import weakref
from collections.abc import AsyncIterable, AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

import grpc
import grpc.aio
import pytest
from google.rpc import error_details_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from baton import AsyncClient
from baton.request import Options
from router.config import RouterConfig
from router.ports import inference
from router.ports.interceptors import MAX_ARRIVING, reserved_names
from router.ports.server import RouterServer
from router.requests.checks import ValidRequest, validate
from router.requests.dispatch import OpenRequest
from tests.harness.cluster import WAIT_S, until
from tests.harness.fake_cluster import CONFIG, PROMPT, FakeCluster, expected, request
from text.byte_tokenizer import ByteTokenizer
from text.chat import Chat, NoRenderer
from wire.convert import status_of, tiers_from_pb
from wire.errors import Cancelled, ConfigError, DeadlineExceeded, InvalidRequest, Unavailable, Unsupported
from wire.ids import WorkerId
from wire.pb import cluster_pb2, worker_pb2
from wire.pb import inference_pb2 as pb
from wire.pb.cluster_pb2_grpc import ClusterStub
from wire.pb.inference_pb2_grpc import InferenceStub
from wire.pools import Addresses
from wire.rpc import CHANNEL_OPTIONS, TOKEN_METADATA, details_of

Code = grpc.StatusCode
GENERATE = "/baton.v1.Inference/Generate"
LONG = "a" * 100_000
TOKEN = ((TOKEN_METADATA, CONFIG.cluster.token),)


@dataclass
class Service:
    """A router that listens, one prefill and one decode worker, and clients of both ports."""

    cluster: FakeCluster
    server: RouterServer
    addresses: Addresses
    public: grpc.aio.Channel
    operator: grpc.aio.Channel

    @property
    def inference(self) -> InferenceStub:
        return InferenceStub(self.public)

    def without_message(self, method: str) -> Any:
        """A call that has begun, and whose message does not come by itself."""
        return self.public.stream_unary(method)(timeout=10.0)

    def num_refused(self, outcome: str) -> float | None:
        registry = self.cluster.router.metrics.registry
        return registry.get_sample_value("baton_requests_total", {"outcome": outcome})

    @property
    def operate(self) -> ClusterStub:
        return ClusterStub(self.operator)


@asynccontextmanager
async def serving(config: RouterConfig = CONFIG) -> AsyncIterator[Service]:
    cluster = FakeCluster(config)
    server = RouterServer(cluster.router)
    addresses = await server.start()
    await cluster.resize(1, 1)
    async with (
        grpc.aio.insecure_channel(addresses.public, options=CHANNEL_OPTIONS) as public,
        grpc.aio.insecure_channel(addresses.operator, options=CHANNEL_OPTIONS) as operator,
    ):
        try:
            yield Service(cluster, server, addresses, public, operator)
            for worker in cluster.workers.values():
                worker.may_go.set()
            await cluster.come_to_rest()
        finally:
            await server.stop()


@pytest.fixture
async def service() -> AsyncIterator[Service]:
    async with serving() as service:
        yield service


async def read(call: AsyncIterable[pb.GenerateResponse]) -> list[pb.GenerateResponse]:
    return [response async for response in call]


async def failure_of(call: AsyncIterable[pb.GenerateResponse]) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await read(call)
    return raised.value


async def failure_of_unary(call: Any) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await call
    return raised.value


def info_of(failure: grpc.aio.AioRpcError) -> error_details_pb2.ErrorInfo:
    info = error_details_pb2.ErrorInfo()
    assert details_of(failure)[0].Unpack(info)
    return info


def retry_delay_s(failure: grpc.aio.AioRpcError) -> float:
    retry = error_details_pb2.RetryInfo()
    assert details_of(failure)[1].Unpack(retry)
    delay_s: float = retry.retry_delay.ToTimedelta().total_seconds()
    return delay_s


async def test_a_stream_is_chunks_and_one_complete(service: Service) -> None:
    message = request(max_tokens=12)
    message.request_id = "mine"
    responses = await read(service.inference.Generate(message))
    assert {response.request_id for response in responses} == {"mine"}
    assert [response.WhichOneof("event") for response in responses[:-1]] == ["chunk"] * (len(responses) - 1)
    assert [token for response in responses for token in response.chunk.token_ids] == expected(12)
    assert responses[-1].complete.seed == 1
    assert responses[-1].complete.usage.completion_tokens == 12


async def test_tokens_of_a_prompt_are_told_before_its_first_token(service: Service) -> None:
    service.cluster.workers["p0"].may_go.clear()
    async with (
        asyncio.timeout(WAIT_S),
        AsyncClient(service.addresses.public) as client,
        client.stream(PROMPT, max_tokens=2) as stream,
    ):
        assert await stream.admitted() == len(PROMPT)
        service.cluster.workers["p0"].may_go.set()
        assert sum([len(chunk.token_ids) async for chunk in stream]) == 2
        assert await stream.admitted() == len(PROMPT)


@pytest.mark.parametrize("promised", [True, False])
async def test_answers_and_status_tell_whether_a_failover_promises_the_very_same_tokens(promised: bool) -> None:
    async with serving(replace(CONFIG, model=replace(CONFIG.model, batch_invariant=promised))) as service:
        async with AsyncClient(service.addresses.public) as client, client.stream(PROMPT, max_tokens=2) as stream:
            assert await stream.is_batch_invariant() is promised
        status = await service.operate.GetStatus(cluster_pb2.GetStatusRequest(), metadata=TOKEN)
        assert status.HasField("batch_invariant")
        assert status.batch_invariant is promised


@pytest.mark.parametrize("options", [{"temperature": 3}, {"echo": True}], ids=["a wrong one", "a good one"])
async def test_tokens_of_a_prompt_that_no_worker_takes_are_not_told(options: Options) -> None:
    async with serving(replace(CONFIG, settings=replace(CONFIG.settings, max_worker_wait_s=0.05))) as service:
        await service.cluster.resize(0, 0)
        async with AsyncClient(service.addresses.public) as client, client.stream(PROMPT, **options) as stream:
            assert await stream.admitted() == 0
            with pytest.raises(InvalidRequest if "temperature" in options else Unavailable):
                assert [chunk async for chunk in stream] == []


async def test_models_are_listed(service: Service) -> None:
    models = (await service.inference.ListModels(pb.ListModelsRequest())).models
    assert [(model.name, model.max_context_len, model.dtype) for model in models] == [("fake", 2000, "float32")]


async def test_a_model_answers_to_all_its_names() -> None:
    async with serving(replace(CONFIG, model=replace(CONFIG.model, aliases=("b", "c")))) as service:
        models = (await service.inference.ListModels(pb.ListModelsRequest())).models
        assert [(one.name, one.max_context_len) for one in models] == [("fake", 2000), ("b", 2000), ("c", 2000)]
        for name in ("fake", "b", "c"):
            message = request(max_tokens=3)
            message.model = name
            assert (await read(service.inference.Generate(message)))[-1].HasField("complete")


async def test_an_invalid_request_is_told_with_its_parameter(service: Service) -> None:
    failure = await failure_of(service.inference.Generate(request(temperature=3.0)))
    assert failure.code() == Code.INVALID_ARGUMENT
    info = info_of(failure)
    assert (info.reason, info.domain) == ("INVALID_REQUEST", "baton")
    assert dict(info.metadata) == {"param": "temperature", "retryable": "false"}


async def test_another_model_is_not_found(service: Service) -> None:
    message = request()
    message.model = "../../etc/passwd"
    assert (await failure_of(service.inference.Generate(message))).code() == Code.NOT_FOUND


async def test_bytes_that_are_no_message_are_invalid(service: Service) -> None:
    call = service.public.unary_stream("/baton.v1.Inference/Generate", bytes, pb.GenerateResponse.FromString)
    failure = await failure_of(call(b"\xff\xff\xff"))
    assert failure.code() == Code.INVALID_ARGUMENT
    assert info_of(failure).reason == "INVALID_REQUEST"


async def test_a_request_that_is_running_can_be_aborted(service: Service) -> None:
    service.cluster.workers["d0"].may_go.clear()
    message = request()
    message.request_id = "mine"
    call = service.inference.Generate(message)
    failing = asyncio.create_task(failure_of(call))
    await until(lambda: service.cluster.workers["d0"].open_calls)
    await service.inference.Abort(pb.AbortRequest(request_id="mine"))
    failure = await failing
    assert (failure.code(), info_of(failure).reason) == (Code.CANCELLED, "CANCELLED")
    with pytest.raises(grpc.aio.AioRpcError) as unknown:
        await service.inference.Abort(pb.AbortRequest(request_id="mine"))
    assert unknown.value.code() == Code.NOT_FOUND


async def test_a_client_gets_the_timeline_of_a_request_that_failed(service: Service) -> None:
    service.cluster.workers["d0"].may_go.clear()
    async with AsyncClient(service.addresses.public) as client:
        asking = asyncio.create_task(client.generate(PROMPT, request_id="mine"))
        await until(lambda: service.cluster.workers["d0"].open_calls)
        await client.abort("mine")
        with pytest.raises(Cancelled) as aborted:
            await asking
        with pytest.raises(InvalidRequest) as refused:
            await client.generate(PROMPT, temperature=9)
    timeline = aborted.value.timeline
    assert (timeline.prefill_worker, timeline.decode_worker, timeline.prefill_reason) == ("p0", "d0", "always")
    assert "decode.call" in [span.name for span in timeline.spans]
    assert sum(span.duration_ms for span in timeline.spans) == pytest.approx(timeline.total_ms)
    assert PROMPT not in str(timeline)
    assert refused.value.timeline is None, "a request that was not let in has none"


async def test_a_deadline_is_told_with_the_gate_at_which_it_passed() -> None:
    settings = replace(CONFIG.settings, max_deadline_s=0.2)
    async with serving(replace(CONFIG, settings=settings)) as service:
        await service.cluster.resize(1, 0)
        async with AsyncClient(service.addresses.public) as client:
            with pytest.raises(DeadlineExceeded) as late:
                await client.generate(PROMPT)
        await service.cluster.resize(1, 1)
    longest = max(late.value.timeline.spans, key=lambda span: span.duration_ms)
    assert longest.name == "router.wait_decode"
    assert longest.name in late.value.message


@pytest.mark.parametrize("where", ["p0", "d0"])
async def test_a_client_that_cancels_frees_the_worker(service: Service, where: str) -> None:
    worker = service.cluster.workers[where]
    worker.may_go.clear()
    call = service.inference.Generate(request())
    reading = asyncio.create_task(read(call))
    await until(lambda: worker.open_calls)
    call.cancel()
    await asyncio.wait([reading])
    await until(lambda: not worker.open_calls)
    await service.cluster.come_to_rest()


async def test_a_client_that_goes_away_frees_the_worker(service: Service) -> None:
    worker = service.cluster.workers["d0"]
    worker.may_go.clear()
    async with grpc.aio.insecure_channel(service.addresses.public) as channel:
        reading = asyncio.create_task(read(InferenceStub(channel).Generate(request())))
        await until(lambda: worker.open_calls)
    await asyncio.wait([reading])
    await until(lambda: not worker.open_calls)


@pytest.mark.parametrize("where", ["p0", "d0"])
async def test_the_clients_deadline_ends_the_work(service: Service, where: str) -> None:
    worker = service.cluster.workers[where]
    worker.may_go.clear()
    failure = await failure_of(service.inference.Generate(request(), timeout=1.0))
    assert failure.code() == Code.DEADLINE_EXCEEDED
    assert len(worker.prefills) + len(worker.decodes) == 1
    await until(lambda: not worker.open_calls)


async def test_our_own_deadline_is_told_as_such() -> None:
    async with serving(replace(CONFIG, settings=replace(CONFIG.settings, max_deadline_s=0.1))) as service:
        service.cluster.workers["d0"].may_go.clear()
        failure = await failure_of(service.inference.Generate(request()))
        assert (failure.code(), info_of(failure).reason) == (Code.DEADLINE_EXCEEDED, "DEADLINE_EXCEEDED")
        assert info_of(failure).metadata["retryable"] == "true"
        assert (failure.details() or "").startswith("the deadline of 0.1 s passed at ")


async def test_a_full_queue_refuses_quickly() -> None:
    async with serving(replace(CONFIG, settings=replace(CONFIG.settings, max_queued_requests=4))) as service:
        service.cluster.workers["p0"].may_go.clear()
        calls = [service.inference.Generate(request()) for _ in range(4)]
        readings = [asyncio.create_task(read(call)) for call in calls]
        await until(lambda: service.cluster.router.dispatcher.num_queued == 4)
        async with asyncio.timeout(WAIT_S):  # a refusal that waited for room would wait for ever
            refusals = await asyncio.gather(*(failure_of(service.inference.Generate(request())) for _ in range(20)))
        assert {failure.code() for failure in refusals} == {Code.RESOURCE_EXHAUSTED}
        assert {info_of(failure).reason for failure in refusals} == {"OVERLOADED"}
        assert {retry_delay_s(failure) for failure in refusals} == {1.0}
        service.cluster.workers["p0"].may_go.set()
        await asyncio.gather(*readings)


async def test_a_full_router_refuses_before_the_message_is_there() -> None:
    async with serving(replace(CONFIG, settings=replace(CONFIG.settings, max_open_requests=1))) as service:
        service.cluster.workers["p0"].may_go.clear()
        reading = asyncio.create_task(read(service.inference.Generate(request())))
        await until(lambda: service.cluster.router.dispatcher.num_queued == 1)
        failure = await failure_of_unary(service.without_message(GENERATE))
        assert (failure.code(), retry_delay_s(failure)) == (Code.RESOURCE_EXHAUSTED, 1.0)
        assert failure.details() == "1 requests are open, the limit (router.max_open_requests)"
        assert service.num_refused("RESOURCE_EXHAUSTED") == 1
        # Others than Generate need no room.
        assert [model.name for model in (await service.inference.ListModels(pb.ListModelsRequest())).models] == ["fake"]
        service.cluster.workers["p0"].may_go.set()
        await reading


async def test_a_request_whose_room_went_while_it_was_on_its_way_is_refused_once() -> None:
    async with serving(replace(CONFIG, settings=replace(CONFIG.settings, max_open_requests=1))) as service:
        service.cluster.workers["p0"].may_go.clear()
        late = service.without_message(GENERATE)
        await until(lambda: service.server.num_arriving == 1)
        reading = asyncio.create_task(read(service.inference.Generate(request())))
        await until(lambda: service.cluster.router.dispatcher.num_queued == 1)
        await late.write(request().SerializeToString())
        await late.done_writing()
        failure = await failure_of_unary(late)
        assert (failure.code(), service.num_refused("RESOURCE_EXHAUSTED")) == (Code.RESOURCE_EXHAUSTED, 1)
        service.cluster.workers["p0"].may_go.set()
        await reading


@pytest.mark.parametrize("method", [GENERATE, "/baton.v1.Inference/Abort"])
async def test_messages_on_their_way_are_bounded(service: Service, method: str) -> None:
    """Each of them may take up 4 MiB of memory before anything is known of it."""
    calls = [service.without_message(method) for _ in range(MAX_ARRIVING)]
    await until(lambda: service.server.num_arriving == MAX_ARRIVING)
    failure = await failure_of(service.inference.Generate(request()))
    assert (failure.code(), retry_delay_s(failure)) == (Code.RESOURCE_EXHAUSTED, 1.0)
    assert failure.details() == "64 messages are on their way, the limit (fixed)"
    assert service.num_refused("RESOURCE_EXHAUSTED") == 1
    calls.pop().cancel()
    await until(lambda: service.server.num_arriving == MAX_ARRIVING - 1)
    assert await read(service.inference.Generate(request(max_tokens=2)))
    for call in calls:
        call.cancel()
    await until(lambda: service.server.num_arriving == 0)


async def test_a_message_that_is_too_large_is_refused(service: Service) -> None:
    async with grpc.aio.insecure_channel(service.addresses.public) as channel:
        failure = await failure_of(InferenceStub(channel).Generate(pb.GenerateRequest(text="x" * (5 << 20))))
    assert failure.code() == Code.RESOURCE_EXHAUSTED


async def test_a_bug_tells_nothing_of_itself_but_where_the_log_has_it(
    service: Service, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def prepare(*_: object) -> None:
        raise KeyError("a secret")

    with monkeypatch.context() as broken:
        broken.setattr("router.requests.prompt.encode", prepare)
        failure = await failure_of(service.inference.Generate(request()))
    assert failure.code() == Code.INTERNAL
    assert "secret" not in (failure.details() or "")
    (logged,) = (vars(record) for record in caplog.records if record.levelname == "ERROR")
    assert logged["incident"] == info_of(failure).metadata["incident"]
    assert logged["request_id"]
    assert "a secret" in str(logged["exc_info"][1])
    *chunks, _ = await read(service.inference.Generate(request(max_tokens=2)))
    assert [token for response in chunks for token in response.chunk.token_ids] == expected(2)


async def test_a_reader_that_stalls_is_told_and_let_go(caplog: pytest.LogCaptureFixture) -> None:
    bounds = replace(CONFIG.settings, max_stall_s=0.2, max_buffered_tokens=1 << 20)
    config = replace(CONFIG, model=replace(CONFIG.model, max_context_len=200_000), settings=bounds)
    async with serving(config) as service:
        for worker in service.cluster.workers.values():
            worker.num_logprobs = 2000
        call = service.inference.Generate(request(max_tokens=3900))
        stream = call.__aiter__()
        await anext(stream)
        await until(lambda: "has not read" in caplog.text)
        failure = await failure_of(stream)
        assert failure.details() == "the client has not read for 0.2 s, the limit (router.max_stall_s)"
        assert (failure.code(), info_of(failure).reason) == (Code.RESOURCE_EXHAUSTED, "OVERLOADED")


async def test_a_stall_that_is_seen_at_once_is_told_too(monkeypatch: pytest.MonkeyPatch) -> None:
    watch = inference.watch_reader

    async def watch_at_once(opened: OpenRequest, context: Any, _: float, writer: asyncio.Task[Any] | None) -> None:
        await opened.outbox.begun
        await asyncio.sleep(0)  # gRPC would be sending metadata now
        await watch(opened, context, 0.0, writer)

    monkeypatch.setattr(inference, "watch_reader", watch_at_once)
    async with serving() as service:
        async with asyncio.timeout(WAIT_S):  # a call whose end is not told waits for ever
            failure = await failure_of(service.inference.Generate(request(max_tokens=100)))
        assert (failure.code(), info_of(failure).reason) == (Code.RESOURCE_EXHAUSTED, "OVERLOADED")


async def test_health_is_told_on_both_ports(service: Service) -> None:
    for channel, name in ((service.public, "baton.v1.Inference"), (service.operator, "baton.v1.Cluster")):
        for asked in ("", name):
            answer = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(service=asked))
            assert answer.status == health_pb2.HealthCheckResponse.SERVING


async def test_health_can_be_watched(service: Service) -> None:
    call = health_pb2_grpc.HealthStub(service.public).Watch(health_pb2.HealthCheckRequest(), timeout=5)
    assert (await anext(call.__aiter__())).status == health_pb2.HealthCheckResponse.SERVING
    call.cancel()


async def test_services_are_reflected(service: Service) -> None:
    async def names(channel: grpc.aio.Channel, metadata: tuple[tuple[str, str], ...]) -> set[str]:
        asked = reflection_pb2.ServerReflectionRequest(list_services="")
        call = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo(iter([asked]), metadata=metadata)
        return {one.name async for answer in call for one in answer.list_services_response.service}

    assert "baton.v1.Inference" in await names(service.public, ())
    assert "baton.v1.Cluster" in await names(service.operator, TOKEN)


async def test_a_stop_ends_streams_with_unavailable(service: Service) -> None:
    service.cluster.workers["d0"].may_go.clear()
    failing = asyncio.create_task(failure_of(service.inference.Generate(request())))
    await until(lambda: service.cluster.workers["d0"].open_calls)
    await service.server.stop()
    failure = await failing
    assert (failure.code(), info_of(failure).reason) == (Code.UNAVAILABLE, "ROUTER_LEAVING")


async def test_a_port_in_use_is_a_matter_of_configuration(service: Service) -> None:
    port = int(service.addresses.public.rsplit(":", 1)[1])
    other = FakeCluster(replace(CONFIG, settings=replace(CONFIG.settings, grpc_port=port)))
    with pytest.raises(ConfigError, match=str(port)):
        await RouterServer(other.router).start()


async def test_the_operators_port_wants_the_token(service: Service) -> None:
    for metadata in ((), ((TOKEN_METADATA, "another"),)):
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await service.operate.GetStatus(cluster_pb2.GetStatusRequest(), metadata=metadata)
        assert refused.value.code() == Code.UNAUTHENTICATED
        assert info_of(refused.value).reason == "UNAUTHENTICATED"


async def test_the_public_port_does_not_operate(service: Service) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await ClusterStub(service.public).GetStatus(cluster_pb2.GetStatusRequest(), metadata=TOKEN)
    assert refused.value.code() == Code.UNIMPLEMENTED


async def test_status_is_gathered_from_the_workers(service: Service) -> None:
    await read(service.inference.Generate(request(max_tokens=2)))
    status = await service.operate.GetStatus(cluster_pb2.GetStatusRequest(check=True), metadata=TOKEN)
    assert (status.model, status.address) == ("fake", service.addresses.public)
    assert [(one.worker_id, one.role, one.state) for one in status.workers] == [
        ("p0", "prefill", "ready"),
        ("d0", "decode", "ready"),
    ]
    assert status_of("host", status.tiers).counts["holds"] == 1
    assert list(status.problems) == []


async def test_metrics_have_a_port_of_their_own_which_the_status_tells() -> None:
    async with serving(replace(CONFIG, settings=replace(CONFIG.settings, metrics_port=0))) as service:
        await read(service.inference.Generate(request(max_tokens=2)))
        await failure_of(service.inference.Generate(request(top_p=5.0)))
        status = await service.operate.GetStatus(cluster_pb2.GetStatusRequest(), metadata=TOKEN)
        text = await asyncio.to_thread(scrape, status.metrics_address)
        assert 'baton_requests_total{outcome="OK"} 1.0' in text
        assert 'baton_requests_total{outcome="INVALID_ARGUMENT"} 1.0' in text
        assert (status.prefix_cache.queries, tiers_from_pb(status.prefix_cache.hits)["host"]) == (
            len("hello, world"),
            1,
        )
        port = int(status.metrics_address.rpartition(":")[2])
        other = FakeCluster(replace(CONFIG, settings=replace(CONFIG.settings, metrics_port=port)))
        with pytest.raises(ConfigError, match=str(port)):
            await RouterServer(other.router).start()
    with pytest.raises(OSError, match="refused"):
        await asyncio.to_thread(scrape, status.metrics_address)


def scrape(address: str) -> str:
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=10) as response:
        return str(response.read().decode())


async def test_events_of_router_and_controller_stand_in_their_order(service: Service) -> None:
    watch, port = service.cluster.router.watch, service.cluster.port
    before = worker_pb2.WorkerStatus(blocks=worker_pb2.BlockCounts(total=1))
    before.tiers.add(tier="host", epoch="e1")
    watch.last = cluster_pb2.ClusterStatus(workers=[before])
    for worker in service.cluster.workers.values():
        worker.epoch = "e2"
    await port.worker_lost(WorkerId("d9"))
    await watch.read()
    status = await service.operate.GetStatus(cluster_pb2.GetStatusRequest(), metadata=TOKEN)
    assert [event.text.split()[0] for event in status.events] == ["the", "worker"]
    assert status.events[0].age_s > status.events[1].age_s == 0.0


async def test_each_worker_speaks_to_redis_for_itself(service: Service) -> None:
    for name, state, num_hits in (("p0", "up", 3), ("d0", "broken", 4)):
        redis = worker_pb2.TierStatus(state=state, counts={"hits": num_hits, "errors": num_hits, "written": 10})
        service.cluster.workers[name].redis = redis
    status = await service.operate.GetStatus(cluster_pb2.GetStatusRequest(), metadata=TOKEN)
    redis = status_of("redis", status.tiers)
    assert (redis.state, redis.counts["hits"], redis.counts["errors"]) == ("broken", 7, 7)
    assert redis.counts["written"] == 10, "by the node's service, of which both know"


@pytest.mark.parametrize("others", ["up", "off"])
async def test_a_full_redis_is_full_whatever_others_say(service: Service, others: str) -> None:
    for name, state in (("p0", "full"), ("d0", others)):
        service.cluster.workers[name].redis = worker_pb2.TierStatus(state=state, counts={"refused": 6})
    status = await service.operate.GetStatus(cluster_pb2.GetStatusRequest(), metadata=TOKEN)
    redis = status_of("redis", status.tiers)
    assert (redis.state, redis.counts["refused"]) == ("full", 6)


async def test_status_counts_requests_and_tells_of_problems(service: Service) -> None:
    for worker in service.cluster.workers.values():
        worker.may_go.clear()
    reading = asyncio.create_task(read(service.inference.Generate(request(max_tokens=2))))
    await until(lambda: service.cluster.workers["p0"].open_calls)
    service.cluster.workers["d0"].state = "broken"
    status = await service.operate.GetStatus(cluster_pb2.GetStatusRequest(check=True), metadata=TOKEN)
    assert (status.num_queued, status.num_running) == (1, 0)
    assert list(status.problems) == ["d0: a page is lost"]
    service.cluster.workers["d0"].state = "ready"
    for worker in service.cluster.workers.values():
        worker.may_go.set()
    await reading


async def test_a_lost_worker_shows_in_the_status(service: Service) -> None:
    service.cluster.transports["d0"].kill()
    service.cluster.router.membership.mark_lost(service.cluster.workers["d0"].worker_id)
    await until(lambda: service.cluster.port.lost)
    status = await service.operate.GetStatus(cluster_pb2.GetStatusRequest(), metadata=TOKEN)
    assert [(one.worker_id, one.state) for one in status.workers] == [("p0", "ready"), ("d0", "lost")]
    assert [event.text for event in status.events] == ["worker d0 lost"]
    assert len(status.problems) == 1


async def test_the_operator_probes_a_worker(service: Service) -> None:
    prompt = pb.TokenIds(ids=[7, 8, 9])
    asked = [cluster_pb2.ProbeRequest(worker_id=one, prompt=prompt, max_tokens=4) for one in ("p0", "d0")]
    by_prefill, by_decode = [await service.operate.Probe(one, metadata=TOKEN) for one in asked]
    assert len(by_prefill.token_ids) == len(by_decode.token_ids) == 4
    assert (by_prefill.timeline.prefill_worker, by_decode.timeline.prefill_worker) == ("p0", "")
    asked[0].worker_id = "p9"
    assert (await failure_of_unary(service.operate.Probe(asked[0], metadata=TOKEN))).code() is Code.NOT_FOUND


async def test_the_operator_reaches_the_controller(service: Service) -> None:
    scaled = await service.operate.Scale(cluster_pb2.ScaleRequest(decode=3), metadata=TOKEN)
    assert (scaled.prefill, scaled.decode) == (0, 3)
    await service.operate.Drain(cluster_pb2.DrainRequest(worker_id="d0"), metadata=TOKEN)
    assert service.cluster.port.drained == ["d0"]
    assert service.cluster.workers["d0"].state == "ready"  # only the controller knows whether it can be spared
    rolled = await service.operate.Roll(cluster_pb2.RollRequest(revision="{}"), metadata=TOKEN)
    assert (rolled.revision, service.cluster.port.rolled) == (1, ["{}"])
    await service.operate.Shutdown(cluster_pb2.ShutdownRequest(), metadata=TOKEN)
    assert service.cluster.port.is_shut_down
    status = await service.operate.GetStatus(cluster_pb2.GetStatusRequest(), metadata=TOKEN)
    assert list(status.problems) == ["the controller is shut down"]


def test_names_and_numbers_that_requests_reserve_pair() -> None:
    assert reserved_names(pb.GenerateRequest) == {
        7: "adapter",
        8: "cache_salt",
    }
    assert reserved_names(pb.SamplingParams) == {}


def chat(*contents: str, **sampling: Any) -> pb.GenerateRequest:
    messages = [pb.Message(role="user", content=content) for content in contents]
    return pb.GenerateRequest(
        messages=pb.Conversation(messages=messages), sampling_params=pb.SamplingParams(seed=1, **sampling)
    )


async def test_a_chat_is_answered_as_its_rendered_text_is(service: Service) -> None:
    rendered = pb.GenerateRequest(text="user: a\nuser: b\nassistant:", sampling_params=pb.SamplingParams(seed=1))
    chatted, plain = [await read(service.inference.Generate(request)) for request in (chat("a", "b"), rendered)]
    tokens, expected = ([token for one in answer for token in one.chunk.token_ids] for answer in (chatted, plain))
    assert tokens == expected
    assert "".join(one.chunk.text for one in chatted) == "".join(one.chunk.text for one in plain)
    assert "router.render" in [span.name for span in chatted[-1].complete.timeline.spans]


@pytest.mark.parametrize("role", ["", "User", "root", "user\n"])
async def test_a_role_that_is_none(service: Service, role: str) -> None:
    messages = pb.Conversation(messages=[pb.Message(role=role, content="a")])
    failure = await failure_of(service.inference.Generate(pb.GenerateRequest(messages=messages)))
    assert (failure.code(), (failure.details() or "")[:9]) == (Code.INVALID_ARGUMENT, "messages:")


async def test_a_chat_without_messages(service: Service) -> None:
    failure = await failure_of(service.inference.Generate(chat()))
    assert failure.details() == "messages: must not be empty"


async def test_a_model_without_a_template_takes_no_chat() -> None:
    renderer = NoRenderer()
    with pytest.raises(Unsupported, match="no chat template"):
        await renderer.render(Chat(()), 0)


async def test_a_text_and_its_tokens(service: Service) -> None:
    answer = await service.inference.Tokenize(pb.TokenizeRequest(text="h€"))
    assert (list(answer.token_ids), b"".join(answer.tokens)) == (list("h€".encode()), "h€".encode())
    assert (await service.inference.Detokenize(pb.DetokenizeRequest(token_ids=answer.token_ids))).text == "h€"
    rendered = await service.inference.Tokenize(pb.TokenizeRequest(messages=chat("a").messages))
    assert bytes(rendered.token_ids) == b"user: a\nassistant:"


@pytest.mark.parametrize(
    ("message", "param"),
    [
        (pb.TokenizeRequest(), "prompt"),
        (pb.TokenizeRequest(messages=pb.Conversation()), "messages"),
        (pb.TokenizeRequest(text=LONG), "prompt"),
        (pb.DetokenizeRequest(token_ids=[300]), "token_ids"),
        (pb.DetokenizeRequest(token_ids=[1] * 2001), "token_ids"),
    ],
)
async def test_texts_and_tokens_that_are_refused(service: Service, message: Any, param: str) -> None:
    method = service.inference.Tokenize if isinstance(message, pb.TokenizeRequest) else service.inference.Detokenize
    failure = await failure_of_unary(method(message))
    assert (failure.code(), (failure.details() or "").partition(":")[0]) == (Code.INVALID_ARGUMENT, param)


async def test_texts_of_tokens_come_with_logprobs(service: Service) -> None:
    for worker in service.cluster.workers.values():
        worker.num_logprobs = 1
    responses = await read(service.inference.Generate(request(logprobs=1)))
    logprobs = [one for response in responses for one in response.chunk.logprobs]
    assert logprobs
    assert all(one.token == bytes([one.token_id]) for one in logprobs if one.token_id < 256)


async def whole(service: Service) -> None:
    await read(service.inference.Generate(request(max_tokens=4)))


async def refused_before_it_is_tokenized(service: Service) -> None:
    failure = await failure_of(service.inference.Generate(pb.GenerateRequest(text=LONG)))
    assert "at least" in (failure.details() or "")


async def refused_once_it_is_tokenized(service: Service) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ByteTokenizer, "min_tokens", lambda *_: 0)
        assert "at least" not in (
            (await failure_of(service.inference.Generate(pb.GenerateRequest(text=LONG)))).details() or ""
        )


async def cancelled_by_the_client(service: Service) -> None:
    call = await until_it_decodes(service)
    call.cancel()


async def stopped_by_an_abort(service: Service) -> None:
    call = await until_it_decodes(service, request_id="mine")
    await service.inference.Abort(pb.AbortRequest(request_id="mine"))
    await failure_of(call)


async def until_it_decodes(service: Service, **fields: Any) -> Any:
    worker = service.cluster.workers["d0"]
    worker.may_go.clear()
    message = request()
    message.MergeFrom(pb.GenerateRequest(**fields))
    call = service.inference.Generate(message)
    await until(lambda: worker.open_calls)
    return call


ENDS = [
    whole,
    refused_before_it_is_tokenized,
    refused_once_it_is_tokenized,
    cancelled_by_the_client,
    stopped_by_an_abort,
]


@pytest.mark.parametrize("end", ENDS, ids=lambda end: end.__name__)
async def test_nothing_of_a_request_waits_for_the_garbage_collector(
    service: Service, end: Callable[[Service], Awaitable[None]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It looks seldom, and texts of megabytes would add up to gigabytes until then."""
    requests: list[weakref.ref[ValidRequest]] = []

    def validated(*arguments: Any) -> ValidRequest:
        valid = validate(*arguments)
        requests.append(weakref.ref(valid))
        return valid

    monkeypatch.setattr("router.requests.dispatch.validate", validated)
    gc.disable()
    try:
        await end(service)
        await until(lambda: not [one for one in requests if one() is not None])
    finally:
        gc.enable()
    assert len(requests) == 1


async def test_the_operators_port_stays_on_this_machine_wherever_clients_connect() -> None:
    async with serving(replace(CONFIG, settings=replace(CONFIG.settings, host="127.0.0.2", metrics_port=0))) as service:
        told = service.addresses
        hosts = [address.rpartition(":")[0] for address in (told.public, told.operator, told.metrics)]
    assert hosts == ["127.0.0.2", "127.0.0.1", "127.0.0.2"]
