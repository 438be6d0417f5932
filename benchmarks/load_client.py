"""Sends a schedule over gRPC at its times, whatever the answers do, and notes when they come."""

import asyncio
import time
from collections.abc import Sequence

import grpc
import grpc.aio

from benchmarks.latency import Record
from benchmarks.schedule import Arrival
from wire.pb import inference_pb2 as pb
from wire.pb import inference_pb2_grpc as pb_grpc


class LoadClient:
    """A connection to a service."""

    def __init__(self, address: str, timeout_s: float) -> None:
        self._channel = grpc.aio.insecure_channel(address)
        self._stub = pb_grpc.InferenceStub(self._channel)
        self._timeout_s = timeout_s

    async def __aenter__(self) -> "LoadClient":
        await asyncio.wait_for(self._channel.channel_ready(), self._timeout_s)
        return self

    async def __aexit__(self, *_exception: object) -> None:
        await self._channel.close()

    async def max_context_len(self) -> int:
        """Of the model that is served."""
        models = await self._stub.ListModels(pb.ListModelsRequest(), timeout=self._timeout_s)
        return int(models.models[0].max_context_len)

    async def run(self, schedule: Sequence[Arrival]) -> list[Record]:
        """Sends every request at its time and waits for all to end, at most `timeout_s` each."""
        start = time.perf_counter()
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(self._send(arrival, start)) for arrival in schedule]
        return [task.result() for task in tasks]

    async def _send(self, arrival: Arrival, start: float) -> Record:
        await asyncio.sleep(arrival.at_s - (time.perf_counter() - start))
        sent_s = time.perf_counter() - start
        chunks: list[tuple[float, int]] = []
        complete = pb.Complete()
        error = None
        try:
            async for response in self._stub.Generate(_request(arrival), timeout=self._timeout_s):
                if response.chunk.token_ids:
                    chunks.append((time.perf_counter() - start, len(response.chunk.token_ids)))
                elif response.HasField("complete"):
                    complete = response.complete
        except grpc.aio.AioRpcError as failure:
            error = failure.code().name
        cached = complete.usage.cached_tokens
        return Record(
            scheduled_s=arrival.at_s,
            sent_s=sent_s,
            chunks=tuple(chunks),
            ended_s=time.perf_counter() - start,
            prompt_len=len(arrival.prompt),
            cached_len=sum(one.tokens for one in cached),
            error=error,
        )


def _request(arrival: Arrival) -> pb.GenerateRequest:
    sampling = pb.SamplingParams(temperature=0, max_tokens=arrival.output_len, ignore_eos=True)
    return pb.GenerateRequest(token_ids=pb.TokenIds(ids=arrival.prompt), sampling_params=sampling)
