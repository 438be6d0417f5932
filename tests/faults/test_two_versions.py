"""A roll to other weights: each answer is whole of one version of the model, and so is each block."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace

import pytest

from engine.model.batch import CausalModel
from engine.model.hash_model import HashModel
from kv_store.node.arena import Arena
from kv_store.node.directory import Directory
from tests.faults.rest import at_rest
from tests.harness.answer import Reader
from tests.harness.assembled_worker import FINGERPRINT
from tests.harness.cluster import WAIT_S, until
from tests.harness.faulty_cluster import FaultyCluster
from tests.harness.faulty_model import FaultyModel
from tests.harness.local_cluster import Parts, Sizes
from tests.local_cluster.test_local_cluster import LAYOUT, PROMPT, ask, worker
from wire.convert import misses_from_pb
from wire.errors import ModelReplaced, RouterLeaving
from wire.ids import DEFAULT_TENANT, WorkerId
from wire.load.fairness import OUTPUT_COST
from wire.pb import cluster_pb2
from wire.pb import inference_pb2 as pb
from wire.pools import PoolSizes, WorkerState
from wire.tier import Cause
from worker.assembly import Tiers

OLD, NEW = (HashModel(LAYOUT, vocab_size=300, seed=seed) for seed in (0, 1))
NEW_FINGERPRINT = b"n" * 32


class Versions(FaultyCluster):
    """A cluster amid a roll: workers that are not among the first have the new weights."""

    first: Sequence[str] = ()
    layout = LAYOUT

    def _parts(self, name: str) -> Parts:
        parts = super()._parts(name)
        if name in self.first or not self.first:
            return parts
        self.models[name] = FaultyModel(NEW)
        return replace(parts, model=self.models[name], fingerprint=NEW_FINGERPRINT)

    async def begin(self) -> Reader:
        """Begins a stream at d0, which pauses after its first tokens."""
        begun = self.open(ask(max_tokens=200))
        await begun.read_tokens(5)
        self.models["d0"].pause()
        return begun

    async def roll(self, *new: str, without: Sequence[str] = (), decode: int = 1) -> None:
        """Has new workers beside the present ones, in pools of this size."""
        self.first = self.first or tuple(self.listed)
        old = self.router.config.model
        self.router.members.sizes = PoolSizes(0, decode)
        layout_hex = self.layout.encode().hex()
        rolled = replace(old, fingerprint_hex=NEW_FINGERPRINT.hex(), layout_hex=layout_hex)
        self.router.versions.replace((rolled, old))
        await self.enlist(*(name for name in self.listed if name not in without), *new)

    @property
    def needed(self) -> list[str]:
        return list(self.router.dispatcher.needed)

    async def serves(self, name: str) -> None:
        """Waits until a worker has a request."""
        await until(lambda: self.router.members[name].num_choices)  # type: ignore[index]


class Layouts(Versions):
    """A roll to weights with another KV layout: the new workers have an arena of their own on the same node."""

    layout = replace(LAYOUT, num_layers=LAYOUT.num_layers + 1)

    def __init__(self, model: CausalModel, sizes: Sizes) -> None:
        super().__init__(model, sizes)
        block_bytes, num_slots = self.layout.block_bytes, sizes.num_slots
        self.new = Directory(num_slots, self.clock, block_bytes=block_bytes)
        self.stores = Tiers(Arena.anonymous(block_bytes, num_slots), self.new, [])

    def _parts(self, name: str) -> Parts:
        parts = super()._parts(name)
        if parts.fingerprint is None:
            return parts
        self.models[name] = FaultyModel(IN_NEW_LAYOUT)
        return replace(parts, model=self.models[name], tiers=self.stores, node_id="#0f1e2d")


IN_NEW_LAYOUT = HashModel(Layouts.layout, vocab_size=300, seed=1)


async def test_two_kv_layouts_are_served_from_two_arenas_of_a_node() -> None:
    async with Layouts.running(OLD, 1, 1, Sizes()) as cluster:
        begun = cluster.open(ask(max_tokens=200))
        await begun.read_tokens(5)
        cluster.models["d0"].pause()
        await cluster.roll("p1", "d1")
        for _ in range(2):
            [new] = await cluster.answer(ask())
            assert new.token_ids == IN_NEW_LAYOUT.oracle(PROMPT, 40)
        assert cluster.router.members.num_arena_blocks == {"": 512, "#0f1e2d": 512}
        cluster.models["d0"].go_on()
        [old] = await begun.read_all()
        assert old.token_ids == OLD.oracle(PROMPT, 200)
        assert cluster.directory.records.status().num_holds == cluster.new.records.status().num_holds == 0
        await at_rest(cluster)
        await cluster.roll(without=("p0", "d0"))
        await until(lambda: set(cluster.router.members.num_arena_blocks) == {"#0f1e2d"})
        assert cluster.new.records.check() == []


async def test_answers_and_blocks_are_of_one_version() -> None:
    async with Versions.running(OLD, 1, 1, Sizes()) as cluster:
        begun = await cluster.begin()
        await cluster.roll("p1", "d1")
        [new] = await cluster.answer(ask())
        assert new.token_ids == NEW.oracle(PROMPT, 40)
        assert worker(await cluster.status(), "p1").computed_prompt_tokens == len(PROMPT), "nothing is shared"
        assert cluster.needed == ["d0"]
        cluster.models["d0"].go_on()
        [old] = await begun.read_all()
        assert old.token_ids == OLD.oracle(PROMPT, 200)
        assert cluster.needed == []
        await cluster.roll(without=("p0", "d0"))
        [new] = await cluster.answer(ask())
        assert new.token_ids == NEW.oracle(PROMPT, 40)
        await at_rest(cluster)


async def test_no_worker_is_needed_for_the_version_that_workers_to_come_will_have() -> None:
    async with Versions.running(OLD, 0, 1, Sizes()) as cluster:
        begun = await cluster.begin()
        assert cluster.needed == []
        await cluster.roll("d1")
        assert cluster.needed == ["d0"]
        new = cluster.open(ask(max_tokens=200))
        await cluster.serves("d1")
        assert cluster.needed == ["d0"], "d1 is the only worker of the wanted version"
        cluster.models["d0"].go_on()
        await begun.read_all()
        await new.read_all()
        assert cluster.needed == []
        await at_rest(cluster)


async def test_the_last_worker_of_a_version_that_drains_takes_its_open_requests_and_no_new_ones() -> None:
    async with Versions.running(OLD, 1, 1, Sizes()) as cluster:
        cluster.models["p0"].pause()
        begun = cluster.open(ask())
        await cluster.serves("p0")
        await cluster.roll("p1", "d1")
        await cluster.enlist(*cluster.listed, draining="d0")
        [new] = await cluster.answer(ask())
        assert (new.token_ids, cluster.needed) == (NEW.oracle(PROMPT, 40), ["d0"])
        cluster.models["p0"].go_on()
        async with asyncio.timeout(WAIT_S):
            [old] = await begun.read_all()
        assert (old.token_ids, cluster.needed) == (OLD.oracle(PROMPT, 40), [])
        await at_rest(cluster)


async def test_of_several_last_workers_the_one_that_does_not_drain_is_needed() -> None:
    async with Versions.running(OLD, 0, 2, Sizes()) as cluster:
        for name in ("d0", "d1"):
            cluster.models[name].pause()
        begun = [cluster.open(ask()) for _ in range(2)]
        for name in ("d0", "d1"):
            await cluster.serves(name)
        await cluster.roll("d2")
        assert cluster.needed == []
        await cluster.enlist(*cluster.listed, draining="d0")
        assert cluster.needed == ["d1"]
        cluster.router.members[WorkerId("d1")].state = WorkerState.DRAINING
        assert sorted(cluster.needed) == ["d0", "d1"]
        for name in ("d0", "d1"):
            cluster.models[name].go_on()
        for reader in begun:
            await reader.read_all()
        assert cluster.needed == []
        await at_rest(cluster)


async def test_a_stream_whose_worker_dies_goes_on_at_another_of_its_version() -> None:
    async with Versions.running(OLD, 1, 2, Sizes()) as cluster:
        begun = cluster.open(ask(max_tokens=200))
        await begun.read_tokens(5)
        [serving] = [name for name in ("d0", "d1") if cluster.router.members[name].num_choices]  # type: ignore[index]
        cluster.models[serving].pause()
        await cluster.roll("p1", "d2", "d3", without=("p0",))
        cluster.crash(serving)
        [old] = await begun.read_all()
        assert old.token_ids == OLD.oracle(PROMPT, 200)
        await at_rest(cluster)


async def test_a_last_worker_that_drains_by_itself_is_tried_once_and_a_stream_of_another_waits_for_its_end() -> None:
    """Its controller has it drain while another of its version serves, which dies then."""
    async with Versions.running(OLD, 0, 2, Sizes()) as cluster:
        for name in ("d0", "d1"):
            cluster.models[name].pause()
        begun = [cluster.open(ask()) for _ in range(2)]
        for name in ("d0", "d1"):
            await cluster.serves(name)
        await cluster.roll("d2")
        await cluster.enlist(*cluster.listed, draining="d1")
        draining = asyncio.create_task(cluster.workers["d1"].service.attempts.drain(WAIT_S))
        await until(lambda: cluster.workers["d1"].service.attempts.state is WorkerState.DRAINING)
        cluster.crash("d0")
        await cluster.someone_died.wait()
        await asyncio.sleep(0.2)  # the time of a hundred attempts
        assert cluster.needed == []
        cluster.models["d1"].go_on()
        await draining
        await cluster.enlist("d2")
        ends = await asyncio.gather(*(one.read_all() for one in begun), return_exceptions=True)
        [replaced] = [one for one in ends if isinstance(one, ModelReplaced)]
        assert len(replaced.timeline.spans) < 20, "its attempts are few"
        [[whole]] = [one for one in ends if not isinstance(one, BaseException)]
        assert whole.token_ids == OLD.oracle(PROMPT, 40)
        await at_rest(cluster)


async def test_a_stream_ends_with_its_reason_once_no_worker_of_its_version_is_left() -> None:
    async with Versions.running(OLD, 1, 1, Sizes()) as cluster:
        begun = await cluster.begin()
        await cluster.roll("p1", "d1", without=("p0",))
        cluster.crash("d0")
        await cluster.someone_died.wait()
        await cluster.roll()
        with pytest.raises(ModelReplaced, match="the last worker with the answer's model is gone"):
            await begun.read_all()
        await at_rest(cluster)


async def test_both_versions_serve_until_the_new_one_has_as_many_decode_workers_as_asked_for() -> None:
    async with Versions.running(OLD, 0, 2, Sizes()) as cluster:
        await cluster.roll("d2", decode=2)
        for name in ("d0", "d1", "d2"):
            cluster.models[name].pause()
        readers = [cluster.open(ask()) for _ in range(3)]
        for name in ("d0", "d1", "d2"):
            await cluster.serves(name)
        await cluster.roll("d3", decode=2)
        readers += [cluster.open(ask()) for _ in range(3)]
        for name in ("d0", "d1", "d2"):
            cluster.models[name].go_on()
        told = [(await reader.read_all())[0].token_ids for reader in readers]
        assert sorted(told[:3]) == sorted([OLD.oracle(PROMPT, 40)] * 2 + [NEW.oracle(PROMPT, 40)])
        assert told[3:] == [NEW.oracle(PROMPT, 40)] * 3
        await at_rest(cluster)


async def test_a_worker_is_asked_by_itself_whatever_its_version() -> None:
    async with Versions.running(OLD, 1, 1, Sizes()) as cluster:
        await cluster.roll("p1", "d1")
        new, old = cluster.router.versions
        for name, model, version in (("p0", OLD, old), ("p1", NEW, new), ("d0", OLD, old), ("d1", NEW, new)):
            opened = cluster.router.dispatcher.open_on(name, ask(), 60.0)  # type: ignore[arg-type]
            assert version.num_open == 1
            told = [response async for response in opened.outbox]
            assert [token for response in told for token in response.chunk.token_ids] == model.oracle(PROMPT, 40)
            assert told[0].fingerprint == version.model.version_hex


def blocks_of(contents: cluster_pb2.CacheContents) -> list[tuple[int, list[int]]]:
    """Counts the blocks of each namespace in the arena, and lists their places in the prompt."""
    return [(row.blocks, sorted(row.places)) for row in contents.rows if row.tier == "host"]


async def test_blocks_of_a_prompt_are_counted_and_cleared_in_both_versions() -> None:
    text = "a prompt of some words " * 6
    request = pb.GenerateRequest(text=text, sampling_params=pb.SamplingParams(temperature=0.0, max_tokens=8))
    async with Versions.running(OLD, 1, 1, Sizes()) as cluster:
        await cluster.answer(request)
        await cluster.roll("p1", "d1")
        await cluster.answer(request)
        await at_rest(cluster)
        administration, asked = cluster.router.administration, cluster_pb2.CacheRequest(text=text)
        counted = await administration.count(asked)
        both = [(counted.prompt_blocks, [*range(counted.prompt_blocks)])] * 2
        assert blocks_of(counted) == both
        compared = await administration.compare(cluster_pb2.ComparePromptsRequest(first=text, second=text))
        assert (compared.shared_blocks, [sorted(row.places) for row in compared.held]) == (
            counted.prompt_blocks,
            [places for _, places in both],
        )
        cleared = await administration.clear(asked)
        assert blocks_of(cleared) == both
        assert blocks_of(await administration.count(asked)) == []


async def test_a_miss_of_a_block_that_the_other_version_has_is_told_to_be_of_another_fingerprint() -> None:
    async with Versions.running(OLD, 1, 1, Sizes()) as cluster:
        await cluster.answer(ask())
        await cluster.roll("p1", "d1")
        await cluster.answer(ask())
        await at_rest(cluster)
        listed = cluster.router.dispatcher.recent.list(cluster_pb2.ListRequestsRequest(limit=1)).requests
        asked = cluster_pb2.ExplainMissesRequest(request_id=listed[0].request_id)
        [first, *_] = misses_from_pb((await cluster.router.administration.explain(asked)).request.misses)
        assert (first.miss.cause, first.miss.how.partition(":")[0]) == (
            Cause.OTHER_NAMESPACE,
            "host has it under another model fingerprint",
        )


async def test_blocks_of_both_versions_are_known_to_be_the_tenants() -> None:
    async with Versions.running(OLD, 1, 1, Sizes()) as cluster:
        await cluster.answer(ask())
        await cluster.roll("p1", "d1")
        await cluster.answer(ask())
        rows = (await cluster.router.administration.count(cluster_pb2.CacheRequest(tenant="default"))).rows
        assert [(one.tenant, one.model) for one in rows if one.tier == "host"] == [("default", "twin")] * 2


async def test_a_tenant_has_one_fair_share_of_both_versions() -> None:
    async with Versions.running(OLD, 1, 1, Sizes()) as cluster:
        begun, shares = await cluster.begin(), cluster.router.shares
        before = shares.spent(DEFAULT_TENANT)
        await cluster.roll("p1", "d1")
        [new] = await cluster.answer(ask())
        assert new.token_ids == NEW.oracle(PROMPT, 40)
        assert shares.spent(DEFAULT_TENANT) >= before + 40 * OUTPUT_COST, "what the new version has cost counts, too"
        cluster.models["d0"].go_on()
        await begun.read_all()
        await at_rest(cluster)


async def test_a_version_that_comes_back_still_has_its_open_requests() -> None:
    async with Versions.running(OLD, 1, 1, Sizes()) as cluster:
        begun = await cluster.begin()
        await cluster.roll("p1", "d1")
        new, old = [one.model for one in cluster.router.versions]
        cluster.router.versions.replace((new,))
        assert cluster.needed == []
        cluster.router.versions.replace((new, old))
        assert cluster.needed == ["d0"]
        cluster.models["d0"].go_on()
        await begun.read_all()
        assert cluster.needed == []
        await at_rest(cluster)


async def test_a_router_that_has_just_started_sends_an_answer_of_another_version_to_another_router() -> None:
    async with Versions.running(OLD, 0, 1, Sizes()) as cluster:
        request = ask(seed=7)
        request.resume.MergeFrom(pb.Resume(choices=[pb.ResumedChoice()], fingerprint=NEW_FINGERPRINT.hex()))
        with pytest.raises(RouterLeaving, match="was told no versions of the model yet"):
            cluster.open(request)
        await cluster.roll("d1")
        [new] = await cluster.answer(request)
        assert new.token_ids == NEW.oracle(PROMPT, 40)


async def test_a_request_at_a_router_that_has_just_started_is_of_the_version_that_it_started_with() -> None:
    cluster = Versions(OLD, Sizes())
    cluster.first = ("d0",)
    cluster.router.start()
    begun = cluster.open(ask())
    await cluster.roll("d0", "d1")
    [old] = await begun.read_all()
    assert old.token_ids == OLD.oracle(PROMPT, 40)
    await at_rest(cluster)
    await cluster.stop()


def resumed(begun: Reader, fingerprint: str) -> pb.GenerateRequest:
    """What a client asks another router, which gets the tokens so far."""
    known = [pb.ResumedChoice(token_ids=one.token_ids) for one in begun.choices]
    request = ask(max_tokens=200, seed=7)
    request.resume.MergeFrom(pb.Resume(choices=known, fingerprint=fingerprint))
    return request


async def test_an_answer_goes_on_at_another_router_in_its_version_or_not_at_all() -> None:
    async with Versions.running(OLD, 1, 1, Sizes()) as cluster:
        opened = cluster.router.dispatcher.open(ask(max_tokens=200, seed=7), 60.0)
        told = []

        async def noted() -> AsyncIterator[pb.GenerateResponse]:
            async for response in opened.outbox:
                told.append(response.fingerprint)
                yield response

        begun = Reader(noted())
        await begun.read_tokens(5)
        cluster.models["d0"].pause()
        assert (told[0], {*told[1:]} - {""}) == (FINGERPRINT.hex(), set())
        await cluster.roll("p1", "d1")
        again = cluster.router.dispatcher.open(resumed(begun, told[0]), 60.0)
        await cluster.serves("d0")
        cluster.models["d0"].go_on()
        rest = [token async for response in again.outbox for token in response.chunk.token_ids]
        assert [*begun.choices[0].token_ids, *rest] == OLD.oracle(PROMPT, 200)
        with pytest.raises(ModelReplaced, match="is served no more"):
            cluster.open(resumed(begun, "ab" * 32))
        await begun.read_all()
        await at_rest(cluster)
