import asyncio
import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from deploy.actors.actor_host import LocalHost
from deploy.actors.liveness import Liveness
from deploy.controller import nodes as nodes_module
from deploy.controller import supervised
from deploy.controller.nodes import Nodes
from deploy.controller.supervised import EventLog, Supervision
from deploy.plan.cluster_plan import ClusterPlan, NodeBaseline, NodeConfig
from deploy.plan.config import ClusterConfig
from deploy.plan.machine import RayNode, service_of
from tests.deploy.plan.test_cluster_plan import planned, with_codes
from wire.block_names import digest_of
from wire.errors import ConfigError, InvalidRequest, Unavailable
from wire.pools import Addresses, Shares
from wire.trust.key_ring import Allowance, KeyList, Scope, make_key
from wire.typed_reader import from_json, to_json

A, B = RayNode("a" * 56, "10.0.0.1", is_head=True), RayNode("b" * 56, "10.0.0.2")


class ServiceHost(LocalHost):
    """A host on two nodes, whose services listen where they are told, on port 7 where any will do."""

    def __init__(self) -> None:
        super().__init__()
        self.ray_nodes = [A, B]
        self.configs: list[str] = []
        self.refusals: list[Exception] = []
        self.gate: asyncio.Event | None = None
        self.taken_port = ""

    def launch(self, name: str, target: str, *place: Any) -> None:
        if self.refusals:
            raise self.refusals.pop()
        super().launch(name, target, *place)

    async def start(self, name: str, config_json: str, timeout_s: float) -> str:
        if self.gate is not None:
            await self.gate.wait()
        await super().start(name, config_json, timeout_s)
        address = json.loads(config_json)["block_address"].removesuffix(":0").removesuffix(self.taken_port)
        self.configs.append(config_json)
        return to_json(Addresses(address if ":" in address else f"{address}:7"))


class World:
    """Nodes, their host, and a controller that may die.

    plans: of the workers that there are. coded: the plan of workers with another KV layout.
    """

    def __init__(self, run_dir: Path) -> None:
        self.host = ServiceHost()
        self.events = EventLog(lambda: 0.0)
        self.means = Supervision(self.host, run_dir, self.events)
        self.plan = replace(planned(ClusterConfig(), machine=None), run_dir=str(run_dir))
        self.coded = replace(self.plan, model=with_codes(self.plan.model))
        self.plans = [self.plan]
        self.nodes = Nodes(self.plan, self.means, self.plan_with)
        self.watch = asyncio.create_task(self.nodes.watch())

    def plan_with(self, layout_tag: str) -> ClusterPlan | None:
        return next((plan for plan in self.plans if plan.layout_tag == layout_tag), None)

    async def join(self, node: RayNode, plan: ClusterPlan | None = None) -> NodeBaseline:
        return await self.nodes.join(node, plan or self.plan)

    def controller_dies(self) -> None:
        for task in asyncio.all_tasks() - {asyncio.current_task()}:
            task.cancel()
        self.nodes = Nodes(self.plan, self.means, self.plan_with)
        self.nodes.take_over()
        self.watch = asyncio.create_task(self.nodes.watch())

    async def until(self, text: str) -> None:
        async with asyncio.timeout(5):
            while text not in str(self.events.report()):  # noqa: ASYNC110
                await asyncio.sleep(0.001)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervised, "PROBE_EVERY_S", 0.001)
    monkeypatch.setattr(supervised, "backoff_s", lambda _: 0.001)
    monkeypatch.setattr(nodes_module, "LOOK_EVERY_S", 0.001)
    monkeypatch.setattr(supervised, "PAUSE_S", 0.001)


async def test_workers_of_a_node_share_one_service_on_it(tmp_path: Path) -> None:
    world = World(tmp_path)
    first, second, other = await asyncio.gather(*(world.join(node) for node in (A, A, B)))
    assert first == second
    assert (first.block_address, other.block_address) == ("10.0.0.1:7", "10.0.0.2:7")
    assert world.host.launched == ["node-aaaaaaaa", "node-bbbbbbbb"]
    assert world.host.places == {"node-aaaaaaaa": A.id, "node-bbbbbbbb": B.id}
    await world.nodes.end()
    assert world.host.actors == {}


async def test_a_service_that_does_not_start_is_an_error_and_the_next_worker_tries_again(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.host.failures = [ConfigError("no model folder")]
    failures = await asyncio.gather(world.join(B), world.join(B), return_exceptions=True)
    assert [str(failure) for failure in failures] == ["no model folder"] * 2
    assert world.host.actors == {}
    assert (await world.join(B)).node == B


async def test_a_service_that_cannot_be_launched_is_tried_again_by_the_next_worker(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.host.refusals = [Unavailable("the head does not answer")]
    with pytest.raises(Unavailable, match="the head"):
        await world.join(B)
    assert (await world.join(B)).node == B


async def test_a_node_that_is_lost_amid_joining_is_unavailable(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.host.gate = asyncio.Event()
    joining = asyncio.create_task(world.join(B))
    await asyncio.sleep(0.01)
    world.host.ray_nodes = [A]
    await world.until("the node of node-bbbbbbbb was lost")
    world.host.gate.set()
    with pytest.raises(Unavailable, match="was lost"):
        await joining


async def test_a_service_that_dies_comes_back_on_its_node_at_the_address_that_workers_know(tmp_path: Path) -> None:
    world = World(tmp_path)
    await world.join(B)
    world.host.actors["node-bbbbbbbb"] = Liveness.DEAD
    await world.until("the node-bbbbbbbb is back")
    assert world.host.places["node-bbbbbbbb"] == B.id
    first, second = map(json.loads, world.host.configs)
    assert (first["block_address"], second["block_address"]) == ("10.0.0.2:0", "10.0.0.2:7")
    assert {**first, "block_address": ""} == {**second, "block_address": ""}


async def test_a_node_that_is_closed_has_no_service_and_its_next_worker_makes_one(tmp_path: Path) -> None:
    world = World(tmp_path)
    await asyncio.gather(*(world.join(node) for node in (A, B)))
    assert await world.nodes.find(B.name) == B
    await world.nodes.close(B)
    assert await world.nodes.find(B.name) is None
    assert list(world.host.actors) == ["node-aaaaaaaa"]
    assert (await world.join(B)).node == B


async def test_a_node_that_ray_drains_is_told_once(tmp_path: Path) -> None:
    world = World(tmp_path)
    leaving: list[RayNode] = []

    async def note(node: RayNode) -> None:
        leaving.append(node)

    nodes = Nodes(world.plan, world.means, world.plan_with, note)
    await nodes.join(B, world.plan)
    world.host.ray_nodes = [replace(A, is_leaving=True), replace(B, is_leaving=True)]
    watch = asyncio.create_task(nodes.watch())
    await world.until("Ray drains node bbbbbbbb@10.0.0.2")
    await asyncio.sleep(0.02)
    watch.cancel()
    assert [node.id for node in leaving] == [B.id], "A hosts no worker"


async def test_a_node_that_ray_drains_is_tried_again_until_its_workers_can_be_spared(tmp_path: Path) -> None:
    world = World(tmp_path)
    refusals = [InvalidRequest("worker_id", "at least one decode worker must stay")] * 3
    is_drained = asyncio.Event()

    async def drain(_: RayNode) -> None:
        if refusals:
            raise refusals.pop()
        is_drained.set()

    nodes = Nodes(world.plan, world.means, world.plan_with, drain)
    await nodes.join(B, world.plan)
    world.host.ray_nodes = [A, replace(B, is_leaving=True)]
    watch = asyncio.create_task(nodes.watch())
    async with asyncio.timeout(5):
        await is_drained.wait()
    watch.cancel()
    texts = [event.text for event in world.events.report()]
    refused = [text for text in texts if "is not drained yet" in text]
    assert refused == [f"node {B.name} is not drained yet: worker_id: at least one decode worker must stay"]


async def test_a_service_whose_port_is_taken_tells_later_workers_another_one(tmp_path: Path) -> None:
    world = World(tmp_path)
    assert (await world.join(B)).block_address == "10.0.0.2:7"
    world.host.taken_port = "2:7"
    world.host.actors["node-bbbbbbbb"] = Liveness.DEAD
    await world.until("the node-bbbbbbbb is back")
    await asyncio.sleep(0)
    assert (await world.join(B)).block_address == "10.0.0.:7"
    world.controller_dies()
    assert (await world.join(B)).block_address == "10.0.0.:7"


async def test_a_lost_node_is_forgotten_though_its_service_cannot_come_back(tmp_path: Path) -> None:
    world = World(tmp_path)
    await world.join(B)
    world.host.failures = [Unavailable("the node is dead")] * 1000
    world.host.actors["node-bbbbbbbb"] = Liveness.DEAD
    await world.until("did not start again: the node is dead")
    world.host.ray_nodes = [A]
    await world.until("the node of node-bbbbbbbb was lost")
    assert os.listdir(tmp_path) == ["node-bbbbbbbb.json"]
    world.host.failures = []
    num_launched = len(world.host.launched)
    assert (await world.join(A)).node == A
    assert world.host.launched[num_launched:] == ["node-aaaaaaaa"]


async def test_a_worker_whose_node_is_lost_meanwhile_is_told(tmp_path: Path) -> None:
    world = World(tmp_path)
    await world.join(B)
    world.host.failures = [Unavailable("the node is dead")] * 1000
    world.controller_dies()
    joining = asyncio.create_task(world.join(B))
    await world.until("did not start again")
    world.host.ray_nodes = [A]
    with pytest.raises(Unavailable, match=r"node bbbbbbbb@10\.0\.0\.2 was lost"):
        await joining


async def test_a_later_controller_goes_on_with_the_same_services(tmp_path: Path) -> None:
    world = World(tmp_path)
    baselines = [await world.join(node) for node in (A, B)]
    world.controller_dies()
    assert [await world.join(node) for node in (A, B)] == baselines
    assert world.host.launched == ["node-aaaaaaaa", "node-bbbbbbbb"]
    world.host.actors["node-aaaaaaaa"] = Liveness.DEAD
    await world.until("the node-aaaaaaaa is back")
    await world.nodes.end()
    assert world.host.actors == {}


async def test_a_node_that_is_lost_is_told_no_shares(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervised, "PAUSE_S", 0.0)
    world = World(tmp_path)
    told: list[str] = []

    async def call(name: str, method: str, *arguments: str | int, timeout_s: float) -> str:
        told.append(name)
        raise Unavailable("the node is lost")

    world.host.call = call  # type: ignore[method-assign]
    await world.join(A)
    await asyncio.sleep(0.01)
    assert service_of(A.id) in told
    await world.nodes.close(A)
    await asyncio.sleep(0.01)
    told.clear()
    await asyncio.sleep(0.05)
    assert told == []
    world.watch.cancel()
    await world.nodes.end()


async def test_shares_reach_every_node_now_and_after_a_restart(tmp_path: Path) -> None:
    world = World(tmp_path)
    told: list[tuple[str, str, tuple[str | int, ...]]] = []

    async def call(name: str, method: str, *arguments: str | int, timeout_s: float) -> str:
        told.append((name, method, arguments))
        return "{}"

    world.host.call = call  # type: ignore[method-assign]
    await asyncio.gather(world.join(A), world.join(B))
    await asyncio.sleep(0)
    assert sorted(told) == sorted((service_of(node.id), "set_shares", (to_json(Shares({})),)) for node in (A, B))
    told.clear()
    listed = KeyList((make_key("acme", [Scope.GENERATE], Allowance(arena_share=0.25))[0],))
    plan = world.plan.with_keys(listed)
    await world.nodes.share(plan)
    root = digest_of(plan.router.root_of("acme")).hex()
    assert plan.shares == {root: 0.25}
    assert sorted(told) == sorted(
        (service_of(node.id), "set_shares", (to_json(Shares({root: 0.25})),)) for node in (A, B)
    )
    world.host.actors[service_of(B.id)] = Liveness.DEAD
    await world.until("is back")
    assert [json.loads(config)["shares"] for config in world.host.configs] == [{}, {}, {root: 0.25}]
    world.watch.cancel()
    await world.nodes.end()


def service_for(node: RayNode, plan: ClusterPlan) -> str:
    return service_of(node.id, plan.layout_tag)


async def amid_a_roll(run_dir: Path) -> World:
    """Returns a world whose node B has workers of two KV layouts."""
    world = World(run_dir)
    await world.join(B)
    world.plans.insert(0, world.coded)
    world.host.machine = replace(world.host.machine, memory_bytes=3 << 30, shared_bytes=2 << 30)
    await world.join(B, world.coded)
    return world


async def test_workers_of_another_kv_layout_have_a_service_of_their_own_beside_that_of_the_others(
    tmp_path: Path,
) -> None:
    world = await amid_a_roll(tmp_path)
    first, second = await world.join(B), await world.join(B, world.coded)
    assert world.host.launched == [service_for(B, world.plan), service_for(B, world.coded)]
    assert {*world.host.places.values()} == {B.id}
    assert (first.layout_tag, second.layout_tag) == ("", world.coded.layout_tag)
    assert second.machine == replace(first.machine, shared_bytes=2 << 30), (
        "workers are sized as before, the arena by now"
    )
    old, new = (from_json(NodeConfig, text, "node") for text in world.host.configs)
    assert (old.model, new.model) == (world.plan.model.served, world.coded.model.served)
    assert {old.arena_path, old.store.directory_path}.isdisjoint({new.arena_path, new.store.directory_path})
    assert await world.nodes.find(B.name) == await world.nodes.find(f"{B.name}#{second.layout_tag}") == B
    await world.nodes.close(B)
    assert world.host.actors == {}


@pytest.mark.parametrize("left", ["old", "new"])
async def test_a_service_ends_once_no_worker_has_its_kv_layout(tmp_path: Path, left: str) -> None:
    world = await amid_a_roll(tmp_path)
    stays, goes = (world.plan, world.coded) if left == "old" else (world.coded, world.plan)
    world.plans = [stays]
    await world.until(f"no worker has the KV layout of {service_for(B, goes)} any more: it ends")
    await asyncio.sleep(0.01)
    assert [*world.host.actors] == [service_for(B, stays)]
    world.controller_dies()
    assert (await world.join(B, stays)).layout_tag == stays.layout_tag
    assert len(world.host.launched) == 2


async def test_the_only_node_of_a_cluster_loses_the_service_that_no_worker_uses_and_no_other(tmp_path: Path) -> None:
    world = World(tmp_path)
    alone = [replace(plan, machine=world.host.machine) for plan in (world.plan, world.coded)]
    world.plans = alone[::-1]
    nodes = Nodes(alone[0], world.means, world.plan_with)
    baselines = [await nodes.join(A, plan) for plan in alone]
    assert [one.machine.memory_bytes for one in baselines] == [world.host.machine.memory_bytes] * 2
    world.host.ray_nodes = []
    world.plans = alone[1:]
    watch = asyncio.create_task(nodes.watch())
    await world.until(f"no worker has the KV layout of {service_for(A, world.plan)}")
    await asyncio.sleep(0.02)
    watch.cancel()
    assert [*world.host.actors] == [service_for(A, world.coded)]


async def test_a_worker_that_joins_a_service_that_ends_gets_a_new_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = await amid_a_roll(tmp_path)
    may_end, name = asyncio.Event(), service_for(B, world.plan)
    end = world.host.end

    async def end_late(one: str) -> None:
        await may_end.wait()
        await end(one)

    monkeypatch.setattr(world.host, "end", end_late)
    world.plans = [world.coded]
    await world.until("it ends")
    world.plans = [world.plan, world.coded]
    joining = asyncio.create_task(world.join(B))
    await asyncio.sleep(0.01)
    assert not joining.done()
    may_end.set()
    assert (await joining).layout_tag == ""
    assert world.host.launched[2:] == [name]


async def test_another_controller_takes_both_services_of_a_node_over_and_starts_each_with_its_model(
    tmp_path: Path,
) -> None:
    world = await amid_a_roll(tmp_path)
    before = [await world.join(B, plan) for plan in (world.plan, world.coded)]
    world.controller_dies()
    assert [await world.join(B, plan) for plan in (world.plan, world.coded)] == before
    assert len(world.host.launched) == 2
    for plan in (world.plan, world.coded):
        world.host.configs.clear()
        world.host.actors[service_for(B, plan)] = Liveness.DEAD
        await world.until(f"the {service_for(B, plan)} is back")
        (text,) = world.host.configs
        assert from_json(NodeConfig, text, "node").model == plan.model.served


async def test_a_worker_that_joins_a_service_that_never_starts_again_is_told_and_the_roll_can_go_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = await amid_a_roll(tmp_path)
    name = service_for(B, world.coded)
    world.host.failures = [ConfigError("an arena does not fit")] * 100_000
    world.host.actors[name] = Liveness.DEAD
    world.controller_dies()
    monkeypatch.setattr(nodes_module, "PLACE_S", 0.02)
    monkeypatch.setattr(nodes_module, "SERVICE_START_S", 0.03)
    async with asyncio.timeout(5):
        with pytest.raises(Unavailable, match=f"{name} has not started in time"):
            await world.join(B, world.coded)
    world.plans.remove(world.coded)
    await world.until(f"no worker has the KV layout of {name}")
    world.host.failures = []
    assert (await world.join(B)).layout_tag == ""


async def test_a_node_that_is_lost_loses_the_services_of_all_layouts(tmp_path: Path) -> None:
    world = await amid_a_roll(tmp_path)
    world.host.ray_nodes = [A]
    await world.until(f"the node of {service_for(B, world.plan)}, {service_for(B, world.coded)} was lost")
    await asyncio.sleep(0.01)
    assert world.host.actors == {}
    assert not [name for name in os.listdir(tmp_path) if name.endswith(".baseline")]


async def test_a_service_for_another_layout_that_does_not_start_leaves_the_other_as_it_was(tmp_path: Path) -> None:
    world = World(tmp_path)
    before = await world.join(B)
    world.plans.insert(0, world.coded)
    world.host.failures = [ConfigError("an arena does not fit")]
    with pytest.raises(ConfigError, match="does not fit"):
        await world.join(B, world.coded)
    assert [*world.host.actors] == [service_for(B, world.plan)]
    assert await world.join(B) == before
