"""The client against a service that answers as it is told."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import grpc
import grpc.aio
import pytest

from benchmarks.latency import LatencyLimits
from benchmarks.load_client import LoadClient
from benchmarks.machine import MachineState
from benchmarks.schedule import Arrival
from benchmarks.serve_report import ServeReport
from wire.convert import tiers_to_pb
from wire.pb import inference_pb2 as pb
from wire.pb import inference_pb2_grpc as pb_grpc

MACHINE = MachineState(load_average=1.5, num_cpus=2, omp_num_threads="1", read_gb_s=10.0, copy_gb_s=5.0)
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


async def test_report_of_two_services(service: tuple[Service, str]) -> None:
    _, address = service
    async with LoadClient(address, timeout_s=20) as client:
        records = await client.run(SCHEDULE)
    report = ServeReport("three requests", LatencyLimits(9.0, 9.0), {"a": [records], "b": [records]}, MACHINE, MACHINE)

    text = report.text()
    assert "three requests" in text
    assert "1 RESOURCE_EXHAUSTED" in text
    assert "b / a" in text
    assert "1.00 (1.00 .. 1.00)" in text
    assert text.count("load average 1.50, 2 cores, OMP_NUM_THREADS=1, read 10.0 GB/s, copy 5.0 GB/s") == 2
    parsed = json.loads(report.json())
    assert parsed["modes"]["b"]["all"]["num_ended"] == 2
    assert len(parsed["modes"]["a"]["rounds"]) == 1


def test_report_of_a_service_that_answered_nothing_is_still_json() -> None:
    report = ServeReport("nothing", LatencyLimits(1.0, 1.0), {"a": [[]]}, MACHINE, MACHINE)
    assert json.loads(report.json())["modes"]["a"]["all"]["ttft_ms"]["p50"] is None
    assert "nan" in report.text()


def test_machine_is_measured() -> None:
    machine = MachineState.measure()
    assert machine.read_gb_s > 0.1
    assert machine.copy_gb_s > 0.1
    assert machine.num_cpus >= 1
