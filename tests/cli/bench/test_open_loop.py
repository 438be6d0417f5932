"""The client against a service that answers as it is told."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import grpc
import grpc.aio
import pytest

from benchmarks.machine import MachineState
from cli.bench.latency import Record
from cli.bench.open_loop import ChatsClient, CompletionsClient, LoadClient, OpenLoopClient, RequestTiming
from cli.bench.schedule import Arrival
from httpd.server import HttpServer
from tests.gateway.local_gateway import serving
from wire.convert import tiers_to_pb
from wire.pb import inference_pb2 as pb
from wire.pb import inference_pb2_grpc as pb_grpc

REFUSED = 99


class Service(pb_grpc.InferenceServicer):
    """Answers none until `expected` requests are there: an answer that a closed loop would wait for never comes."""

    def __init__(self, expected: int) -> None:
        self.requests: list[pb.GenerateRequest] = []
        self._expected = expected
        self._all_there = asyncio.Event()

    async def ListModels(  # noqa: N802 - named by the proto
        self, request: pb.ListModelsRequest, context: Any
    ) -> pb.ListModelsResponse:
        return pb.ListModelsResponse(models=[pb.Model(name="demo", max_context_len=2048)])

    async def Generate(  # noqa: N802 - named by the proto
        self, request: pb.GenerateRequest, context: Any
    ) -> AsyncIterator[pb.GenerateResponse]:
        self.requests.append(request)
        if len(self.requests) == self._expected:
            self._all_there.set()
        await asyncio.wait_for(self._all_there.wait(), 10)
        if request.token_ids.ids[0] == REFUSED:
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "full")
        yield pb.GenerateResponse(chunk=pb.Chunk(token_ids=[1]))
        yield pb.GenerateResponse(chunk=pb.Chunk(token_ids=[2, 3]))
        yield pb.GenerateResponse(chunk=pb.Chunk(text="held back"))
        usage = pb.Usage(prompt_tokens=2, cached_tokens=tiers_to_pb({"device": 1, "host": 1}))
        yield pb.GenerateResponse(complete=pb.Complete(usage=usage))


@pytest.fixture
async def service() -> AsyncIterator[tuple[Service, str]]:
    servicer = Service(expected=3)
    server = grpc.aio.server()
    pb_grpc.add_InferenceServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    yield servicer, f"127.0.0.1:{port}"
    await server.stop(None)


SCHEDULE = [Arrival(0.0, (5, 6), 3), Arrival(0.05, (REFUSED, 1), 3), Arrival(0.1, (7, 8), 4)]


async def test_sends_on_time_and_notes_what_comes(service: tuple[Service, str]) -> None:
    servicer, address = service
    async with LoadClient(address, timeout_s=20) as client:
        assert await client.max_context_len() == 2048
        first, refused, last = await client.run(SCHEDULE)

    assert [list(request.token_ids.ids) for request in servicer.requests] == [[5, 6], [REFUSED, 1], [7, 8]]
    sampling = servicer.requests[2].sampling_params
    assert (sampling.max_tokens, sampling.ignore_eos, sampling.temperature) == (4, True, 0)
    assert (refused.error, refused.chunks) == ("RESOURCE_EXHAUSTED", ())
    for record, arrival in zip((first, last), (SCHEDULE[0], SCHEDULE[2]), strict=True):
        assert [count for _, count in record.chunks] == [1, 2]
        assert (record.prompt_len, record.cached_len, record.error) == (2, 2, None)
        assert record.scheduled_s == arrival.at_s <= record.sent_s <= record.chunks[0][0] <= record.ended_s
    assert first.chunks[0][0] >= last.sent_s


EVENTS = (
    'data: {"choices": [{"token_ids": [7], "prompt_token_ids": [5, 6]}]}',
    'data: {"choices": [{"token_ids": [8, 9]}]}',
    'data: {"choices": [{"token_ids": [], "finish_reason": "length"}]}',
    "data: [DONE]",
)


@asynccontextmanager
async def http_server(answer: str) -> AsyncIterator[tuple[int, list[dict[str, Any]]]]:
    """A server that gives this answer to every request; yields its port and the requests' bodies."""
    bodies: list[dict[str, Any]] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        length = int(head.lower().partition("content-length:")[2].split()[0])
        bodies.append(json.loads(await reader.readexactly(length)))
        writer.write(answer.encode())
        await writer.drain()
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        yield server.sockets[0].getsockname()[1], bodies


async def test_completions_over_http_are_noted_token_by_token() -> None:
    async with http_server("HTTP/1.0 200 OK\r\n\r\n" + "\n\n".join(EVENTS) + "\n\n") as (port, bodies):
        [record] = await CompletionsClient(f"http://127.0.0.1:{port}/v1", 20, "demo").run(SCHEDULE[:1])
    assert ([count for _, count in record.chunks], record.error) == ([1, 2], None)
    asked = {name: bodies[0][name] for name in ("model", "prompt", "max_tokens", "temperature", "ignore_eos")}
    assert asked == {"model": "demo", "prompt": [5, 6], "max_tokens": 3, "temperature": 0, "ignore_eos": True}


@pytest.mark.parametrize(
    ("answer", "error", "reason"),
    [
        ("HTTP/1.0 400 Bad Request\r\n\r\nno such model", "HTTP 400", ""),
        ('HTTP/1.0 400 Bad Request\r\n\r\n{"error": {"message": "too long"}}', "HTTP 400", "too long"),
        ('HTTP/1.0 404 Not Found\r\n\r\n{"detail": 7}', "HTTP 404", '{"detail": 7}'),
        ('HTTP/1.0 200 OK\r\n\r\ndata: {"error": {"message": "full"}}\n\n', "error in the stream", "full"),
        ("", "UNAVAILABLE", ""),
        ("no answer\r\n\r\n", "not an answer", ""),
        ("HTTP/1.1 200 OK\r\n\r\n" + EVENTS[0] + "\n\n", "broken off", ""),
    ],
)
async def test_what_fails_over_http_is_an_error(answer: str, error: str, reason: str) -> None:
    async with http_server(answer) as (port, _):
        [record] = await CompletionsClient(f"http://127.0.0.1:{port}/v1", 20, "demo").run(SCHEDULE[:1])
    assert (record.error, record.reason) == (error, reason)


async def test_a_role_alone_is_no_token_of_a_chat() -> None:
    deltas = [{"role": "assistant", "content": ""}, {"content": "a"}, {"content": ""}, {"content": "b"}]
    events: list[Any] = [{"choices": [{"delta": delta, "finish_reason": None}]} for delta in deltas]
    events += [{"choices": [{"delta": {}, "finish_reason": "stop"}]}, {"usage": {"prompt_tokens": 9}}]
    body = "".join(f"data: {json.dumps(event)}\n\n" for event in events) + "data: [DONE]\n\n"
    async with http_server(f"HTTP/1.0 200 OK\r\n\r\n{body}") as (port, bodies):
        [record] = await ChatsClient(f"http://127.0.0.1:{port}/v1", 20, "demo").run(SCHEDULE[:1])
    assert ([count for _, count in record.chunks], record.prompt_len, record.error) == ([1, 1, 1], 9, None)
    [turn] = bodies[0]["messages"]
    assert (turn["role"], len(turn["content"].split())) == ("user", len(SCHEDULE[0].prompt))


async def test_an_answer_in_pieces_and_chunks_counts_as_many_tokens_as_its_usage() -> None:
    usage = {"completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 1}}
    events = [{"choices": [{"text": "a"}]}, {"choices": [{"text": "", "finish_reason": "length"}]}, {"usage": usage}]
    body = "".join(f"data: {json.dumps(event)}\n\n" for event in events) + "data: [DONE]\n\n"
    pieces = [body[at : at + 7] for at in range(0, len(body), 7)]
    chunks = "".join(f"{len(piece):x}\r\n{piece}\r\n" for piece in pieces)
    async with http_server(f"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n{chunks}0\r\n\r\n") as (port, _):
        [record] = await CompletionsClient(f"http://127.0.0.1:{port}/v1", 20, "demo").run(SCHEDULE[:1])
    assert ([count for _, count in record.chunks], record.cached_len, record.error) == ([3], 1, None)


async def test_the_gateway_is_a_door() -> None:
    async with serving() as gateway:
        server = HttpServer(gateway.app)
        url = f"http://{await server.start('127.0.0.1', 0)}/v1"
        async with CompletionsClient(url, timeout_s=20) as client:
            assert await client.max_context_len() == gateway.cluster.router.config.model.max_context_len
            first, second = await client.run([Arrival(0.0, (50,) * 40, 3), Arrival(0.01, (51,) * 40, 4)])
        async with ChatsClient(url, timeout_s=20) as client:
            [third] = await client.run([Arrival(0.0, (50,) * 40, 5)])
        await server.stop()
    told = [(record.error, record.num_tokens, record.prompt_len > 40) for record in (first, second, third)]
    assert told == [(None, 3, False), (None, 4, False), (None, 5, True)]


async def test_no_more_requests_than_places_are_under_way() -> None:
    under_way: list[int] = [0]
    told: list[Record] = []

    class Counting(OpenLoopClient):
        async def ask(self, arrival: Arrival, answer: RequestTiming) -> None:
            under_way.append(under_way[-1] + 1)
            await asyncio.sleep(0)
            under_way.append(under_way[-1] - 1)

        async def max_context_len(self) -> int:
            return 0

        async def __aexit__(self, *_: object) -> None: ...

    records = await Counting(20).run([replace(SCHEDULE[0], at_s=0.0)] * 9, 2, told.append)
    assert max(under_way) == 2
    assert sorted(map(id, told)) == sorted(map(id, records))


async def test_a_server_that_is_gone_is_an_error() -> None:
    async with http_server("") as (port, _):
        pass
    [record] = await CompletionsClient(f"http://127.0.0.1:{port}/v1", 20, "demo").run(SCHEDULE[:1])
    assert record.error == "UNAVAILABLE"


def test_machine_is_measured() -> None:
    machine = MachineState.measure()
    assert machine.read_gb_s > 0.1
    assert machine.copy_gb_s > 0.1
    assert machine.num_cpus >= 1


def test_machine_is_described() -> None:
    machine = MachineState(load_average=1.5, num_cpus=2, omp_num_threads="1", read_gb_s=10.0, copy_gb_s=5.0)
    described = "load average 1.50, 2 cores, OMP_NUM_THREADS=1, read 10.0 GB/s, copy 5.0 GB/s"
    assert machine.describe() == described
