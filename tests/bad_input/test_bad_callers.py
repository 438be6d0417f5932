"""Whoever is not of the cluster, at the ports of workers and operator; and what even the cluster may not say there."""

import asyncio
import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, cast

import grpc.aio
import pytest

from tests.bad_input.ports import GENERATE, MAX_CALL_S, Metadata, Ports
from tests.bad_input.raw_http2 import raw_http2
from tests.harness.assembled_worker import TOKEN
from wire.convert import error_from_pb, sampling_to_pb
from wire.errors import InvalidRequest
from wire.pb import inference_pb2, worker_pb2
from wire.rpc import NONCE_METADATA, TOKEN_METADATA, first_of_line
from wire.sampling import SamplingParams
from wire.trust.identity import NONCE_BYTES

pytestmark = pytest.mark.asyncio(loop_scope="module")

GET_STATUS = "/baton.v1.Cluster/GetStatus"
CONNECT = "/baton.v1.Worker/Connect"
NONCE = b"n" * NONCE_BYTES
GREEDY = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
REFLECT = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"
GUARDED = {
    "operator": [f"/baton.v1.Cluster/{name}" for name in ("GetStatus", "Scale", "Drain", "Shutdown", "Unknown")]
    + [REFLECT, GENERATE],
    "p0": [CONNECT, "/baton.v1.Worker/Unknown"],
    "d0": [CONNECT, REFLECT],
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
    for method in (GET_STATUS, CONNECT, "/grpc.channelz.v1.Channelz/GetServers", "/envoy.admin.v3/x"):
        assert (await ports.refusal("public", method, b"")).code == "UNIMPLEMENTED"
    await ports.require_unharmed()


def begin(
    prompt: Sequence[int] = range(1, 101),
    sampling: SamplingParams = GREEDY,
    outputs: Sequence[Sequence[int]] = ((),),
    attempt: int = 1,
) -> worker_pb2.Begin:
    return worker_pb2.Begin(
        id=f"r/{attempt}",
        namespace_root=bytes(32),
        prompt=inference_pb2.TokenIds(ids=prompt),
        sampling_params=sampling_to_pb(sampling),
        choices=[
            worker_pb2.UnfinishedChoice(index=index, output=inference_pb2.TokenIds(ids=output))
            for index, output in enumerate(outputs)
        ],
        time_left_s=20.0,
    )


def spoilt(**fields: Any) -> worker_pb2.Begin:
    """A Begin with these fields added, or put in the place of what was there."""
    spoilt = begin()
    spoilt.MergeFrom(worker_pb2.Begin(**fields))
    return spoilt


WRONG = {
    "nothing": worker_pb2.Begin(),
    "no request id": worker_pb2.Begin(prompt=begin().prompt),
    "no prompt": begin(prompt=()),
    "no choices": begin(outputs=()),
    "seventeen choices": begin(outputs=((),) * 17),
    "a choice that comes twice": spoilt(choices=[worker_pb2.UnfinishedChoice(index=0)]),
    "a choice of too high a number": spoilt(choices=[worker_pb2.UnfinishedChoice(index=2**31)]),
    "a token of the prompt beyond the vocabulary": begin(prompt=(1, 301)),
    "a token of the output beyond the vocabulary": begin(outputs=((301,),)),
    "more than the context": begin(sampling=replace(GREEDY, max_tokens=1 << 40)),
    "a root of other length": spoilt(namespace_root=b"abc"),
    "number 0": begin(attempt=0),
    "choice 77 of one": spoilt(choices=[worker_pb2.UnfinishedChoice(index=77)]),
    "n of 2^31 - 1": begin(sampling=replace(GREEDY, n=2**31 - 1)),
    "a temperature that is no number": begin(sampling=replace(GREEDY, temperature=math.nan)),
    "a deadline that is no number": spoilt(time_left_s=math.nan),
}


async def line_to(ports: Ports, worker: str) -> grpc.aio.StreamStreamCall[bytes, bytes]:
    """A line of bytes, on which the token is proven."""
    connect: grpc.aio.StreamStreamMultiCallable[bytes, bytes] = ports.channels[worker].stream_stream(CONNECT)
    line = connect(metadata=((NONCE_METADATA, NONCE),), timeout=MAX_CALL_S)
    await line.write((await first_of_line(line, TOKEN, NONCE)).SerializeToString())
    return line


async def end_of(ports: Ports, worker: str, *requests: worker_pb2.ConnectRequest) -> worker_pb2.End:
    """What a worker says at the end of the attempt that these orders begin, on a line of their own."""
    connect = await line_to(ports, worker)
    for request in requests:
        await connect.write(request.SerializeToString())
    async for response in connect:
        for update in worker_pb2.ConnectResponse.FromString(response).updates:
            if update.HasField("end"):
                connect.cancel()
                end: worker_pb2.End = update.end
                return end
    raise AssertionError("the line ended before the attempt")


@pytest.mark.parametrize("what", WRONG)
@pytest.mark.parametrize("worker", ["p0", "d0"])
async def test_what_would_upset_an_engine_is_refused(ports: Ports, worker: str, what: str) -> None:
    end = await end_of(ports, worker, worker_pb2.ConnectRequest(begins=[WRONG[what]]))
    error = error_from_pb(end.error)
    assert type(error) is InvalidRequest
    assert len(error.message) < 200
    await ports.require_unharmed()


async def test_a_line_outlives_the_attempts_that_it_refuses(ports: Ports) -> None:
    good = spoilt(id="good/2")
    orders = worker_pb2.ConnectRequest(begins=[*WRONG.values(), good])
    async with asyncio.timeout(MAX_CALL_S):
        connect = await line_to(ports, "d0")
        await connect.write(orders.SerializeToString())
        ends: dict[str, worker_pb2.End] = {}
        while not {"r/1", "good/2"} <= set(ends):
            response = worker_pb2.ConnectResponse.FromString(cast(bytes, await connect.read()))
            ends |= {one.id: one.end for one in response.updates if one.HasField("end")}
    connect.cancel()
    assert type(error_from_pb(ends["r/1"].error)) is InvalidRequest
    assert not ends["good/2"].HasField("error")
    await ports.require_unharmed()


@pytest.mark.parametrize("data", [b"\xff\xff\xff", b"\x0a\x02\xff\xfe"], ids=["no message", "an id that is not UTF-8"])
async def test_a_begin_in_pieces_that_make_no_message_is_refused(ports: Ports, data: bytes) -> None:
    piece = worker_pb2.BeginPart(id="r/1", data=data, last=True)
    end = await end_of(ports, "d0", worker_pb2.ConnectRequest(piece=piece))
    assert type(error_from_pb(end.error)) is InvalidRequest
    await ports.require_unharmed()


@pytest.mark.parametrize("data", [b"\xff\xff\xff", b"\x0a\x04\x0a\x02\xff\xfe"], ids=["no message", "not UTF-8"])
async def test_bytes_that_are_no_order_end_the_line_and_what_was_begun_on_it(ports: Ports, data: bytes) -> None:
    connect = await line_to(ports, "d0")
    await connect.write(worker_pb2.ConnectRequest(begins=[begin()]).SerializeToString())
    await connect.write(data)
    with suppress(grpc.aio.AioRpcError):
        while await connect.read() is not grpc.aio.EOF:
            pass
    assert "DecodeError" not in (await connect.details() or "")
    await ports.require_unharmed()


async def test_releasing_holds_that_are_not_there_does_nothing(ports: Ports) -> None:
    attempts = ("nobody's", "", "x" * 10_000)
    orders = worker_pb2.ConnectRequest(renewals=attempts, releases=attempts, aborts=attempts, begins=[begin()])
    assert not (await end_of(ports, "d0", orders)).HasField("error")
    await ports.require_unharmed()
