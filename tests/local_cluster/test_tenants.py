"""Two tenants on one cluster: one finds no block of the other in any tier, but for the public part of a prompt."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from kv_store.node.directory import Directory
from kv_store.tiers.cold_writer import ColdWriter
from kv_store.tiers.files_tier import FilesTier
from kv_store.tiers.memory_tier import MemoryTier
from router.requests.tokenizing import NO_PREFIXES, PublicPrefixes
from tests.harness.cluster import collect, until
from tests.harness.local_cluster import LocalCluster, Sizes
from tests.kv_store.names import MAC_KEY
from tests.local_cluster.test_local_cluster import LAYOUT, MODEL, PROMPT, ask, at_rest
from tests.local_cluster.test_nodes import Nodes
from wire.block_names import cover
from wire.convert import tiers_from_pb
from wire.ids import BlockKey, NamespaceRoot, WorkerId
from wire.tier import COLD_TIERS, Tier, Write
from wire.trust.key_ring import ANYONE, Allowance, Key, Scope, make_key

ACME, BETA = (make_key(name, [Scope.GENERATE], Allowance())[0] for name in ("acme", "beta"))
OTHERS = ANYONE
PREFIXES = PublicPrefixes(NamespaceRoot(b"p" * 32), (PROMPT[:16], PROMPT[:48], (*PROMPT[:80], 7)))


@pytest.fixture(params=[0, 48])
def num_public(request: pytest.FixtureRequest) -> int:
    """Tokens that all tenants share: none, or the longest public prefix that the prompt has whole."""
    num: int = request.param
    return num


def sizes_for(num_public: int) -> Sizes:
    return Sizes(prefixes=PREFIXES if num_public else NO_PREFIXES)


def found(tier: Tier, num_tokens: int) -> dict[str, int]:
    return {tier: num_tokens} if num_tokens else {}


async def hits(cluster: LocalCluster, tenant: Key, prompt: tuple[int, ...] = PROMPT) -> Mapping[str, int]:
    """Serves a prompt, whose tokens must be right, and returns the cached ones of it by tier."""
    output = await collect(cluster.router.dispatcher.open(ask(prompt, 8), 60.0, tenant))
    assert output.token_ids[0] == MODEL.oracle(prompt, 8)
    await at_rest(cluster)
    return {tier: num for tier, num in tiers_from_pb(output.complete.usage.cached_tokens).items() if num}


def keys_of(cluster: LocalCluster, tenant: str) -> list[BlockKey]:
    return [name.key for name in cover(cluster.router.dispatcher.root_of(tenant), PROMPT, LAYOUT.block_size)]


@pytest.mark.parametrize("num_prefill", [0, 1])
async def test_on_the_device(num_prefill: int, num_public: int) -> None:
    async with LocalCluster.running(MODEL, num_prefill, 1, sizes_for(num_public)) as cluster:
        assert await hits(cluster, ACME) == {}
        assert await hits(cluster, BETA) == found(Tier.DEVICE, num_public)
        assert await hits(cluster, ACME) == {Tier.DEVICE: 96}
        assert await hits(cluster, BETA) == {Tier.DEVICE: 96}


async def test_in_the_arena(num_public: int) -> None:
    async with LocalCluster.running(MODEL, 0, 1, sizes_for(num_public)) as cluster:
        assert await hits(cluster, ACME) == {}
        await cluster.enlist("d1")
        assert await hits(cluster, BETA) == found(Tier.HOST, num_public)
        await cluster.enlist("d2")
        assert await hits(cluster, ACME) == {Tier.HOST: 96}
        assert not set(keys_of(cluster, "acme")) & set(keys_of(cluster, "beta"))


async def test_in_the_arena_of_another_node(num_public: int) -> None:
    nodes = Nodes(MODEL, over_tcp=True, sizes=sizes_for(num_public))
    await nodes.start(1, 1)
    output = await collect(nodes.router.dispatcher.open(ask(), 60.0, ACME))
    longer = (*PROMPT, *output.token_ids[0], 5, 6)
    other = await collect(nodes.router.dispatcher.open(ask(longer), 60.0, BETA))
    own = await collect(nodes.router.dispatcher.open(ask(longer), 60.0, ACME))
    assert sum(tiers_from_pb(other.complete.usage.cached_tokens).values()) == num_public
    assert tiers_from_pb(own.complete.usage.cached_tokens)["peers"] == 32
    assert other.token_ids[0] == own.token_ids[0] == MODEL.oracle(longer, 40)
    await until(lambda: not nodes.is_held)
    await nodes.stop()


@pytest.mark.parametrize("tier", COLD_TIERS)
async def test_in_a_cold_tier_that_outlives_the_cluster(
    tier: Tier, num_public: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    redis = MemoryTier(LAYOUT)
    for tenant, num_found in ((ACME, 0), (BETA, num_public), (OTHERS, num_public), (BETA, 96), (ACME, 96)):
        cluster = LocalCluster(MODEL, sizes_for(num_public))
        cluster.directory = Directory(512, block_bytes=LAYOUT.block_bytes, writes={tier: Write.ALL})
        files = FilesTier(str(tmp_path), LAYOUT, MAC_KEY, timeout_s=30.0, max_bytes=1 << 30)
        cold = redis if tier is Tier.REDIS else files
        monkeypatch.setattr(cluster, "cold", cold)
        writer = ColdWriter(LAYOUT, cluster.arena, cluster.directory, cold)
        writer.start()
        await cluster.start(1, 1)
        assert (await hits(cluster, tenant)).get(tier, 0) == num_found
        await cluster.stop()
        writer.finish(30.0)
        writer.stop()
        files.close()


async def test_a_prompt_that_breaks_off_within_a_public_prefix_shares_none_of_it() -> None:
    sizes = Sizes(prefixes=replace(PREFIXES, token_ids=(PROMPT[:48],)))
    async with LocalCluster.running(MODEL, 0, 1, sizes) as cluster:
        assert await hits(cluster, ACME) == {}
        other = (*PROMPT[:40], *range(200, 230))
        assert await hits(cluster, BETA, other) == {}
        assert await hits(cluster, ACME, other) == {}


async def test_a_probe_of_a_worker_shares_nothing() -> None:
    async with LocalCluster.running(MODEL, 0, 1, sizes_for(48)) as cluster:
        await hits(cluster, ACME)
        output = await collect(cluster.router.dispatcher.open_on(WorkerId("d0"), ask(PROMPT, 8), 60.0))
        assert sum(tiers_from_pb(output.complete.usage.cached_tokens).values()) == 0


async def test_the_index_of_the_router_knows_prefixes_by_tenant() -> None:
    async with LocalCluster.running(MODEL, 2, 1) as cluster:
        await hits(cluster, ACME)
        found = {await _worker_of(cluster, tenant) for tenant in (ACME, ACME, ACME)}
        assert len(found) == 1, "sent where its prefix is"
        assert await hits(cluster, BETA) == {}


async def _worker_of(cluster: LocalCluster, tenant: Key) -> str:
    output = await collect(cluster.router.dispatcher.open(ask(PROMPT, 2), 60.0, tenant))
    return output.complete.timeline.prefill_worker
