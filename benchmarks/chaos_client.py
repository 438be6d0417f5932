"""Opens streams on a service, and compares what they bring with what is right."""

import asyncio
import time
from collections.abc import Iterator, Sequence
from itertools import cycle

import grpc
import grpc.aio

from benchmarks.chaos_tally import Stream
from benchmarks.question import Question
from wire.pb import inference_pb2 as pb
from wire.pb import inference_pb2_grpc as pb_grpc


class ChaosClient:
    """A connection that asks its questions in turns."""

    def __init__(self, address: str, questions: Sequence[Question], timeout_s: float) -> None:
        self._address = address
        self._questions: Iterator[Question] = cycle(questions)
        self._timeout_s = timeout_s
        self._start = time.perf_counter()

    async def keep_open(self, num_streams: int, duration_s: float) -> list[Stream]:
        """For so long each stream that ends is followed by another; returns when all have ended."""
        self._start = time.perf_counter()
        async with grpc.aio.insecure_channel(self._address) as channel:
            stub = pb_grpc.InferenceStub(channel)
            lanes = await asyncio.gather(*(self._lane(stub, duration_s) for _ in range(num_streams)))
        return [stream for lane in lanes for stream in lane]

    async def arrive(self, times_s: Sequence[float]) -> list[Stream]:
        """A stream at each of these times, whatever becomes of the others; returns when all have ended."""
        self._start = time.perf_counter()
        async with grpc.aio.insecure_channel(self._address) as channel:
            stub = pb_grpc.InferenceStub(channel)
            return await asyncio.gather(*(self._ask_at(stub, at_s) for at_s in times_s))

    async def _ask_at(self, stub: pb_grpc.InferenceStub, at_s: float) -> Stream:
        await asyncio.sleep(at_s - self._now_s)
        return await self._ask(stub, next(self._questions))

    async def _lane(self, stub: pb_grpc.InferenceStub, duration_s: float) -> list[Stream]:
        streams: list[Stream] = []
        while self._now_s < duration_s:
            streams.append(await self._ask(stub, next(self._questions)))
            if streams[-1].error is not None:
                await asyncio.sleep(0.5)
        return streams

    async def _ask(self, stub: pb_grpc.InferenceStub, question: Question) -> Stream:
        sent_s = self._now_s
        reader = _Reader()
        error = None
        try:
            async for response in stub.Generate(question.request(), timeout=self._timeout_s):
                reader.take(response, self._now_s)
        except grpc.aio.AioRpcError as failure:
            error = f"{failure.code().name}: {failure.details()}"
        return Stream(
            sent_s=sent_s,
            arrivals_s=tuple(reader.arrivals_s),
            num_tokens=len(reader.token_ids),
            is_right=reader.is_prefix_of(question) if error else reader.is_answer_to(question),
            num_decode_calls=reader.num_decode_calls,
            error=error,
        )

    @property
    def _now_s(self) -> float:
        return time.perf_counter() - self._start


class _Reader:
    """The outcome of a stream, gathered as it is read."""

    def __init__(self) -> None:
        self.arrivals_s: list[float] = []
        self.token_ids: list[int] = []
        self.num_decode_calls = 0
        self._text = ""
        self._ending: pb.Choice | None = None

    def take(self, response: pb.GenerateResponse, now_s: float) -> None:
        if response.HasField("complete"):
            [self._ending] = response.complete.choices
            spans = response.complete.timeline.spans
            self.num_decode_calls = sum(span.name == "router.wait_decode" for span in spans)
            return
        self.arrivals_s.append(now_s)
        self.token_ids += response.chunk.token_ids
        self._text += response.chunk.text

    def is_answer_to(self, question: Question) -> bool:
        if self._ending is None:
            return False
        stop = self._ending.stop_string if self._ending.HasField("stop_string") else None
        right = [(one.token_ids, one.text, one.stop_string) for one in (question, *question.also)]
        return (tuple(self.token_ids), self._text, stop) in right

    def is_prefix_of(self, question: Question) -> bool:
        num_tokens = len(self.token_ids)
        return tuple(self.token_ids) in [one.token_ids[:num_tokens] for one in (question, *question.also)]
