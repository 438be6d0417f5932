"""KV dropped by worth in a whole cluster: the same answers however it is made up, and whatever is lost."""

import asyncio
import random
from dataclasses import replace

import pytest

from engine.model.hash_model import HashModel
from tests.harness.local_cluster import LocalCluster, Sizes
from tests.pairs import RUNS_ALL
from wire.errors import InvalidRequest
from wire.layout import KVLayout, Window
from wire.pb import inference_pb2 as pb

LAYOUT = KVLayout(num_layers=2, num_kv_heads=2, head_dim=8, block_size=16, dtype="float32")
MODEL = HashModel(LAYOUT, vocab_size=300)
POLICIES = ("full", "snapkv=25%", "h2o=25%")
SINKS = HashModel(replace(LAYOUT, window=124, num_sinks=4), vocab_size=300)
SIZES = Sizes(kv_policies=POLICIES)


def ask(policy: str | None, number: int = 0, num_tokens: int = 60) -> pb.GenerateRequest:
    prompt = random.Random(number).choices(range(300), k=330 + number)
    sampling = pb.SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True, n=2)
    return pb.GenerateRequest(token_ids=pb.TokenIds(ids=prompt), sampling_params=sampling, kv_policy=policy)


async def answers(cluster: LocalCluster, policy: str) -> list[dict[int, list[int]]]:
    found = await asyncio.gather(*(cluster.generate(ask(policy, number)) for number in range(4)))
    return [output.token_ids for output in found]


async def expected(policy: str) -> list[dict[int, list[int]]]:
    async with LocalCluster.running(MODEL, 0, 1, SIZES) as cluster:
        return await answers(cluster, policy)


@pytest.mark.parametrize(
    ("policy", "model", "sizes"),
    [*((one, MODEL, SIZES) for one in POLICIES[1:]), (None, SINKS, Sizes())],
    ids=[*POLICIES[1:], "sinks"],
)
@pytest.mark.parametrize("kill_at", [1, 2, 30, 100])
async def test_answers_are_the_same_after_a_decode_worker_dies(
    policy: str | None, model: HashModel, sizes: Sizes, kill_at: int
) -> None:
    async with LocalCluster.running(model, 0, 1, sizes) as cluster:
        whole = (await cluster.generate(ask(policy))).token_ids
    async with LocalCluster.running(model, 1, 2, sizes) as cluster:
        session = cluster.router.dispatcher.open(ask(policy), 60.0)
        tokens: dict[int, list[int]] = {0: [], 1: []}
        killed = False
        async for response in session.outbox:
            tokens[response.chunk.index] += response.chunk.token_ids
            if not killed and sum(map(len, tokens.values())) >= kill_at:
                killed = True
                running = [one.worker_id for one in (await cluster.status()).workers if one.num_running]
                for name in [name for name in running if name.startswith("d")] or ["d0"]:
                    cluster.transports[name].kill()
    assert killed
    assert tokens == whole


@pytest.mark.timeout(300)
async def test_thousands_of_tokens_with_sinks_in_a_worker_of_the_windows_size() -> None:
    """Handed over by prefill, then decoded in as many pages as its sinks and its window take at most."""
    num_tokens = 20_000 if RUNS_ALL else 2_000
    model, num_needed = HashModel(SINKS.layout, 300, max_context_len=1 << 15), Window(SINKS.layout).most_needed
    assert num_needed is not None
    asked = ask(None, num_tokens=num_tokens)
    asked.sampling_params.n = 1
    async with LocalCluster.running(model, 1, 1, Sizes(num_blocks=num_needed, num_slots=4 * num_needed)) as cluster:
        output = await cluster.generate(asked, 250.0)
        assert output.token_ids == {0: model.oracle(asked.token_ids.ids, num_tokens)}
        assert not (await cluster.status()).problems


@pytest.mark.parametrize("policy", POLICIES[1:])
async def test_a_turn_with_drops_leaves_nothing_for_its_text_in_full(policy: str) -> None:
    async with LocalCluster.running(MODEL, 1, 1, SIZES) as cluster:
        first = await cluster.generate(ask(policy))
        turn = [*ask(policy).token_ids.ids, *first.token_ids[0], 7]
        second = pb.GenerateRequest(token_ids=pb.TokenIds(ids=turn), sampling_params=ask(policy).sampling_params)
        found = (await cluster.generate(second)).token_ids
    async with LocalCluster.running(MODEL, 0, 1, SIZES) as cluster:
        assert found == (await cluster.generate(second)).token_ids


async def test_a_policy_that_is_not_allowed_is_refused() -> None:
    async with LocalCluster.running(MODEL, 1, 1, SIZES) as cluster:
        for text in ("snapkv=50%", "", "h2o", "sinks=4+1020"):
            with pytest.raises(InvalidRequest, match="kv_policy"):
                await cluster.generate(ask(text))


async def test_the_deployments_own_is_that_of_a_request_that_names_none() -> None:
    async with LocalCluster.running(MODEL, 1, 1, Sizes(kv_policies=("snapkv=25%",))) as cluster:
        found = (await cluster.generate(ask(None))).token_ids
        assert found == (await cluster.generate(ask("snapkv=25%"))).token_ids == (await expected("snapkv=25%"))[0]
        with pytest.raises(InvalidRequest, match="kv_policy"):
            await cluster.generate(ask("full"))
