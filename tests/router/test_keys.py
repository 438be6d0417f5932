"""Keys at the router's ports, over real gRPC and HTTP: a call without a valid one gets nothing."""

import asyncio
import urllib.error
import urllib.request
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from router.workers.controller_port import SizedPool
from tests.harness.cluster import until
from tests.harness.fake_cluster import CONFIG, expected, request
from tests.router.test_router_api import TOKEN, Service, failure_of, failure_of_unary, info_of, read, serving
from tests.wire.test_key_ring import WRONG
from wire.load.fairness import BURST
from wire.pb import cluster_pb2, inference_pb2, worker_pb2
from wire.pb import inference_pb2 as pb
from wire.pools import Role
from wire.rpc import TOKEN_METADATA
from wire.trust.key_ring import Allowance, KeyList, Scope, make_key

ACME, ACME_TEXT = make_key("acme", [Scope.GENERATE], Allowance())
BETA, BETA_TEXT = make_key("beta", [Scope.GENERATE], Allowance())
WATCHER, WATCHER_TEXT = make_key("beta", [Scope.METRICS], Allowance())
OPERATOR, OPERATOR_TEXT = make_key("ops", [Scope.OPERATE], Allowance())
PLAIN, PLAIN_TEXT = make_key("default", [Scope.GENERATE], Allowance())
LISTED = KeyList((ACME, BETA, WATCHER, OPERATOR, PLAIN))
REFLECTION = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"
SENDABLE = {name: shown for name, shown in WRONG.items() if all(one.isascii() and one.isprintable() for one in shown)}
Metadata = tuple[tuple[str, str], ...]


def shows(text: str) -> Metadata:
    return (("authorization", f"Bearer {text}"),)


def methods(*modules: Any) -> list[str]:
    services = [service for module in modules for service in module.DESCRIPTOR.services_by_name.values()]
    return [f"/{service.full_name}/{method.name}" for service in services for method in service.methods]


@pytest.fixture
async def service() -> AsyncIterator[Service]:
    async with serving(replace(CONFIG, keys=LISTED, settings=replace(CONFIG.settings, metrics_port=0))) as service:
        yield service


async def refusal(channel: Any, method: str, metadata: Metadata) -> grpc.aio.AioRpcError:
    return await failure_of_unary(channel.unary_unary(method)(b"", metadata=metadata, timeout=10.0))


@pytest.mark.parametrize("shown", SENDABLE)
async def test_without_a_valid_key_no_method_of_the_public_port_answers(service: Service, shown: str) -> None:
    metadata = tuple(("authorization", one[:8000]) for one in SENDABLE[shown])
    told = set()
    for method in [*methods(inference_pb2), REFLECTION, "/baton.v1.Inference/Unknown", *methods(cluster_pb2)]:
        failure = await refusal(service.public, method, metadata)
        assert (failure.code(), info_of(failure).reason) == (grpc.StatusCode.UNAUTHENTICATED, "UNAUTHENTICATED"), method
        told.add(failure.details())
    assert told == {"a valid key is wanted, as `authorization: Bearer KEY`"}
    assert not any(one.prefills or one.decodes for one in service.cluster.workers.values())


async def test_health_wants_no_key(service: Service) -> None:
    for channel in (service.public, service.operator):
        answer = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
        assert answer.status == health_pb2.HealthCheckResponse.SERVING


async def test_a_key_without_the_scope(service: Service) -> None:
    for text in (WATCHER_TEXT, OPERATOR_TEXT):
        failure = await failure_of(service.inference.Generate(request(max_tokens=3), metadata=shows(text)))
        assert (failure.code(), info_of(failure).reason) == (grpc.StatusCode.PERMISSION_DENIED, "PERMISSION_DENIED")


async def test_a_valid_key_is_served(service: Service) -> None:
    responses = await read(service.inference.Generate(request(max_tokens=3), metadata=shows(ACME_TEXT)))
    assert [one for response in responses for one in response.chunk.token_ids] == expected(3)
    models = await service.inference.ListModels(pb.ListModelsRequest(), metadata=shows(ACME_TEXT))
    assert models.models[0].name == "fake"


async def test_the_operators_port_wants_its_token_or_a_key_that_operates(service: Service) -> None:
    asked = cluster_pb2.GetStatusRequest()
    for metadata in (TOKEN, shows(OPERATOR_TEXT)):
        assert (await service.operate.GetStatus(asked, metadata=metadata)).model == "fake"
    wrong: list[tuple[Metadata, grpc.StatusCode]] = [
        ((), grpc.StatusCode.UNAUTHENTICATED),
        (((TOKEN_METADATA, ""),), grpc.StatusCode.UNAUTHENTICATED),
        (shows(OPERATOR_TEXT[:-1]), grpc.StatusCode.UNAUTHENTICATED),
        (shows(ACME_TEXT), grpc.StatusCode.PERMISSION_DENIED),
    ]
    for metadata, code in wrong:
        for method in [*methods(cluster_pb2), REFLECTION]:
            assert (await refusal(service.operator, method, metadata)).code() is code
    await service.operate.ReloadKeys(cluster_pb2.ReloadKeysRequest(), metadata=TOKEN)
    assert service.cluster.port.num_reloads == 1


async def test_what_is_wrong_at_the_controller_is_a_problem_of_the_cluster(service: Service) -> None:
    service.cluster.port.problems = ("the file of keys is damaged",)
    status = await service.operate.GetStatus(cluster_pb2.GetStatusRequest(), metadata=TOKEN)
    assert "the file of keys is damaged" in status.problems


async def test_the_status_of_a_pool_has_its_limit_and_its_last_order(service: Service) -> None:
    service.cluster.port.sized = (SizedPool(Role.DECODE, "slo.itl_ms 50", "decode 1 to 2: 900 tokens/s", 7.5),)
    status = await service.operate.GetStatus(cluster_pb2.GetStatusRequest(), metadata=TOKEN)
    told = {pool.role: (pool.limit, pool.last_order, pool.last_order_age_s) for pool in status.pools}
    assert told == {"prefill": ("", "", 0.0), "decode": ("slo.itl_ms 50", "decode 1 to 2: 900 tokens/s", 7.5)}


@pytest.mark.parametrize(
    ("text", "status"),
    [("", 401), (ACME_TEXT, 403), (WATCHER_TEXT[:-1], 401), (WATCHER_TEXT, 200)],
    ids=["none", "another scope", "damaged", "right"],
)
async def test_metrics_want_a_key_with_their_scope(service: Service, text: str, status: int) -> None:
    headers = {"authorization": f"Bearer {text}"} if text else {}
    asked = urllib.request.Request(f"http://{service.addresses.metrics}/metrics", headers=headers)

    def scrape() -> tuple[int, bytes]:
        try:
            with urllib.request.urlopen(asked, timeout=10) as answer:
                return answer.status, answer.read()
        except urllib.error.HTTPError as refused:
            with refused:
                return refused.code, (refused.headers["www-authenticate"] or "").encode()

    code, body = await asyncio.to_thread(scrape)
    assert code == status
    assert b"baton_" in body or (body == b"Bearer" and status != 200)


async def test_a_request_id_is_its_tenants_own(service: Service) -> None:
    service.cluster.workers["d0"].may_go.clear()
    asked = request(max_tokens=2)
    asked.request_id = "same"
    calls = {text: service.inference.Generate(asked, metadata=shows(text)) for text in (ACME_TEXT, BETA_TEXT)}
    firsts = {text: await anext(aiter(call)) for text, call in calls.items()}
    assert {first.request_id for first in firsts.values()} == {"same"}
    unknown = await failure_of_unary(
        service.inference.Abort(pb.AbortRequest(request_id="other"), metadata=shows(ACME_TEXT))
    )
    await service.inference.Abort(pb.AbortRequest(request_id="same"), metadata=shows(BETA_TEXT))
    failure = await failure_of(calls[BETA_TEXT])
    assert failure.code() is grpc.StatusCode.CANCELLED
    again = await failure_of_unary(
        service.inference.Abort(pb.AbortRequest(request_id="same"), metadata=shows(BETA_TEXT))
    )
    by_name = await failure_of_unary(
        service.inference.Abort(pb.AbortRequest(request_id="acme/same"), metadata=shows(PLAIN_TEXT))
    )
    told = {(one.code(), one.details(), str(info_of(one))) for one in (unknown, again, by_name)}
    assert len(told) == 1, "the id of another tenant is as unknown as one of nobody"
    service.cluster.workers["d0"].may_go.set()
    assert (await read(calls[ACME_TEXT]))[-1].WhichOneof("event") == "complete"


async def test_a_stream_that_is_open_outlives_its_key(service: Service) -> None:
    service.cluster.workers["d0"].may_go.clear()
    call = service.inference.Generate(request(max_tokens=3), metadata=shows(ACME_TEXT))
    await anext(aiter(call))
    service.cluster.router.keys.replace(KeyList((replace(ACME, is_revoked=True), BETA)))
    failure = await failure_of(service.inference.Generate(request(max_tokens=3), metadata=shows(ACME_TEXT)))
    assert failure.code() is grpc.StatusCode.UNAUTHENTICATED
    service.cluster.workers["d0"].may_go.set()
    assert (await read(call))[-1].WhichOneof("event") == "complete"


async def test_a_tenant_that_fills_the_router_leaves_others_their_part() -> None:
    config = replace(CONFIG, keys=LISTED, settings=replace(CONFIG.settings, max_open_requests=2))
    async with serving(config) as service:
        dispatcher = service.cluster.router.dispatcher
        service.cluster.workers["p0"].may_go.clear()
        readings = []
        for text in (ACME_TEXT, ACME_TEXT, BETA_TEXT):
            call = service.inference.Generate(request(max_tokens=3), metadata=shows(text))
            readings.append(asyncio.create_task(read(call)))
            await until(lambda: dispatcher.num_queued == len(readings))
        for text in (ACME_TEXT, BETA_TEXT):
            failure = await failure_of(service.inference.Generate(request(max_tokens=3), metadata=shows(text)))
            assert failure.details() == "2 requests are open, the limit (router.max_open_requests)"
        service.cluster.workers["p0"].may_go.set()
        for responses in await asyncio.gather(*readings):
            assert responses[-1].WhichOneof("event") == "complete"


async def test_a_tenant_whose_stream_goes_on_saves_no_more_than_an_idle_one(service: Service) -> None:
    router, workers = service.cluster.router, service.cluster.workers
    shares = router.shares
    workers["d0"].may_go.clear()
    stream = service.inference.Generate(request(max_tokens=3), metadata=shows(ACME_TEXT))
    await anext(aiter(stream))
    workers["p0"].may_go.clear()
    readings = []
    for text, tenant in ((BETA_TEXT, "beta"), (ACME_TEXT, "acme")):
        call = service.inference.Generate(request(max_tokens=3), metadata=shows(text))
        readings.append(asyncio.create_task(read(call)))
        await until(lambda: router.dispatcher.num_queued == len(readings))
        shares.charge(tenant, 10 * BURST)
    ahead = shares.spent("beta") + 9 * BURST
    assert ahead <= shares.spent("acme") < ahead + 100, "it began a burst below the other"
    for worker in workers.values():
        worker.may_go.set()
    for responses in await asyncio.gather(*readings, read(stream)):
        assert responses[-1].WhichOneof("event") == "complete"


def test_the_workers_service_is_not_at_these_ports() -> None:
    assert methods(worker_pb2) == ["/baton.v1.Worker/Connect"]


async def test_the_services_that_were_walked_are_all_there_are(service: Service) -> None:
    asked = reflection_pb2.ServerReflectionRequest(list_services="")
    for channel, metadata, own in (
        (service.public, shows(ACME_TEXT), "baton.v1.Inference"),
        (service.operator, TOKEN, "baton.v1.Cluster"),
    ):
        stub = reflection_pb2_grpc.ServerReflectionStub(channel)
        [answer] = [one async for one in stub.ServerReflectionInfo(iter([asked]), metadata=metadata)]
        named = {one.name for one in answer.list_services_response.service}
        assert named == {own, "grpc.health.v1.Health", "grpc.reflection.v1alpha.ServerReflection"}


async def test_the_operator_ends_a_request_of_any_tenant(service: Service) -> None:
    service.cluster.workers["d0"].may_go.clear()
    asked = request(max_tokens=2)
    asked.request_id = "same"
    call = service.inference.Generate(asked, metadata=shows(ACME_TEXT))
    await anext(aiter(call))
    operator = shows(OPERATOR_TEXT)
    for name in ("same", "beta/same", "", "acme/same\n"):
        unknown = await failure_of_unary(service.operate.Abort(pb.AbortRequest(request_id=name), metadata=operator))
        assert unknown.code() is grpc.StatusCode.NOT_FOUND
    await service.operate.Abort(pb.AbortRequest(request_id="acme/same"), metadata=operator)
    failure = await failure_of(call)
    assert (failure.code(), failure.details()) == (grpc.StatusCode.CANCELLED, "the operator aborted the request")
    assert not service.cluster.router.dispatcher.num_running
