"""Servers for benchmarks, each a process of its own: prints its addresses, and serves until its input ends.

stream_server.py workers INTERVAL_S | router PREFILL DECODE | gateway ROUTER
"""

import asyncio
import gc
import json
import sys
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from gateway.actor import GatewayActor
from gateway.config import GatewayConfig
from router.ports.server import RouterServer
from router.router import Router
from router.workers.controller_port import LocalController
from router.workers.grpc_transport import GrpcTransport
from tests.harness.fake_cluster import CONFIG
from tests.harness.fake_worker import FakeWorker
from tests.router.worker_server import served
from text.byte_tokenizer import ByteTokenizer
from wire.ids import WorkerId
from wire.pb import inference_pb2 as pb
from wire.pb import worker_pb2
from wire.pools import PoolSizes, Role, Worker
from wire.typed_reader import to_json

_LETTER = ord("a")
_SCORED_TOKENS = 128
_SCORING_S = 0.01
"""Time for so many tokens of a prompt, as a step of an engine takes."""
_TOKEN = CONFIG.cluster.token
_CONFIG = replace(CONFIG, model=replace(CONFIG.model, max_context_len=100_000))


async def beats(interval_s: float, num_tokens: int) -> AsyncIterator[int]:
    """Yields the number of tokens due at each beat, `num_tokens` in all; several after a late beat.

    All choices have the same beats, like the steps of a batch.
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
    """A worker that computes nothing: every choice gains a token at each beat of one clock."""

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
    """Makes tokens of a choice, with log-probabilities where they are wanted; the last token ends it."""
    gained = worker_pb2.ChoiceTokens(index=index, first_position=position, token_ids=[_LETTER] * number)
    if sampling.HasField("logprobs"):
        gained.logprobs.extend([_told(sampling.logprobs)] * number)
    if position + number == sampling.max_tokens:
        gained.finish_reason = pb.FINISH_REASON_LENGTH
    return gained


def _told(num_top: int) -> pb.TokenLogprobs:
    top = [pb.TopLogprob(token_id=token_id, logprob=-1.234567) for token_id in range(_LETTER, _LETTER + num_top)]
    return pb.TokenLogprobs(token_id=_LETTER, logprob=-0.1234567, top=top)


async def _workers(interval_s: str) -> None:
    async with AsyncExitStack() as servers:
        workers = [
            PacedWorker(
                WorkerId(role.value), role, num_arena_blocks=1 << 20, num_blocks=1 << 20, interval_s=float(interval_s)
            )
            for role in (Role.PREFILL, Role.DECODE)
        ]
        addresses = [(await servers.enter_async_context(served(worker, _TOKEN)))[1] for worker in workers]
        await _serve(*addresses)


async def _router(prefill: str, decode: str) -> None:
    router = Router(_CONFIG, ByteTokenizer(), partial(GrpcTransport, token=_TOKEN), LocalController(PoolSizes(1, 1)))
    server = RouterServer(router)
    addresses = await server.start()
    listed = [
        Worker(WorkerId("prefill"), Role.PREFILL, prefill),
        Worker(WorkerId("decode"), Role.DECODE, decode),
    ]
    refused = await router.membership.set(listed)
    assert not refused, refused
    await _serve(addresses.public)
    await server.stop()


async def _gateway(address: str) -> None:
    actor = GatewayActor(to_json(GatewayConfig(address=address)))
    await _serve(json.loads(await actor.start())["http"])
    await actor.stop()


async def _serve(*addresses: str) -> None:
    # As routers and workers do at the end of their start.
    gc.collect()
    gc.freeze()
    print(*addresses, flush=True)
    await asyncio.to_thread(sys.stdin.read)


_SERVERS: Mapping[str, Callable[..., Coroutine[Any, Any, None]]] = {
    "workers": _workers,
    "router": _router,
    "gateway": _gateway,
}

if __name__ == "__main__":
    asyncio.run(_SERVERS[sys.argv[1]](*sys.argv[2:]))
