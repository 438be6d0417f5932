"""Sessions through a whole cluster: hints from a request to the arena, while others press on it."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from engine.model.hash_model import HashModel
from kv_store.eviction.order import StartFirst
from kv_store.node.directory import Directory
from kv_store.node.messages import KeepHint
from kv_store.node.sessions import KeepLimits
from kv_store.tiers.cold_writer import ColdWriter
from tests.harness.cluster import Output, until
from tests.harness.fake_clock import FakeClock
from tests.harness.local_cluster import LocalCluster, Sizes
from tests.local_cluster.test_local_cluster import LAYOUT, MODEL, PROMPT, ask, at_rest
from wire.block_names import cover, digest_of, session_of
from wire.convert import tiers_from_pb
from wire.pb import inference_pb2 as pb
from wire.tier import Tier, Write

SIZES = Sizes(num_blocks=24, num_slots=48)


def agent(prompt: tuple[int, ...], max_tokens: int = 40, **hint: Any) -> pb.GenerateRequest:
    request = ask(prompt, max_tokens)
    request.MergeFrom(pb.GenerateRequest(**hint))
    return request


def found(output: Output) -> Mapping[str, int]:
    return {tier: num for tier, num in tiers_from_pb(output.complete.usage.cached_tokens).items() if num}


async def serve(cluster: LocalCluster, request: pb.GenerateRequest, model: HashModel = MODEL) -> Output:
    """Serves a request, whose tokens must be right, until its blocks are written and its hint has arrived."""
    output = await cluster.generate(request)
    assert output.token_ids[0] == model.oracle(tuple(request.token_ids.ids), request.sampling_params.max_tokens)
    await at_rest(cluster)
    await until(lambda: all(not worker.transfers.pending for worker in cluster.workers.values()))
    return output


async def press(cluster: LocalCluster, num: int, model: HashModel = MODEL) -> None:
    """Serves prompts that never come back."""
    for nth in range(num):
        await serve(cluster, agent(tuple((nth * 7 + place) % 299 for place in range(160)), 4), model)


def kept_cluster(share: float = 0.5) -> tuple[LocalCluster, FakeClock]:
    cluster, clock = LocalCluster(MODEL, SIZES), FakeClock()
    limits = KeepLimits(share=share)
    cluster.directory = Directory(SIZES.num_slots, clock, block_bytes=LAYOUT.block_bytes, keeps=limits)
    return cluster, clock


@pytest.mark.parametrize("num_prefill", [0, 1])
@pytest.mark.parametrize("keep_s", [None, 60.0])
async def test_the_kv_of_prompt_and_answer_outlives_a_tool(num_prefill: int, keep_s: float | None) -> None:
    cluster, _ = kept_cluster()
    await cluster.start(num_prefill, 1)
    first = await serve(cluster, agent(PROMPT, session="agent", keep_s=keep_s))
    assert cluster.directory.records.status().num_kept == (0 if keep_s is None else 8), (
        "139 tokens have KV, in 8 full blocks"
    )
    await press(cluster, 12)
    second = await serve(cluster, agent((*PROMPT, *first.token_ids[0], 5, 6), session="agent", keep_s=keep_s))
    assert found(second) == ({} if keep_s is None else {Tier.HOST: 128})
    await cluster.stop()


@pytest.mark.parametrize("num_prefill", [0, 1])
async def test_a_fork_supersedes_what_it_leaves(num_prefill: int) -> None:
    cluster, _ = kept_cluster()
    await cluster.start(num_prefill, 1)
    await serve(cluster, agent(PROMPT, session="agent", keep_s=60.0))
    await serve(cluster, agent((*PROMPT[:50], 7, 8), 8, session="agent", keep_s=60.0))
    assert cluster.directory.records.status().num_kept == 3
    assert cluster.directory.records.check() == []
    await cluster.stop()


async def test_a_choice_that_a_stop_string_ends_passes_its_hint_on() -> None:
    cluster, _ = kept_cluster()
    await cluster.start(0, 1)
    request = agent(PROMPT, session="agent", keep_s=60.0)
    text = (await cluster.generate(request)).text[0]
    await until(lambda: cluster.directory.records.status().num_kept > 0)
    cluster.directory.records.keep([], ended(cluster))
    assert cluster.directory.records.status().num_kept == 0
    stopped = agent(PROMPT, session="agent", keep_s=60.0)
    stopped.sampling_params.stop.append(text[20:24])
    await cluster.generate(stopped)
    await at_rest(cluster)
    await until(lambda: cluster.directory.records.status().num_kept > 0)
    await cluster.stop()


def ended(cluster: LocalCluster) -> KeepHint:
    """The hint of a session that ends."""
    root = cluster.router.dispatcher.root_of("default")
    return KeepHint(digest_of(root), session_of(root, "agent"), 0.0)


async def test_all_choices_of_a_request_are_kept() -> None:
    cluster, _ = kept_cluster()
    await cluster.start(1, 1)
    request = agent(PROMPT, session="agent", keep_s=60.0)
    request.sampling_params.n, request.sampling_params.temperature, request.sampling_params.seed = 3, 1.0, 5
    output = await cluster.generate(request)
    await at_rest(cluster)
    assert len({tuple(ids) for ids in output.token_ids.values()}) == 3
    await until(lambda: cluster.directory.records.status().num_kept == 6 + 3 * 2)
    await cluster.stop()


async def test_of_a_model_with_windows_the_last_one_is_kept() -> None:
    model = HashModel(replace(LAYOUT, window=40), vocab_size=300)
    cluster = LocalCluster(model, SIZES)
    cluster.directory = Directory(SIZES.num_slots, block_bytes=LAYOUT.block_bytes, order=StartFirst)
    await cluster.start(1, 1)
    first = await serve(cluster, agent(PROMPT, session="agent", keep_s=60.0), model)
    assert cluster.directory.records.status().num_kept == 3, "token 128 sees tokens 89 to 128"
    await press(cluster, 12, model)
    second = await serve(cluster, agent((*PROMPT, *first.token_ids[0], 5, 6), session="agent"), model)
    assert sum(found(second).values()) == 128
    await cluster.stop()


async def test_hints_of_years_end_and_are_bounded_by_the_tenants_share() -> None:
    cluster, clock = kept_cluster(share=0.25)
    await cluster.start(0, 1)
    for nth in range(4):
        await serve(cluster, agent((nth, *PROMPT), session=f"agent {nth}", keep_s=3e9))
    assert cluster.directory.records.status().num_kept == 12
    clock.now += 601.0
    assert (cluster.directory.records.status().num_kept, cluster.directory.records.check()) == (0, [])
    await cluster.stop()


@pytest.mark.parametrize("write", [Write.ALL, Write.DEMOTED])
async def test_blocks_that_decode_made_are_offered_to_cold_tiers_and_come_back(write: Write) -> None:
    """A session goes down a tier while its tool runs: its KV is read from there once the arena has lost it."""
    cluster = LocalCluster(MODEL, SIZES)
    cluster.directory = Directory(
        SIZES.num_slots, block_bytes=LAYOUT.block_bytes, writes={Tier.REDIS: write}, high_water=0.0
    )
    await cluster.start(1, 1)
    writer = ColdWriter(LAYOUT, cluster.arena, cluster.directory, cluster.cold, interval_s=0.01)
    first = await serve(cluster, agent(PROMPT, session="agent", keep_s=60.0))
    while writer.write_some():
        pass
    known = (*PROMPT, *first.token_ids[0])
    names = cover(cluster.router.dispatcher.root_of("default"), known[:128], LAYOUT.block_size)
    assert cluster.cold.exists([name.key for name in names]) == [True] * 8
    cluster.directory.delete([name.key for name in names])
    await press(cluster, 6)
    second = await serve(cluster, agent((*known, 5, 6), session="agent", keep_s=60.0))
    assert found(second) == {Tier.REDIS: 128}
    await cluster.stop()
