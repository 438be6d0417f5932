"""A worker that computes nothing: every choice gains a token at each beat of one clock."""

import asyncio
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass

from tests.harness.fake_worker import FakeWorker
from wire.pb import inference_pb2 as pb
from wire.pb import worker_pb2

_TOKEN = ord("a")
_SCORED_TOKENS = 128
_SCORING_S = 0.01
"""For so many tokens of a prompt: a step of an engine."""


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
        sampling = begin.sampling_params
        for start in range(begin.num_scored or len(begin.prompt.ids), len(begin.prompt.ids), _SCORED_TOKENS):
            num_tokens = min(_SCORED_TOKENS, len(begin.prompt.ids) - start)
            logprobs = [_told(sampling.prompt_logprobs)] * num_tokens
            yield worker_pb2.Update(scores=worker_pb2.PromptScores(first_position=start, logprobs=logprobs))
            await asyncio.sleep(_SCORING_S)
        firsts = [_gained(sampling, index, 0, 1) for index in range(sampling.n)]
        yield worker_pb2.Update(choices=firsts, prompt=worker_pb2.PromptSource(), end=worker_pb2.End())

    async def decode(self, begin: worker_pb2.Begin) -> AsyncIterator[worker_pb2.Update]:
        yield worker_pb2.Update(prompt=worker_pb2.PromptSource())
        position, max_tokens = 1, begin.sampling_params.max_tokens
        async for number in beats(self.interval_s, max_tokens - 1):
            gained = [_gained(begin.sampling_params, one.index, position, number) for one in begin.choices]
            position += number
            yield worker_pb2.Update(choices=gained)
        yield worker_pb2.Update(end=worker_pb2.End())


def _gained(sampling: pb.SamplingParams, index: int, position: int, number: int) -> worker_pb2.ChoiceTokens:
    """Makes tokens of a choice, with log-probabilities where they are wanted; the last ones end it."""
    gained = worker_pb2.ChoiceTokens(index=index, first_position=position, token_ids=[_TOKEN] * number)
    if sampling.HasField("logprobs"):
        gained.logprobs.extend([_told(sampling.logprobs)] * number)
    if position + number == sampling.max_tokens:
        gained.finish_reason = pb.FINISH_REASON_LENGTH
    return gained


def _told(num_top: int) -> pb.TokenLogprobs:
    top = [pb.TopLogprob(token_id=token_id, logprob=-1.234567) for token_id in range(_TOKEN, _TOKEN + num_top)]
    return pb.TokenLogprobs(token_id=_TOKEN, logprob=-0.1234567, top=top)
