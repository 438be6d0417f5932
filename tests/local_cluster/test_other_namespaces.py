"""Causes of blocks that are kept under another namespace of their tenant, and of no other tenant."""

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import redis

from engine.model.hash_model import HashModel
from kv_store.tiers.cold_tier import ColdTier
from kv_store.tiers.files_tier import FilesTier
from kv_store.tiers.redis_tier import RedisTier
from router.disaggregation import PrefillReason
from router.requests.attempt import PreparedRequest
from router.requests.tokenizing import NO_PREFIXES, PublicPrefixes
from tests.faults.rest import at_rest
from tests.harness import assembled_worker, local_cluster
from tests.harness.cluster import collect
from tests.harness.faulty_cluster import FaultyCluster
from tests.harness.local_cluster import Sizes
from tests.kv_store.names import MAC_KEY
from tests.local_cluster.test_local_cluster import LAYOUT, PROMPT, ask
from wire.block_names import cover
from wire.convert import misses_from_pb
from wire.ids import PUBLIC, BlockKey
from wire.layout import KVLayout
from wire.pb import cluster_pb2, worker_pb2
from wire.served_model import ServedNamespace
from wire.tier import Cause, Miss, StoredBlock
from wire.trust.key_ring import ANYONE, Allowance, Key, Scope, make_key

ACME = make_key("acme", [Scope.GENERATE], Allowance())[0]
SECRET = bytes(32)
AMPLE_S = 30.0
OTHER_FILES = "another model fingerprint: files of the model or kernels of this version are others"
Open = Callable[[KVLayout], ColdTier]
NoteSource = Callable[[PreparedRequest, worker_pb2.PromptSource], None]


@dataclass(frozen=True)
class Release:
    """A cluster's model. cold: opens a tier that outlives clusters; earlier: what the secret has served before."""

    cold: Open
    fingerprint: bytes = b"o" * 32
    layout: KVLayout = LAYOUT
    earlier: tuple[ServedNamespace, ...] = ()
    prefixes: PublicPrefixes = NO_PREFIXES

    @property
    def namespace(self) -> ServedNamespace:
        return ServedNamespace("twin", self.fingerprint.hex(), self.layout.encode().hex())

    def after(self, *others: "Release") -> "Release":
        return replace(self, earlier=tuple(one.namespace for one in others))

    @asynccontextmanager
    async def running(self) -> AsyncIterator["Served"]:
        with pytest.MonkeyPatch.context() as patch:
            for module in (local_cluster, assembled_worker):
                patch.setattr(module, "FINGERPRINT", self.fingerprint)
            model, sizes = HashModel(self.layout, vocab_size=300), Sizes(earlier=self.earlier, prefixes=self.prefixes)
            cluster, cold = FaultyCluster(model, sizes), self.cold(self.layout)
            patch.setattr(cluster, "cold", cold)
            await cluster.start(1, 1)
            try:
                yield Served(cluster, cold)
            finally:
                await cluster.stop()
                cold.close()

    async def serve(self, *tenants: Key, prompt: tuple[int, ...] = PROMPT) -> None:
        """Serves a prompt to tenants; all their blocks go to the tier that outlives this."""
        async with self.running() as served:
            for tenant in tenants:
                await served.misses(tenant, prompt)
            served.cluster.move_to_cold()


@dataclass(frozen=True)
class Served:
    """A running cluster, and its cold tier."""

    cluster: FaultyCluster
    cold: ColdTier

    async def explain(self, tenant: Key = ANYONE, prompt: tuple[int, ...] = PROMPT) -> cluster_pb2.MissExplanation:
        """Serves a prompt, and explains what was not cached of it."""
        opened = self.cluster.router.dispatcher.open(ask(prompt, 4), AMPLE_S, tenant)
        await collect(opened)
        await at_rest(self.cluster)
        listed = self.cluster.router.dispatcher.recent.list(cluster_pb2.ListRequestsRequest(limit=1))
        asked = cluster_pb2.ExplainMissesRequest(request_id=listed.requests[0].request_id)
        return await self.cluster.router.administration.explain(asked)

    async def misses(self, tenant: Key = ANYONE, prompt: tuple[int, ...] = PROMPT) -> list[Miss]:
        """The causes of a prompt's runs of uncached blocks, without their ages."""
        explained = await self.explain(tenant, prompt)
        assert not explained.problems
        return [replace(run.miss, age_s=0.0) for run in misses_from_pb(explained.request.misses)]


@pytest.fixture(params=["files", pytest.param("redis", marks=pytest.mark.redis)])
def cold(request: pytest.FixtureRequest, tmp_path: Path) -> Open:
    if request.param == "files":
        return lambda layout: FilesTier(str(tmp_path), layout, MAC_KEY, AMPLE_S, 1 << 30)
    url = request.getfixturevalue("redis_url") + "?db=10"
    with redis.Redis.from_url(url) as client:
        client.flushdb()
    return lambda layout: RedisTier(url, layout, MAC_KEY, AMPLE_S)


@pytest.fixture
def files(tmp_path: Path) -> Open:
    return lambda layout: FilesTier(str(tmp_path), layout, MAC_KEY, AMPLE_S, 1 << 30)


CHANGES = {
    "fingerprint": ({"fingerprint": b"n" * 32}, OTHER_FILES),
    "dtype": (
        {"fingerprint": b"n" * 32, "layout": replace(LAYOUT, dtype="float16")},
        "another model fingerprint and KV layout: dtype float32 then, float16 now (model.dtype)",
    ),
    "block_size": (
        {"layout": replace(LAYOUT, block_size=32)},
        "another KV layout: block_size 16 then, 32 now (model.block_size)",
    ),
    "kv_policy": (
        {"layout": replace(LAYOUT, window=64, num_sinks=4)},
        "another KV layout: window none then, 64 now (model.kv_policy); num_sinks 0 then, 4 now (model.kv_policy)",
    ),
}


@pytest.mark.parametrize("change", CHANGES)
async def test_a_block_of_the_same_tenant_before_a_change_is_told_with_the_field(change: str, cold: Open) -> None:
    changes, expected = CHANGES[change]
    old = Release(cold)
    await old.serve(ANYONE)
    async with replace(old, **changes).after(old).running() as served:  # type: ignore[arg-type]
        [first, *_] = await served.misses()
        tier = served.cold.tier
        assert first == Miss(Cause.OTHER_NAMESPACE, f"{tier} has it under {expected}")
        [first, *_] = await served.misses(prompt=tuple(reversed(PROMPT)))
        assert first.cause is Cause.NEVER_SEEN


async def test_a_block_of_another_tenant_is_never_told(cold: Open) -> None:
    old = Release(cold)
    await old.serve(ACME)
    async with replace(old, fingerprint=b"n" * 32).after(old).running() as served:
        assert [one.cause for one in await served.misses()] == [Cause.NEVER_SEEN, Cause.PARTIAL]
        assert (await served.misses(ACME))[0].cause is Cause.OTHER_NAMESPACE


async def test_no_key_of_another_tenant_is_asked_for(files: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    old = Release(files)
    await old.serve(ACME, ANYONE)
    roots = [old.namespace.root_of(SECRET, tenant) for tenant in ("default", "acme")]
    own, others = ({name.key for name in cover(root, PROMPT, LAYOUT.block_size)} for root in roots)
    async with replace(old, fingerprint=b"n" * 32).after(old).running() as served:
        asked, describe = set[bytes](), served.cold.describe

        def watched(keys: Sequence[BlockKey]) -> list[StoredBlock]:
            asked.update(keys)
            return describe(keys)

        monkeypatch.setattr(served.cold, "describe", watched)
        await served.misses()
    assert asked & own
    assert not asked & others


async def test_the_first_missing_block_is_told_behind_a_prefix_that_is_cached(files: Open) -> None:
    old = Release(files)
    await old.serve(ANYONE)
    async with replace(old, fingerprint=b"n" * 32).after(old).running() as served:
        await served.misses(prompt=PROMPT[:32])
        explained = await served.explain()
    [first, *_] = misses_from_pb(explained.request.misses)
    assert (first.first_token, first.num_blocks, first.miss.cause) == (32, 4, Cause.OTHER_NAMESPACE)


async def test_the_namespace_that_was_served_last_is_told(files: Open) -> None:
    oldest, old = Release(files), Release(files, layout=replace(LAYOUT, block_size=32))
    for release in (oldest, old):
        await release.serve(ANYONE)
    async with Release(files, fingerprint=b"n" * 32).after(old, oldest).running() as served:
        [first, *_] = await served.misses()
    assert "block_size 32 then, 16 now" in first.how


async def test_a_public_block_is_told_to_any_tenant(files: Open) -> None:
    old = with_public_part(Release(files))
    await old.serve(ACME)
    async with with_public_part(replace(old, fingerprint=b"n" * 32).after(old)).running() as served:
        [first, *_] = await served.misses(prompt=(*PROMPT[:48], *PROMPT[:20]))
        assert first.cause is Cause.OTHER_NAMESPACE
        [first, *_] = await served.misses()
        assert first.cause is Cause.NEVER_SEEN, "a tenant's own blocks begin here"
        [first, *_] = await served.misses(ACME)
        assert first.cause is Cause.OTHER_NAMESPACE


def with_public_part(release: Release) -> Release:
    """Declares the first 48 tokens public."""
    root = release.namespace.root_of(SECRET, PUBLIC)
    return replace(release, prefixes=PublicPrefixes(root, (PROMPT[:48],)))


async def test_what_is_gone_from_every_tier_is_not_told(files: Open, tmp_path: Path) -> None:
    old = Release(files)
    await old.serve(ANYONE)
    remove_files(tmp_path)
    async with replace(old, fingerprint=b"n" * 32).after(old).running() as served:
        assert (await served.misses())[0].cause is Cause.NEVER_SEEN


def remove_files(folder: Path) -> None:
    for file in folder.glob("??/*"):
        file.unlink()


async def test_a_known_cause_stays(files: Open) -> None:
    old = Release(files)
    await old.serve(ANYONE)
    async with replace(old, fingerprint=b"n" * 32).after(old).running() as served:
        await served.misses()
        await served.cluster.router.administration.clear(cluster_pb2.CacheRequest(tenant="default"))
        assert (await served.misses())[0].cause is Cause.EVICTED


def found_all(request: PreparedRequest, note_source: NoteSource, source: worker_pb2.PromptSource) -> None:
    note_source(request, worker_pb2.PromptSource(cached_tokens=source.cached_tokens))


def told_nothing(request: PreparedRequest, _note: NoteSource, _source: worker_pb2.PromptSource) -> None:
    request.journal.plan(PrefillReason.ABSENT)


@pytest.mark.parametrize("next_attempt", [found_all, told_nothing])
async def test_a_request_has_no_miss_to_explain_after_an_attempt_that(
    next_attempt: Callable[[PreparedRequest, NoteSource, worker_pb2.PromptSource], None],
    files: Open,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    old = Release(files)
    await old.serve(ANYONE)
    async with replace(old, fingerprint=b"n" * 32).after(old).running() as served:
        note_source = PreparedRequest.note_source

        def note_two(request: PreparedRequest, source: worker_pb2.PromptSource) -> None:
            """Notes the source of an attempt, and then what the next attempt does."""
            note_source(request, source)
            next_attempt(request, note_source, source)

        monkeypatch.setattr(PreparedRequest, "note_source", note_two)
        assert await served.misses() == []
