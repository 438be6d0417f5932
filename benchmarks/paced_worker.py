"""A worker that computes nothing: every choice gains a token at each beat of one clock."""

import asyncio
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass

from tests.router.fake_worker import FakeWorker
from wire.pb import inference_pb2 as pb
from wire.pb import worker_pb2

_TOKEN = ord("a")


async def beats(interval_s: float, num_tokens: int) -> AsyncIterator[int]:
    """How many tokens are due, at each beat, `num_tokens` in all: more than one where the last came late.

    Beats are the same for all, as the steps of a batch are.
    """
    first = last = time.monotonic() // interval_s
    while last < first + num_tokens:
        await asyncio.sleep((last + 1) * interval_s - time.monotonic())
        now = min(time.monotonic() // interval_s, first + num_tokens)
        if now > last:
            yield int(now - last)
        last = now


@dataclass
class PacedWorker(FakeWorker):
    """Forgets what it was asked."""

    interval_s: float = 0.1

    async def prefill(self, begin: worker_pb2.Begin) -> AsyncIterator[worker_pb2.Update]:
        first = worker_pb2.ChoiceTokens(index=0, first_position=0, token_ids=[_TOKEN])
        yield worker_pb2.Update(choices=[first], prompt=worker_pb2.PromptSource(), end=worker_pb2.End())

    async def decode(self, begin: worker_pb2.Begin) -> AsyncIterator[worker_pb2.Update]:
        yield worker_pb2.Update(prompt=worker_pb2.PromptSource())
        position, max_tokens = 1, begin.sampling_params.max_tokens
        async for number in beats(self.interval_s, max_tokens - 1):
            gained = worker_pb2.ChoiceTokens(index=0, first_position=position, token_ids=[_TOKEN] * number)
            position += number
            if position == max_tokens:
                gained.finish_reason = pb.FINISH_REASON_LENGTH
            yield worker_pb2.Update(choices=[gained])
        yield worker_pb2.Update(end=worker_pb2.End())
