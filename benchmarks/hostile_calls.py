"""Rough calls to the ports of a cluster: messages, orders and bytes that no client of ours would send."""

import asyncio
import random
import struct
import time
from collections.abc import AsyncIterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import grpc.aio

from benchmarks.baton_service import BatonService
from deploy.controller.pools import Pools
from tests.bad_input import test_bad_requests, test_bad_transport
from tests.bad_input.ports import GENERATE, GOOD
from tests.bad_input.raw_http2 import Frame, raw_http2
from tests.bad_input.test_bad_callers import CONNECT, WRONG
from tests.bad_input.test_bad_requests import message
from tests.harness.answer import ask
from wire.convert import error_from_pb
from wire.pb import worker_pb2
from wire.rpc import CHANNEL_OPTIONS, TOKEN_METADATA

_TIMEOUT_S = 60.0
_AT_ONCE_S = 10.0
"""A refusal takes milliseconds, on a machine that does nothing else."""
_NUM_FLOODING = 12
_EMOJI = message(text="\N{GRINNING FACE}" * ((1 << 20) - 64))
_OF_ANY_MODEL = {2, 5, 6, 14, 31, 32, 33, 34, 44, 45, 46, 49, 50, 54, 60, 64}
"""Numbers of the kinds of bad input that are bad whatever the model."""
_ORDERS = {
    "an unknown field": ("Scale", b"\xfa\x3e\x03abc"),
    "another wire type": ("Scale", b"\x12\x01x"),
    "65 workers": ("Scale", b"\x10\x41"),
    "no message": ("GetStatus", b"\xff\xff"),
    "an unknown field of a status": ("GetStatus", b"\xfa\x3e\x03abc"),
    "a worker that is not UTF-8": ("Drain", b"\x0a\x02\xff\xfe"),
}
_NUM_RESETS = 1000
_LONG = ask(range(40), 300, n=4, ignore_eos=True)


@dataclass(frozen=True)
class Answer:
    """An answer in a word or two. problem: how it differs from what was expected; empty where it does not."""

    got: str
    problem: str = ""

    @classmethod
    def of(cls, what: str, got: str, *expected: str) -> "Answer":
        """expected: any of them is right."""
        return cls(got, "" if got in expected else f"{what}: {got}, not {' or '.join(expected)}")


async def flood_with_emoji(service: BatonService, rng: random.Random) -> list[Answer]:
    """Sends 4 MB of text from each of many clients at a time."""
    began_s = time.monotonic()
    ends = await asyncio.gather(*(_generate(service, _EMOJI) for _ in range(_NUM_FLOODING)))
    took_s = time.monotonic() - began_s
    late = [Answer("late", f"4 MB of emoji: refused after {took_s:.1f} s")] if took_s > _AT_ONCE_S else []
    return [Answer.of("4 MB of emoji", end, "INVALID_ARGUMENT", "RESOURCE_EXHAUSTED") for end in ends] + late


async def send_bad_messages(service: BatonService, rng: random.Random) -> list[Answer]:
    """Sends messages that are none, or hold what they may not, to the public and to the operator's port."""
    cases = [case for case in test_bad_requests.CASES if case.row in _OF_ANY_MODEL]
    drawn = rng.sample(cases, 12)
    answers = [Answer.of(str(case), await _generate(service, case.message), case.code) for case in drawn]
    state = service.state()
    async with _channel(state.addresses.operator) as channel:
        for what, (method, order) in _ORDERS.items():
            call = channel.unary_stream(f"/baton.v1.Cluster/{method}", bytes, bytes)
            end = await _end_of(call(order, timeout=_TIMEOUT_S, metadata=_token(service)))
            answers.append(Answer.of(f"{method} with {what}", end, "INVALID_ARGUMENT"))
    return answers


async def order_workers_about(service: BatonService, rng: random.Random) -> list[Answer]:
    """Sends impossible attempts to workers, with the cluster's token."""
    pools = Pools.from_json((Path(service.state().run_dir) / "pools.json").read_text())
    names = [name for name in WRONG if "vocabulary" not in name]
    answers = []
    for worker in pools:
        for name in rng.sample(names, 5):
            async with _channel(worker.address) as channel:
                call = channel.stream_stream(
                    CONNECT,
                    worker_pb2.ConnectRequest.SerializeToString,
                    worker_pb2.ConnectResponse.FromString,
                )(metadata=_token(service), timeout=_TIMEOUT_S)
                await call.write(worker_pb2.ConnectRequest(begins=[WRONG[name]]))
                answers.append(Answer.of(f"{name} at {worker.id}", await _attempt_end(call), "InvalidRequest"))
                call.cancel()
    return answers


async def break_transport(service: BatonService, rng: random.Random) -> list[Answer]:
    """Speaks HTTP/2 wrongly: bad frames and headers, a flood of resets, and a message that does not come."""
    answers = []
    for case in rng.sample(test_bad_transport.CASES, 8):
        async with raw_http2(service.address) as connection:
            connection.begin_http2()
            case.say(connection)
            answers.append(Answer.of(str(case), await connection.answer(), case.end))
    for what, metadata in test_bad_transport.METADATA.items():
        end = await _generate(service, GOOD, metadata)
        answers.append(Answer.of(f"metadata {what}", end, "RESOURCE_EXHAUSTED"))
    async with raw_http2(service.address) as connection:
        connection.begin_http2()
        for stream in range(1, 2 * _NUM_RESETS, 2):
            connection.begin_call(GENERATE, stream=stream)
            connection.send(Frame.RST_STREAM, struct.pack(">I", 8), stream=stream)
        await asyncio.sleep(rng.random())
    async with raw_http2(service.address) as connection:
        connection.begin_http2()
        what = rng.choice(list(test_bad_transport.SLOW))
        test_bad_transport.SLOW[what](connection)
        await asyncio.sleep(5.0)  # of the ten that a message may take; an answer is awaited for ten more
        answers.append(Answer.of(what, await connection.answer(), "DEADLINE_EXCEEDED", "goaway: ping_timeout"))
    return answers


async def leave_amid_streams(service: BatonService, rng: random.Random) -> list[Answer]:
    """Begins long answers, and cancels them, never reads them, or vanishes."""
    async with _channel(service.address) as channel:
        for _ in range(4):
            call = channel.unary_stream(GENERATE, bytes, bytes)(_LONG.SerializeToString(), timeout=_TIMEOUT_S)
            await call.read()
            await asyncio.sleep(rng.random())
            call.cancel()
    for _ in range(4):
        async with raw_http2(service.address) as connection:
            connection.begin_http2()
            test_bad_transport.sent(message=_LONG.SerializeToString())(connection)
            await asyncio.sleep(2.0 * rng.random())
    return [Answer("left")]


async def _generate(service: BatonService, request: bytes, metadata: Sequence[tuple[str, str | bytes]] = ()) -> str:
    async with _channel(service.address) as channel:
        call = channel.unary_stream(GENERATE, bytes, bytes)
        return await _end_of(call(request, timeout=_TIMEOUT_S, metadata=metadata))


async def _end_of(call: AsyncIterable[object]) -> str:
    """Returns the name of a call's status."""
    try:
        async for _ in call:
            pass
    except grpc.aio.AioRpcError as failure:
        return failure.code().name
    return "OK"


async def _attempt_end(line: AsyncIterable[worker_pb2.ConnectResponse]) -> str:
    """Returns the name of the error that ends the attempt on a line."""
    try:
        async for response in line:
            for update in response.updates:
                if update.HasField("end"):
                    return type(error_from_pb(update.end.error)).__name__ if update.end.HasField("error") else "OK"
    except grpc.aio.AioRpcError as failure:
        return failure.code().name
    return "the line ended"


def _channel(address: str) -> grpc.aio.Channel:
    return grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS)


def _token(service: BatonService) -> tuple[tuple[str, str]]:
    return ((TOKEN_METADATA, service.state().token),)
