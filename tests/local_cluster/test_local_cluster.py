import asyncio
from pathlib import Path
from typing import Any

import pytest

import engine.core
from engine.model.hash_model import HashModel
from kv_store.node.directory import Directory
from kv_store.tiers.cold_writer import ColdWriter
from kv_store.tiers.files_tier import FilesTier
from tests.harness.cluster import Output
from tests.harness.local_cluster import LocalCluster, Sizes
from tests.kv_store.names import MAC_KEY
from wire.convert import status_of, tiers_from_pb
from wire.ids import RequestId, SlotId
from wire.layout import KVLayout
from wire.pb import cluster_pb2, worker_pb2
from wire.pb import inference_pb2 as pb
from wire.tier import Tier, Write

LAYOUT = KVLayout(num_layers=2, num_kv_heads=1, head_dim=8, block_size=16, dtype="float32")
MODEL = HashModel(LAYOUT, vocab_size=300)
PROMPT = tuple(range(1, 101))


def ask(prompt: tuple[int, ...] = PROMPT, max_tokens: int = 40, **settings: Any) -> pb.GenerateRequest:
    sampling = pb.SamplingParams(**{"temperature": 0.0, "max_tokens": max_tokens, **settings})
    return pb.GenerateRequest(token_ids=pb.TokenIds(ids=prompt), sampling_params=sampling)


async def at_rest(cluster: LocalCluster) -> cluster_pb2.ClusterStatus:
    """The status once nothing is under way: nothing held, nothing referenced, nothing wrong."""
    status = await cluster.status()
    async with asyncio.timeout(5):
        while (
            status.problems
            or status_of("host", status.tiers).counts["holds"]
            or any(one.blocks.published for one in status.workers)
        ):
            await asyncio.sleep(0.01)
            status = await cluster.status()
    assert not status.num_running
    assert not status.num_queued
    return status


def worker(status: cluster_pb2.ClusterStatus, name: str) -> worker_pb2.WorkerStatus:
    return next(one for one in status.workers if one.worker_id == name)


@pytest.mark.parametrize("num_prompt", [1, 15, 16, 17, 100, 700])
async def test_a_request_goes_from_pool_to_pool(num_prompt: int) -> None:
    prompt = tuple(number % 300 for number in range(num_prompt))
    async with LocalCluster.running(MODEL, 1, 1) as cluster:
        output = await cluster.generate(ask(prompt))
        status = await at_rest(cluster)
    assert output.token_ids[0] == MODEL.oracle(prompt, 40)
    assert worker(status, "d0").computed_prompt_tokens == 0
    assert worker(status, "p0").computed_prompt_tokens == num_prompt
    assert worker(status, "d0").generated_tokens == 39
    timeline = output.complete.timeline
    assert (timeline.prefill_worker, timeline.decode_worker) == ("p0", "d0")
    assert output.complete.usage.completion_tokens == 40


async def test_co_located_gives_the_same() -> None:
    async with LocalCluster.running(MODEL, 0, 1) as cluster:
        output = await cluster.generate(ask())
        await at_rest(cluster)
    assert output.token_ids[0] == MODEL.oracle(PROMPT, 40)
    assert output.complete.timeline.prefill_worker == ""


async def test_the_next_turn_is_a_hit_on_both_sides() -> None:
    async with LocalCluster.running(MODEL, 1, 1) as cluster:
        first = await cluster.generate(ask())
        prompt = (*PROMPT, *first.token_ids[0], 5, 6)
        second = await cluster.generate(ask(prompt))
    cached = tiers_from_pb(second.complete.usage.cached_tokens)
    assert second.token_ids[0] == MODEL.oracle(prompt, 40)
    assert cached["device"] == len(PROMPT) // 16 * 16, "what prefill itself had computed"
    assert cached["device"] + cached["host"] == (len(PROMPT) + 39) // 16 * 16, "what decode filled comes from the arena"


async def test_many_at_once_with_little_memory() -> None:
    prompts = [(number, *PROMPT) for number in range(24)]
    async with LocalCluster.running(MODEL, 2, 2, Sizes(num_blocks=24, num_slots=64)) as cluster:
        outputs = await asyncio.gather(*(cluster.generate(ask(prompt)) for prompt in prompts))
        await at_rest(cluster)
    for prompt, output in zip(prompts, outputs, strict=True):
        assert output.token_ids[0] == MODEL.oracle(prompt, 40)


async def test_samples_are_the_same_with_and_without_a_prefill_pool() -> None:
    sampled: dict[str, Any] = {"temperature": 1.0, "seed": 3, "n": 4}
    outputs: list[Output] = []
    for num_prefill in (0, 1):
        async with LocalCluster.running(MODEL, num_prefill, 1) as cluster:
            outputs.append(await cluster.generate(ask(**sampled)))
            status = await at_rest(cluster)
    assert worker(status, "d0").computed_prompt_tokens == 0
    assert outputs[0].token_ids == outputs[1].token_ids
    assert len({tuple(tokens) for tokens in outputs[1].token_ids.values()}) == 4


@pytest.mark.parametrize("kill_at", range(0, 20, 3))
async def test_a_decode_worker_that_dies_is_not_noticed(kill_at: int) -> None:
    async with LocalCluster.running(MODEL, 1, 2) as cluster:
        session = cluster.router.dispatcher.open(ask(), 60.0)
        tokens: list[int] = []
        async for response in session.outbox:
            tokens += response.chunk.token_ids
            if len(tokens) >= kill_at and response.WhichOneof("event") == "chunk":
                kill_at = 1000
                for member in await busy(cluster):
                    cluster.transports[member].kill()
        assert tokens == MODEL.oracle(PROMPT, 40)


async def scores_of(cluster: LocalCluster, kill_at: int = 1000) -> tuple[list[pb.TokenLogprobs], list[int]]:
    """The prompt's scores and the tokens; once so many scores have come, the workers that run something are lost."""
    asked = ask(tuple(number % 300 for number in range(700)), prompt_logprobs=2)
    scored: list[pb.TokenLogprobs] = []
    tokens: list[int] = []
    async for response in cluster.router.dispatcher.open(asked, 60.0).outbox:
        scored += response.prompt.tokens
        tokens += response.chunk.token_ids
        if len(scored) >= kill_at:
            kill_at = 1000
            for name in [one.worker_id for one in (await cluster.status()).workers if one.num_running]:
                cluster.transports[name].kill()
    return scored, tokens


@pytest.mark.parametrize("kill_at", [1, 17, 300, 690])
@pytest.mark.parametrize("num_prefill", [0, 2])
async def test_scores_of_a_prompt_are_told_once_though_its_worker_dies(
    num_prefill: int, kill_at: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With blocks of the prompt in the store, which are not read."""
    async with LocalCluster.running(MODEL, num_prefill, 2) as cluster:
        expected = await scores_of(cluster)
        assert [one.token_id for one in expected[0]] == [number % 300 for number in range(700)]
        assert [one.HasField("logprob") for one in expected[0]] == [False] + [True] * 699
        assert {len(one.top) for one in expected[0][1:]} == {2}
        monkeypatch.setattr(engine.core, "MAX_SCORED_TOKENS", 16)
        assert await scores_of(cluster, kill_at) == expected


async def busy(cluster: LocalCluster) -> list[str]:
    """Decode workers that run something."""
    status = await cluster.status()
    return [one.worker_id for one in status.workers if one.role == "decode" and one.num_running]


async def test_a_client_that_goes_leaves_nothing_behind() -> None:
    async with LocalCluster.running(MODEL, 1, 1) as cluster:
        request = ask(max_tokens=2000)
        request.request_id = "long"
        session = cluster.router.dispatcher.open(request, 60.0)
        async for _ in session.outbox:
            break
        await cluster.router.dispatcher.abort(RequestId("long"))
        status = await at_rest(cluster)
    assert worker(status, "d0").generated_tokens < 2000


async def test_blocks_spoilt_in_the_arena_are_computed_again() -> None:
    async with LocalCluster.running(MODEL, 1, 1) as cluster:
        first = await cluster.generate(ask())
        await at_rest(cluster)
        for slot in range(0, 64, 2):
            cluster.arena.slot(SlotId(slot))[3] ^= 1
        await cluster.enlist("p1", "d1")
        prompt = (*PROMPT, *first.token_ids[0])
        second = await cluster.generate(ask(prompt))
        status = await at_rest(cluster)
    assert second.token_ids[0] == MODEL.oracle(prompt, 40)
    assert worker(status, "p1").computed_prompt_tokens > len(prompt) // 2


async def test_a_cluster_on_the_folder_and_secret_of_an_earlier_one_finds_all_full_blocks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for mac_key, num_found in ((MAC_KEY, 0), (MAC_KEY, 96), (b"o" * 32, 0)):
        cluster = LocalCluster(MODEL, Sizes())
        cluster.directory = Directory(512, block_bytes=LAYOUT.block_bytes, writes={Tier.FILES: Write.ALL})
        files = FilesTier(str(tmp_path), LAYOUT, mac_key, timeout_s=30.0, max_bytes=1 << 30)
        monkeypatch.setattr(cluster, "cold", files)
        writer = ColdWriter(LAYOUT, cluster.arena, cluster.directory, files)
        writer.start()
        await cluster.start(1, 1)
        output = await cluster.generate(ask())
        assert output.token_ids[0] == MODEL.oracle(PROMPT, 40)
        assert tiers_from_pb(output.complete.usage.cached_tokens).get("files", 0) == num_found
        await at_rest(cluster)
        await cluster.stop()
        writer.finish(30.0)
        writer.stop()
        assert files.status().forged == (0 if mac_key == MAC_KEY else 1)
        files.close()


@pytest.mark.parametrize("num_prefill", [0, 1])
async def test_choices_that_a_stop_string_ends_go_on_no_further(num_prefill: int) -> None:
    sampled: dict[str, Any] = {"temperature": 1.0, "seed": 3, "n": 3, "max_tokens": 900}
    async with LocalCluster.running(MODEL, num_prefill, 1) as cluster:
        whole = await cluster.generate(ask(**sampled))
        before = worker(await at_rest(cluster), "d0").generated_tokens
        others = whole.text[0] + whole.text[2]
        stop = next(one for one in (whole.text[1][at : at + 4] for at in range(8, 40)) if one not in others)
        cut = await cluster.generate(ask(stop=[stop], **sampled))
        num_generated = worker(await at_rest(cluster), "d0").generated_tokens - before
    assert cut.text[1] == whole.text[1][: whole.text[1].index(stop)]
    for index in (0, 2):
        assert cut.token_ids[index] == whole.token_ids[index]
    assert num_generated < 2 * 900 + 600, "the engine hears of the end long before the other choices end"
