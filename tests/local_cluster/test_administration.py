"""Listing and clearing what a whole cluster holds, beside requests that run."""

import asyncio
from collections.abc import AsyncIterator, Mapping
from pathlib import Path

import pytest

from kv_store.node.directory import Directory
from kv_store.tiers.cold_writer import ColdWriter
from kv_store.tiers.files_tier import FilesTier
from tests.harness.answer import Reader
from tests.harness.cluster import collect, until
from tests.harness.local_cluster import LocalCluster, Sizes
from tests.kv_store.names import MAC_KEY
from tests.local_cluster.test_local_cluster import LAYOUT, MODEL, PROMPT, ask, at_rest
from tests.local_cluster.test_nodes import Nodes
from wire.convert import tiers_from_pb
from wire.errors import InvalidRequest, ModelNotFound, Unavailable
from wire.ids import DEFAULT_TENANT
from wire.pb import cluster_pb2
from wire.pb import inference_pb2 as pb
from wire.tier import Tier, Write
from wire.trust.key_ring import ANYONE, Allowance, Key, KeyList, Scope, make_key

ACME = make_key("acme", [Scope.GENERATE], Allowance(arena_share=0.25))[0]


class Administered(LocalCluster):
    """A cluster whose node writes each block to a folder."""

    def __init__(self, folder: Path) -> None:
        super().__init__(MODEL, Sizes())
        self.directory = Directory(512, block_bytes=LAYOUT.block_bytes, writes={Tier.FILES: Write.ALL})
        self.files = FilesTier(str(folder), LAYOUT, MAC_KEY, timeout_s=30.0, max_bytes=1 << 30)
        self.cold = self.files  # type: ignore[assignment]
        self.writer = ColdWriter(LAYOUT, self.arena, self.directory, self.files, interval_s=0.01)
        self.router.keys.replace(KeyList((ACME,)))

    async def serve(self, tenant: Key = ANYONE, prompt: tuple[int, ...] = PROMPT) -> Mapping[str, int]:
        """Serves a prompt, and waits until its full blocks are in the folder; returns the cached tokens by tier."""
        output = await collect(self.router.dispatcher.open(ask(prompt, 8), 60.0, tenant))
        assert output.token_ids[0] == MODEL.oracle(prompt, 8)
        await at_rest(self)
        await until(lambda: not self.directory.lease_cold(Tier.FILES, 1, 0.001).blocks)
        return {tier: num for tier, num in tiers_from_pb(output.complete.usage.cached_tokens).items() if num}

    async def count(self, **asked: object) -> dict[tuple[str, str], int]:
        return blocks_of(await self.router.administration.count(cluster_pb2.CacheRequest(**asked)))  # type: ignore[arg-type]

    async def clear(self, **asked: object) -> cluster_pb2.CacheContents:
        return await self.router.administration.clear(cluster_pb2.CacheRequest(**asked))  # type: ignore[arg-type]


def blocks_of(contents: cluster_pb2.CacheContents) -> dict[tuple[str, str], int]:
    assert contents.problems == []
    return {(row.tier, row.tenant): row.blocks for row in contents.rows}


@pytest.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[Administered]:
    one = Administered(tmp_path)
    one.writer.start()
    await one.start(1, 1)
    yield one
    await one.stop()
    one.writer.stop()
    one.files.close()
    assert one.directory.records.check() == []


async def test_what_is_held_is_told_by_tenant_and_tier(cluster: Administered) -> None:
    await cluster.serve()
    await cluster.serve(ACME, PROMPT[:40])
    contents = await cluster.router.administration.count(cluster_pb2.CacheRequest())
    assert blocks_of(contents) == {
        ("host", "default"): 7, ("host", "acme"): 3, ("files", "default"): 6, ("files", "acme"): 2,
    }  # fmt: skip
    assert {row.model for row in contents.rows} == {"twin"}
    assert {row.tenant: row.share for row in contents.rows} == {"acme": 0.25, "default": 0.0}
    assert all(row.bytes and 0 <= row.newest_s <= row.oldest_s < 60 for row in contents.rows)
    assert await cluster.count(tenant="acme") == {("host", "acme"): 3, ("files", "acme"): 2}
    assert await cluster.count(tenant="nobody") == {}


async def test_a_tenant_is_cleared_everywhere_and_others_are_not(cluster: Administered) -> None:
    await cluster.serve()
    await cluster.serve(ACME)
    cleared = await cluster.clear(tenant="acme")
    assert blocks_of(cleared) == {("host", "acme"): 7, ("files", "acme"): 6}
    assert cleared.dropped_pages == 24, "the pages of both tenants, of the prompt at both workers"
    assert await cluster.count() == {("host", "default"): 7, ("files", "default"): 6}
    assert await cluster.serve(ACME) == {}
    assert await cluster.serve() == {Tier.HOST: 96}


async def test_a_prompt_is_cleared_by_its_tokens_or_its_text(cluster: Administered) -> None:
    other, text = (*PROMPT[:32], *range(200, 264)), "a prompt of twenty-one words " * 3
    for prompt in (PROMPT, other, (*text.encode(),)):
        await cluster.serve(prompt=prompt)
    asked = pb.TokenIds(ids=PROMPT)
    assert await cluster.count(token_ids=asked) == {("host", "default"): 7, ("files", "default"): 6}
    cleared = await cluster.clear(token_ids=asked)
    assert (cleared.prompt_blocks, cleared.dropped_pages) == (7, 12)
    assert await cluster.count(token_ids=asked) == {}
    assert await cluster.serve(prompt=other) == {}, "the two blocks that it shared are gone, and what is behind them"
    cleared = await cluster.clear(text=text)
    assert blocks_of(cleared)["files", "default"] == len(text) // 16
    assert await cluster.serve(prompt=(*text.encode(),)) == {}


async def test_a_prompt_of_another_tenant_is_out_of_reach(cluster: Administered) -> None:
    await cluster.serve(ACME)
    assert await cluster.count(token_ids=pb.TokenIds(ids=PROMPT)) == {}
    assert blocks_of(await cluster.clear(token_ids=pb.TokenIds(ids=PROMPT), tenant="beta")) == {}
    assert (await cluster.serve(ACME)) == {Tier.DEVICE: 96}


async def test_everything_is_cleared_with_blocks_of_no_known_tenant(cluster: Administered, tmp_path: Path) -> None:
    await cluster.serve()
    stranger = tmp_path / "ab" / ("ab" * 32)
    stranger.parent.mkdir(exist_ok=True)
    stranger.write_bytes(b"BTKV of another cluster")
    assert (await cluster.count())["files", ""] == 1
    await cluster.clear(model="twin")
    assert await cluster.count() == {("files", ""): 1}
    assert blocks_of(await cluster.clear(everything=True)) == {("files", ""): 1}
    assert not stranger.exists()


@pytest.mark.parametrize("after", range(0, 12, 2))
@pytest.mark.parametrize("num_prefill", [0, 1])
async def test_requests_that_run_get_the_same_tokens_whenever_it_is(
    num_prefill: int, after: int, cluster: Administered
) -> None:
    await cluster.resize(num_prefill, 1)
    await cluster.serve()
    prompts = [(*PROMPT[:32], number, *PROMPT[32:]) for number in range(4)]
    readers = [Reader(cluster.router.dispatcher.open(ask(prompt), 60.0).outbox) for prompt in prompts]
    await readers[0].read_tokens(after)
    clearing = asyncio.create_task(cluster.clear(tenant=DEFAULT_TENANT))
    for prompt, reader in zip(prompts, readers, strict=True):
        [choice] = await reader.read_all()
        assert choice.token_ids == MODEL.oracle(prompt, 40)
    assert (await clearing).problems == []
    await at_rest(cluster)
    await cluster.clear(tenant=DEFAULT_TENANT)
    assert await cluster.count() == {}
    assert await cluster.serve() == {}


async def test_a_hand_off_whose_held_blocks_are_cleared_is_computed_again(cluster: Administered) -> None:
    """Clears between each two calls to the directory."""
    calls = 0
    for at in range(12):
        calls, met = 0, cluster.directory.lease

        def lease(*arguments: object, at: int = at, met: object = met) -> object:
            nonlocal calls
            calls += 1
            if calls == at:
                cluster.directory.contents.clear(
                    [key for first in range(0, 512, 64) for key in cluster.directory.contents.keys(first, 64)]
                )
            return met(*arguments)  # type: ignore[operator]

        cluster.directory.lease = lease  # type: ignore[assignment, method-assign]
        output = await cluster.generate(ask((at, *PROMPT)))
        assert output.token_ids[0] == MODEL.oracle((at, *PROMPT), 40)
        cluster.directory.lease = met  # type: ignore[method-assign]
        await at_rest(cluster)


async def test_each_node_is_asked() -> None:
    nodes = Nodes(MODEL, over_tcp=False)
    await nodes.start(1, 1)
    await nodes.generate(ask())
    await until(lambda: not nodes.is_held)
    contents = await nodes.router.administration.count(cluster_pb2.CacheRequest())
    assert {(row.node_id, row.tier) for row in contents.rows} == {("a", "host"), ("b", "host")}
    await nodes.router.administration.clear(cluster_pb2.CacheRequest(tenant="default"))
    assert not (await nodes.router.administration.count(cluster_pb2.CacheRequest())).rows
    await nodes.stop()


async def test_a_node_that_does_not_answer_is_a_problem(cluster: Administered) -> None:
    await cluster.serve()
    for transport in cluster.transports.values():
        transport.kill()
    cleared = await cluster.clear(tenant="default")
    assert (len(cleared.problems), [*cleared.rows]) == (3, []), "of two workers, and of their node"
    await cluster.enlist()
    with pytest.raises(Unavailable):
        await cluster.clear(tenant="default")


@pytest.mark.parametrize(
    ("asked", "param"),
    [
        ({}, "everything"),
        ({"everything": True, "tenant": "acme"}, "everything"),
        ({"tenant": "a/b"}, "tenant"),
        ({"tenant": ""}, "tenant"),
        ({"text": ""}, "text"),
        ({"token_ids": pb.TokenIds(ids=[])}, "token_ids"),
        ({"token_ids": pb.TokenIds(ids=[10**6])}, "token_ids"),
    ],
)
async def test_what_selects_nothing_right_is_refused(
    asked: dict[str, object], param: str, cluster: Administered
) -> None:
    await cluster.serve()
    with pytest.raises(InvalidRequest) as raised:
        await cluster.clear(**asked)
    assert raised.value.ids["param"] == param
    assert (await cluster.count())["host", "default"] == 7


async def test_a_model_that_is_not_known_is_refused(cluster: Administered) -> None:
    with pytest.raises(ModelNotFound):
        await cluster.clear(model="other")


async def test_two_prompts_are_compared_by_tokens_blocks_and_where_these_are(cluster: Administered) -> None:
    first, second = "You are a helpful agent. " * 4 + "Monday", "You are a helpful agent. " * 4 + "Tuesday"
    await cluster.serve(prompt=(*first.encode(),))
    await cluster.clear(token_ids=pb.TokenIds(ids=first[:16].encode()))
    compared = await cluster.router.administration.compare(
        cluster_pb2.ComparePromptsRequest(first=first, second=second)
    )
    assert (compared.first_tokens, compared.second_tokens, compared.shared_tokens) == (106, 107, 100)
    assert (compared.first_text, compared.second_text) == (" agent. Monday", " agent. Tuesday")
    assert (compared.block_size, compared.shared_blocks) == (16, 6)
    assert {row.tier: [*row.places] for row in compared.held} == {"host": [1, 2, 3, 4, 5], "files": [1, 2, 3, 4, 5]}
    assert not (await cluster.router.administration.compare(
        cluster_pb2.ComparePromptsRequest(first=first, second=second, tenant="acme")
    )).held  # fmt: skip


async def test_prompts_that_share_nothing_and_equal_ones(cluster: Administered) -> None:
    compare = cluster.router.administration.compare
    apart = await compare(cluster_pb2.ComparePromptsRequest(first="one", second="two"))
    assert (apart.shared_tokens, apart.shared_blocks, apart.first_text) == (0, 0, "one")
    same = await compare(cluster_pb2.ComparePromptsRequest(first="the same", second="the same"))
    assert (same.shared_tokens, same.shared_blocks) == (8, 1), "the tail has one name, too"
    for asked in ({"first": "a"}, {"first": "a", "second": "b", "tenant": "A/B"}):
        with pytest.raises(InvalidRequest):
            await compare(cluster_pb2.ComparePromptsRequest(**asked))
