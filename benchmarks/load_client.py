"""Sends a schedule at its times, over gRPC or HTTP, whatever the answers do, and notes when they come."""

import asyncio
import json
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import grpc
import grpc.aio

from benchmarks.latency import Record
from benchmarks.schedule import Arrival
from wire.pb import inference_pb2 as pb
from wire.pb import inference_pb2_grpc as pb_grpc

_MAX_LINE_BYTES = 1 << 20


class Answer:
    """The answer to a request as it comes in. Times in seconds from the start of the round."""

    def __init__(self, start: float) -> None:
        self.chunks: list[tuple[float, int]] = []
        self.cached_len = 0
        self.error: str | None = None
        self._start = start

    def note(self, num_tokens: int) -> None:
        """Notes a message with tokens that has just come."""
        self.chunks.append((time.perf_counter() - self._start, num_tokens))


class OpenLoopClient(ABC):
    """A client of a service; subclasses speak its protocol."""

    async def run(self, schedule: Sequence[Arrival]) -> list[Record]:
        """Sends every request at its time and waits for all to end."""
        start = time.perf_counter()
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(self._send(arrival, start)) for arrival in schedule]
        return [task.result() for task in tasks]

    @abstractmethod
    async def ask(self, arrival: Arrival, answer: Answer) -> None:
        """Sends a request and notes its answer, until its end or the client's timeout."""

    async def _send(self, arrival: Arrival, start: float) -> Record:
        await asyncio.sleep(arrival.at_s - (time.perf_counter() - start))
        sent_s = time.perf_counter() - start
        answer = Answer(start)
        await self.ask(arrival, answer)
        return Record(
            scheduled_s=arrival.at_s,
            sent_s=sent_s,
            chunks=tuple(answer.chunks),
            ended_s=time.perf_counter() - start,
            prompt_len=len(arrival.prompt),
            cached_len=answer.cached_len,
            error=answer.error,
        )


class LoadClient(OpenLoopClient):
    """A connection to a service of ours. timeout_s: of each request."""

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

    async def ask(self, arrival: Arrival, answer: Answer) -> None:
        try:
            async for response in self._stub.Generate(_request(arrival), timeout=self._timeout_s):
                if response.chunk.token_ids:
                    answer.note(len(response.chunk.token_ids))
                elif response.HasField("complete"):
                    answer.cached_len = sum(one.tokens for one in response.complete.usage.cached_tokens)
        except grpc.aio.AioRpcError as failure:
            answer.error = failure.code().name


class CompletionsClient(OpenLoopClient):
    """A client of OpenAI's completions over HTTP, streamed, with token ids in both directions as vLLM has them."""

    def __init__(self, host: str, port: int, model: str, timeout_s: float) -> None:
        self._host = host
        self._port = port
        self._model = model
        self._timeout_s = timeout_s

    async def ask(self, arrival: Arrival, answer: Answer) -> None:
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._stream(arrival, answer)
        except TimeoutError:
            answer.error = "DEADLINE_EXCEEDED"
        except OSError:
            answer.error = "UNAVAILABLE"

    async def _stream(self, arrival: Arrival, answer: Answer) -> None:
        reader, writer = await asyncio.open_connection(self._host, self._port, limit=_MAX_LINE_BYTES)
        try:
            writer.write(self._request(arrival))
            status = (await reader.readline()).decode().split()[1:2]
            if status != ["200"]:
                answer.error = f"HTTP {' '.join(status)}"
            async for line in reader:
                if line.startswith(b"data: {"):
                    self._take(json.loads(line[len(b"data: ") :]), answer)
        finally:
            writer.close()

    def _take(self, event: dict[str, Any], answer: Answer) -> None:
        if "error" in event:
            answer.error = "error in the stream"
        for choice in event.get("choices") or ():
            if choice["token_ids"]:
                answer.note(len(choice["token_ids"]))

    def _request(self, arrival: Arrival) -> bytes:
        """Makes a request of HTTP 1.0, whose answer comes without chunks of its own and ends the connection."""
        asked = {
            "model": self._model,
            "prompt": arrival.prompt,
            "max_tokens": arrival.output_len,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "return_token_ids": True,
        }
        body = json.dumps(asked).encode()
        head = f"POST /v1/completions HTTP/1.0\r\nHost: {self._host}\r\nContent-Type: application/json\r\n"
        return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body


def _request(arrival: Arrival) -> pb.GenerateRequest:
    sampling = pb.SamplingParams(temperature=0, max_tokens=arrival.output_len, ignore_eos=True)
    return pb.GenerateRequest(token_ids=pb.TokenIds(ids=arrival.prompt), sampling_params=sampling)
