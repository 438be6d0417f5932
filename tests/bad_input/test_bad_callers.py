"""Whoever is not of the cluster, at the ports of workers and operator; and what even the cluster may not say there."""

import math
from dataclasses import replace
from typing import Any

import pytest

from tests.bad_input.ports import CLUSTER_TOKEN, GENERATE, Metadata, Ports
from tests.bad_input.raw_http2 import raw_http2
from tests.local_worker import TOKEN
from tests.worker.workers import decode_request, greedy, prefill_request
from wire.pb import worker_pb2
from wire.rpc import TOKEN_METADATA

pytestmark = pytest.mark.asyncio(loop_scope="module")

GET_STATUS = "/baton.v1.Cluster/GetStatus"
PREFILL, DECODE = "/baton.v1.Worker/Prefill", "/baton.v1.Worker/Decode"
REFLECT = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"
GUARDED = {
    "operator": [f"/baton.v1.Cluster/{name}" for name in ("GetStatus", "Scale", "Drain", "Shutdown", "Unknown")]
    + [REFLECT, GENERATE],
    "p0": [f"/baton.v1.Worker/{name}" for name in ("GetInfo", "GetStatus", "Renew", "Release", "StartDrain")]
    + [PREFILL],
    "d0": [DECODE, PREFILL, REFLECT],
}
WRONG_TOKENS: dict[str, Metadata] = {
    "none": (),
    "empty": ((TOKEN_METADATA, ""),),
    "another": ((TOKEN_METADATA, "another's"),),
    "cut": ((TOKEN_METADATA, TOKEN[:-1]),),
    "longer": ((TOKEN_METADATA, TOKEN + "x"),),
    "of 8 KiB": ((TOKEN_METADATA, "t" * (8 << 10)),),
    "right, then wrong": ((TOKEN_METADATA, TOKEN), (TOKEN_METADATA, "another's")),
    "as bytes": ((f"{TOKEN_METADATA}-bin", TOKEN.encode()),),
    "as a bearer": (("authorization", f"Bearer {TOKEN}"),),
}


@pytest.mark.parametrize("port", GUARDED)
@pytest.mark.parametrize("token", WRONG_TOKENS)
async def test_without_the_clusters_token_nothing_is_said(ports: Ports, port: str, token: str) -> None:
    for method in GUARDED[port]:
        refusal = await ports.refusal(port, method, b"", WRONG_TOKENS[token])
        assert (refusal.code, refusal.reason) == ("UNAUTHENTICATED", "UNAUTHENTICATED"), method
        refusal.require_discreet()
    await ports.require_unharmed()


async def test_the_token_is_asked_for_before_the_message_is_there(ports: Ports) -> None:
    async with raw_http2(ports.addresses["operator"]) as connection:
        connection.begin_http2()
        connection.begin_call(GET_STATUS)
        assert await connection.answer() == "UNAUTHENTICATED"
    await ports.require_unharmed()


@pytest.mark.parametrize("token", [b"\xff\xfe", b"a\nb", b"\x00"], ids=["not ASCII", "line end", "NUL"])
async def test_a_token_of_strange_bytes_is_none(ports: Ports, token: bytes) -> None:
    async with raw_http2(ports.addresses["operator"]) as connection:
        connection.begin_http2()
        connection.begin_call(GET_STATUS, [(TOKEN_METADATA, token)])
        assert await connection.answer() in ("UNAUTHENTICATED", "INTERNAL")
    await ports.require_unharmed()


async def test_the_token_does_not_open_at_the_public_port_what_is_not_there(ports: Ports) -> None:
    for method in (GET_STATUS, DECODE, PREFILL, "/grpc.channelz.v1.Channelz/GetServers", "/envoy.admin.v3/x"):
        assert (await ports.refusal("public", method, b"")).code == "UNIMPLEMENTED"
    await ports.require_unharmed()


FOR_DECODE = {
    "nothing": b"",
    "bytes that are no message": b"\xff\xff\xff",
    "an id that is not UTF-8": b"\x0a\x02\xff\xfe",
    "no request id": decode_request(request_id="").SerializeToString(),
    "no prompt": decode_request(prompt=()).SerializeToString(),
    "no choices": decode_request(outputs=()).SerializeToString(),
    "seventeen choices": decode_request(outputs=((),) * 17).SerializeToString(),
    "a choice that comes twice": decode_request(outputs=((),)).SerializeToString() + b"\x32\x00",
    "a token of the prompt beyond the vocabulary": decode_request(prompt=(1, 301)).SerializeToString(),
    "a token of the output beyond the vocabulary": decode_request(outputs=((301,),)).SerializeToString(),
    "more than the context": decode_request(sampling=greedy(1 << 40)).SerializeToString(),
    "a root of other length": decode_request().SerializeToString() + b"\x1a\x03abc",
}


@pytest.mark.parametrize("what", FOR_DECODE)
async def test_what_would_upset_an_engine_is_refused(ports: Ports, what: str) -> None:
    refusal = await ports.refusal("d0", DECODE, FOR_DECODE[what])
    assert (refusal.code, refusal.reason) == ("INVALID_ARGUMENT", "INVALID_REQUEST")
    refusal.require_discreet()
    await ports.require_unharmed()


async def test_choices_without_number_are_refused_before_they_are_made(ports: Ports) -> None:
    for n in (0, -1, 17, 2**31 - 1):
        refusal = await ports.refusal("p0", PREFILL, prefill_request(sampling=greedy(4, n=n)).SerializeToString())
        assert (refusal.code, refusal.param) == ("INVALID_ARGUMENT", "n")
    await ports.require_unharmed()


@pytest.mark.parametrize("setting", ["temperature", "top_p", "repetition_penalty"])
async def test_a_setting_that_is_no_number_harms_but_its_request(ports: Ports, setting: str) -> None:
    settings: dict[str, Any] = {"temperature": 1.0, setting: math.nan}
    message = decode_request(sampling=replace(greedy(4), **settings)).SerializeToString()
    call = ports.channels["d0"].unary_stream(DECODE, bytes, bytes)(message, metadata=CLUSTER_TOKEN, timeout=20)
    assert [one async for one in call]
    await ports.require_unharmed()


async def test_a_worker_serves_its_role_only(ports: Ports) -> None:
    assert (await ports.refusal("d0", PREFILL, prefill_request().SerializeToString())).code == "UNIMPLEMENTED"
    assert (await ports.refusal("p0", DECODE, decode_request().SerializeToString())).code == "UNIMPLEMENTED"
    await ports.require_unharmed()


async def test_releasing_holds_that_are_not_there_does_nothing(ports: Ports) -> None:
    message = worker_pb2.ReleaseRequest(request_ids=["nobody's", "", "x" * 10_000]).SerializeToString()
    for method in ("Renew", "Release"):
        call = ports.channels["d0"].unary_unary(f"/baton.v1.Worker/{method}", bytes, bytes)
        assert await call(message, metadata=CLUSTER_TOKEN, timeout=20) == b""
    await ports.require_unharmed()
