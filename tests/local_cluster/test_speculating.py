"""Speculation in a whole cluster: the same answers, and counts of what was guessed."""

import asyncio
import random
from typing import Any

import pytest

from engine.model.hash_model import HashModel
from tests.harness.cluster import Output
from tests.harness.local_cluster import LocalCluster, Sizes
from wire.convert import tiers_from_pb
from wire.layout import KVLayout
from wire.pb import inference_pb2 as pb

LAYOUT = KVLayout(num_layers=2, num_kv_heads=1, head_dim=8, block_size=16, dtype="float32")
MODEL = HashModel(LAYOUT, vocab_size=4)
"""So few tokens that every n-gram was there before, and is often followed by another token."""
PLAIN, NGRAM, DRAFT = Sizes(), Sizes(proposer="ngram"), Sizes(draft=MODEL)
"""The draft is the model itself: it comes true where the likeliest token is drawn."""
KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "seeded": {"temperature": 1.0, "seed": 3, "logprobs": 2},
    "two": {"temperature": 1.0, "seed": 4, "n": 2, "presence_penalty": 0.5},
    "stop": {"temperature": 0.0, "stop": ["\x01\x02", "\x03\x00\x00"]},
}


def ask(number: int = 0, **settings: Any) -> pb.GenerateRequest:
    prompt = random.Random(number).choices(range(4), k=70 + number)
    sampling = pb.SamplingParams(**{"max_tokens": 60, "seed": 1, **settings})
    return pb.GenerateRequest(token_ids=pb.TokenIds(ids=prompt), sampling_params=sampling)


async def outputs(cluster: LocalCluster) -> list[Output]:
    """Answers to all kinds of requests at once, each without its usage and timeline."""
    asked = [ask(number, **kind) for number, kind in enumerate(KINDS.values())]
    found = await asyncio.gather(*(cluster.generate(one) for one in asked))
    for output in found:
        output.complete.ClearField("timeline")
        output.complete.ClearField("usage")
    return found


async def num_accepted(cluster: LocalCluster) -> int:
    status = await cluster.status()
    assert not status.problems
    return sum(worker.num_accepted_tokens for worker in status.workers)


@pytest.mark.parametrize("guessing", [NGRAM, DRAFT], ids=["n-gram", "draft"])
@pytest.mark.parametrize("num_prefill", [0, 1])
async def test_answers_are_the_same_co_located_and_disaggregated(num_prefill: int, guessing: Sizes) -> None:
    async with LocalCluster.running(MODEL, num_prefill, 1) as cluster:
        expected = await outputs(cluster)
        assert await num_accepted(cluster) == 0
    async with LocalCluster.running(MODEL, num_prefill, 1, guessing) as cluster:
        assert await outputs(cluster) == expected
        assert await num_accepted(cluster) > 0


@pytest.mark.parametrize("guessing", [NGRAM, DRAFT], ids=["n-gram", "draft"])
async def test_answers_are_the_same_from_the_device_and_from_the_arena(guessing: Sizes) -> None:
    """Each time by a decode worker that guesses, behind a prefill worker that found the prompts."""
    async with LocalCluster.running(MODEL, 1, 1) as cluster:
        expected = await outputs(cluster)
    async with LocalCluster.running(MODEL, 1, 1, guessing) as cluster:
        for names, tier in ((("p0", "d0"), ""), (("p0", "d1"), "device"), (("p1", "d2"), "host")):
            await cluster.enlist(*names)
            first = (await cluster.generate(ask(max_tokens=8, temperature=0.0))).complete.usage
            assert {name for name, num in tiers_from_pb(first.cached_tokens).items() if num} == ({tier} - {""})
            before = await num_accepted(cluster)
            assert await outputs(cluster) == expected
            assert await num_accepted(cluster) > before


@pytest.mark.parametrize("guessing", [NGRAM, DRAFT], ids=["n-gram", "draft"])
@pytest.mark.parametrize("kill_at", [1, 5, 20, 40])
@pytest.mark.parametrize("kind", ["greedy", "seeded"])
async def test_answers_are_the_same_after_a_decode_worker_dies(kind: str, kill_at: int, guessing: Sizes) -> None:
    async with LocalCluster.running(MODEL, 1, 1) as cluster:
        expected = (await cluster.generate(ask(**KINDS[kind]))).token_ids[0]
    async with LocalCluster.running(MODEL, 1, 2, guessing) as cluster:
        session = cluster.router.dispatcher.open(ask(**KINDS[kind]), 60.0)
        tokens: list[int] = []
        killed: list[str] = []
        async for response in session.outbox:
            tokens += response.chunk.token_ids
            if len(tokens) >= kill_at and not killed:
                status = await cluster.status()
                killed = [one.worker_id for one in status.workers if one.role == "decode" and one.num_running] or ["d0"]
                for name in killed:
                    cluster.transports[name].kill()
    assert tokens == expected


async def test_usage_and_timeline_tell_of_guesses() -> None:
    async with LocalCluster.running(MODEL, 1, 1, NGRAM) as cluster:
        complete = (await cluster.generate(ask(temperature=0.0))).complete
        status = await cluster.status()
    (worker,) = [one for one in status.workers if one.role == "decode"]
    (span,) = [one for one in complete.timeline.spans if one.name == "decode.generate"]
    assert complete.usage.guessed_tokens == span.counts["tokens_guessed"] == worker.num_guessed_tokens
    assert complete.usage.accepted_tokens == span.counts["tokens_accepted"] == worker.num_accepted_tokens
    assert 0 < complete.usage.accepted_tokens < complete.usage.guessed_tokens
    assert complete.usage.completion_tokens == 60
