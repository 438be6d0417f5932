import asyncio
import json
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from deploy.actors.actor_host import LocalHost
from deploy.actors.liveness import Liveness
from deploy.controller import fleet as fleet_module
from deploy.controller import supervised
from deploy.controller import workers as workers_module
from deploy.controller.fleet import Fleet
from deploy.controller.pools import Pools, PoolsRecord
from deploy.controller.supervised import EventLog, Supervision
from deploy.controller.workers import RouterMembers
from deploy.plan.cluster_plan import ClusterPlan, NodeBaseline
from deploy.plan.config import ClusterConfig
from deploy.plan.machine import Machine, RayNode, Resources, service_of
from deploy.plan.sizing import WORKER_BYTES
from deploy.processes.atomic_file import AtomicFile
from deploy.roll.revisions import Revisions
from deploy.scaling.demand import START_S
from router.config import RouterSettings
from tests.deploy.plan.test_cluster_plan import MACHINE, planned, with_codes
from wire.errors import (
    ConfigError,
    DeadlineExceeded,
    InvalidRequest,
    ModelError,
    Overtaken,
    Unavailable,
    WorkerNotFound,
)
from wire.ids import WorkerId
from wire.pools import Drained, MemberList, MembersAnswer, PoolSizes, Role, Worker, WorkerState
from wire.served_model import ServedModel
from wire.typed_reader import from_json, to_json
from worker.config import WorkerConfig

PLAN = planned(ClusterConfig())
D0, D1, D2 = (WorkerId(f"decode-{number}") for number in range(3))
P0, P1, P2, P3 = (WorkerId(f"prefill-{number}") for number in range(4))


class FakeRouter:
    """Remembers what it was told; `away` makes it deaf."""

    def __init__(self) -> None:
        self.told: list[list[Worker]] = []
        self.sizes = PoolSizes(0, 0)
        self.refused: dict[WorkerId, str] = {}
        self.needed: tuple[WorkerId, ...] = ()
        self.models: list[ServedModel] = []
        self.fields: set[str] = set()
        self.away = False

    def set_members(self, members_json: str) -> str:
        if self.away:
            raise Unavailable("away")
        self.fields = set(json.loads(members_json))
        members = from_json(MemberList, members_json, "members")
        self.sizes = members.sizes
        self.models = list(members.models)
        self.told.append(list(members.workers))
        return to_json(MembersAnswer(self.refused, self.needed))

    @property
    def known(self) -> set[str]:
        return {one.id for one in self.told[-1]}


class FleetHost(LocalHost):
    """A host that has a router, too."""

    def __init__(self) -> None:
        super().__init__()
        self.router = FakeRouter()

    async def call(self, name: str, method: str, *arguments: str | int, timeout_s: float) -> str:
        if name != "router":
            return await super().call(name, method, *arguments, timeout_s=timeout_s)
        assert method == "set_members"
        return self.router.set_members(str(*arguments))


class SlowHost(FleetHost):
    """Its first prefill worker takes its time to end, until it `may_end`."""

    def __init__(self) -> None:
        super().__init__()
        self.may_end = asyncio.Event()

    async def end(self, name: str) -> None:
        if name == P0:
            await self.may_end.wait()
        await super().end(name)


class BrokenHost(FleetHost):
    """Fails in a way that nobody thought of, once for each of `surprises`."""

    def __init__(self, surprises: list[Exception]) -> None:
        super().__init__()
        self.surprises = surprises

    async def probe(self, name: str) -> Liveness:
        if self.surprises:
            raise self.surprises.pop()
        return await super().probe(name)


class LocalRecord(AtomicFile):
    """Keeps the text, unless its disk is full."""

    path = Path("record")

    def __init__(self) -> None:
        self.text: str | None = None
        self.is_full = False

    def read(self) -> bytes | None:
        return None if self.text is None else self.text.encode()

    def try_write(self, content: bytes) -> bool:
        if not self.is_full:
            self.text = content.decode()
        return not self.is_full


class World:
    """A fleet, what it works with, and a clock that tests move."""

    def __init__(self, prefill: int, decode: int, host: FleetHost | None = None, plan: ClusterPlan = PLAN) -> None:
        self.now_s = 0.0
        self.plan = plan
        self.host = host or FleetHost()
        self.router = self.host.router
        self.events = EventLog(lambda: self.now_s)
        self.pools = Pools(PoolsRecord(sizes=PoolSizes(prefill, decode)))
        self.record, self.revisions = LocalRecord(), LocalRecord()
        self.machine = Machine(memory_bytes=8 << 30, shared_bytes=0, num_cores=2)
        self.node_is_up = asyncio.Event()
        self.node_is_up.set()
        self.fleet = self._make_fleet()

    def controller_dies(self, pools: Pools | None = None) -> None:
        """Another takes over, from what this one has recorded, or these pools, and the host still has."""
        assert self.record.text is not None
        for task in asyncio.all_tasks() - {asyncio.current_task()}:
            task.cancel()
        self.pools = pools or Pools.from_json(self.record.text)
        self.fleet = self._make_fleet()

    def _make_fleet(self) -> Fleet:
        return Fleet(
            pools=self.pools,
            plan=self.plan,
            join=self._join,
            means=Supervision(self.host, Path(), self.events, lambda: self.now_s),
            record=self.record,
            revisions=Revisions(self.plan, self.revisions),
            inspect=lambda: self.machine,
        )

    async def _join(self, node: RayNode, plan: ClusterPlan) -> NodeBaseline:
        await self.node_is_up.wait()
        return NodeBaseline(node, MACHINE, layout_tag=plan.layout_tag)

    @asynccontextmanager
    async def running(self) -> AsyncIterator["World"]:
        task = asyncio.create_task(self.fleet.run())
        try:
            yield self
        finally:
            task.cancel()
            await self.fleet.workers.end()

    async def settled(self) -> None:
        await self.fleet.settle(5)

    async def scaled(self, prefill: int | None, decode: int | None) -> PoolSizes:
        return await self.fleet.scaled(await self.fleet.resize(prefill, decode), 5)

    async def refused(self, prefill: int | None, decode: int | None) -> None:
        with pytest.raises(ConfigError):
            await self.fleet.resize(prefill, decode)

    async def drained(self, worker_id: WorkerId) -> None:
        self.fleet.drain(worker_id)
        await self.fleet.drained(worker_id, 5)

    async def silent(self, worker_id: WorkerId, for_s: int) -> None:
        """The worker does not answer when it is probed, once a second."""
        self.host.actors[worker_id] = Liveness.SILENT
        await self.fleet.workers.probe(worker_id)
        for _ in range(for_s):
            self.now_s += 1
            await self.fleet.workers.probe(worker_id)


async def until(holds: Callable[[], bool]) -> None:
    for _ in range(2000):
        if holds():
            return
        await asyncio.sleep(0.001)
    pytest.fail("it has not come to that")


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet_module, "PROBE_EVERY_S", 0.005)
    monkeypatch.setattr(workers_module, "ASK_EVERY_S", 0.005)
    monkeypatch.setattr(supervised, "PAUSE_S", 0.005)


async def test_workers_start_and_the_router_hears_of_them() -> None:
    async with World(1, 1).running() as world:
        await world.settled()
        assert world.router.known == {P0, D0}
        assert [one.address for one in world.router.told[-1]] == ["local:prefill-0", "local:decode-0"]
    assert world.host.actors == {}


async def test_workers_are_launched_at_once_and_go_to_work_when_the_node_is_up() -> None:
    world = World(1, 1)
    world.node_is_up.clear()
    async with world.running():
        await until(lambda: world.host.launched == [P0, D0])
        with pytest.raises(DeadlineExceeded):
            await world.fleet.settle(0.05)
        assert world.fleet.workers.start_duration.learned_s is None
        world.now_s += 24.0
        world.node_is_up.set()
        await world.settled()
        assert START_S < world.fleet.workers.start_duration.mean_s <= 24.0, "the time of a start is learned"


async def test_a_worker_that_does_not_start_is_an_error_with_its_reason() -> None:
    world = World(1, 1)
    world.host.failures = [ModelError("no such model")]
    async with world.running():
        with pytest.raises(Unavailable, match="did not start: no such model"):
            await world.fleet.settle(5)


async def test_a_resource_that_no_node_has_is_an_error_that_names_it_and_a_node_that_joins_is_used() -> None:
    plan = planned(ClusterConfig.load(None, {"worker": {"decode": {"resources": {"decode": 1}}}}))
    world = World(1, 1, plan=plan)
    async with world.running():
        with pytest.raises(Unavailable, match="worker decode-0 did not start: none of the 1 Ray nodes has decode: 1,"):
            await world.fleet.settle(5)
        world.host.ray_nodes.append(RayNode("b", "10.0.0.2", {"decode": 1.0}))
        world.now_s += 10
        await world.settled()
        assert {worker.id: world.host.places[worker.id] for worker in world.pools} == {P0: "head", D1: "b"}


async def test_of_several_nodes_each_that_hosts_workers_tells_its_room() -> None:
    async with World(1, 1).running() as world:
        await world.settled()
        world.machine = replace(world.machine, memory_bytes=0)
        await world.refused(None, 2)
        other = RayNode("b", "10.0.0.2")
        world.host.ray_nodes.append(other)
        for node in world.host.ray_nodes:
            world.host.actors[service_of(node.id)] = Liveness.ANSWERING
        world.host.machine = replace(MACHINE, memory_bytes=0)
        with pytest.raises(ConfigError, match="2 more decode workers do not fit into the memory of 2 nodes: at most 0"):
            await world.fleet.resize(None, 3)
        world.host.machine = replace(MACHINE, memory_bytes=1 << 30)
        assert await world.scaled(None, 3) == PoolSizes(1, 3)
        world.host.machine = replace(MACHINE, memory_bytes=0)
        assert await world.scaled(None, 2) == PoolSizes(1, 2)
        del world.host.actors[service_of(other.id)]
        assert await world.scaled(None, 3) == PoolSizes(1, 3), "of a node without workers nothing is known"


async def test_a_start_that_fails_is_tried_again() -> None:
    world = World(0, 1)
    world.host.failures = [Unavailable("not now")]
    async with world.running():
        with pytest.raises(Unavailable):
            await world.settled()
        world.now_s += 1
        await world.settled()
        assert world.router.known == {D1}


async def test_scaling_up_and_down() -> None:
    async with World(1, 1).running() as world:
        await world.settled()
        assert await world.scaled(None, 2) == PoolSizes(1, 2)
        assert await world.scaled(0, None) == PoolSizes(0, 2)
        assert world.router.known == {D0, D1}
        assert world.host.drained == [P0]
        assert set(world.host.actors) == {D0, D1}


def members(world: World) -> list[list[tuple[str, Role, WorkerState]]]:
    return [[(one.id, one.role, one.state) for one in told] for told in world.router.told]


async def test_a_worker_changes_its_role_in_place_of_a_start() -> None:
    async with World(2, 1).running() as world:
        await world.settled()
        world.router.told.clear()
        world.host.served_as.clear()
        assert await world.scaled(1, 2) == PoolSizes(1, 2)
        assert (world.host.served_as, world.host.launched, world.host.drained) == ([(P1, "decode")], [P0, P1, D0], [])
        ready, decode, prefill = WorkerState.READY, Role.DECODE, Role.PREFILL
        others = (P0, prefill, ready), (D0, decode, ready)
        first, *_, last = members(world)
        assert set(first) == {*others, (P1, prefill, WorkerState.DRAINING)}, (
            "it takes no more prompts before it changes"
        )
        assert set(last) == {*others, (P1, decode, ready)}
        assert "worker prefill-1 serves decode now, after 0.0 s" in str(world.events.report())


async def test_workers_whose_roles_ask_for_different_things_are_started_and_drained() -> None:
    plan = planned(ClusterConfig.load(None, {"worker": {"decode": {"num_threads": 2}}}))
    async with World(2, 1, plan=plan).running() as world:
        await world.settled()
        assert await world.scaled(1, 2) == PoolSizes(1, 2)
        assert (world.host.launched, world.host.drained) == ([P0, P1, D0, D1], [P1])


class RefusingHost(FleetHost):
    """Workers refuse to change their role, or are of a release before that knows no change."""

    async def call(self, name: str, method: str, *arguments: str | int, timeout_s: float) -> str:
        if method == "serve_as" and not name.startswith(str(arguments[0])):
            raise ConfigError("no attribute serve_as")
        return await super().call(name, method, *arguments, timeout_s=timeout_s)


async def test_a_worker_that_refuses_to_change_is_drained_and_replaced() -> None:
    async with World(2, 1, RefusingHost()).running() as world:
        await world.settled()
        assert await world.scaled(1, 2) == PoolSizes(1, 2)
        await until(lambda: world.router.known == {P0, D0, D1})
        assert world.host.drained == [P1]
        assert "worker prefill-1 does not change its role: no attribute serve_as" in str(world.events.report())


async def test_a_worker_that_dies_while_it_changes_is_replaced() -> None:
    async with World(2, 1).running() as world:
        await world.settled()
        world.host.keep_busy(P1)
        order = await world.fleet.resize(1, 2)
        await until(lambda: world.pools.has(P1, WorkerState.CHANGING))
        world.host.actors[P1] = Liveness.DEAD
        world.host.finish(P1)
        assert await world.fleet.scaled(order, 5) == PoolSizes(1, 2)
        assert world.router.known == {P0, D0, D1}


async def test_an_order_that_is_reversed_amid_a_change_brings_the_same_worker_back() -> None:
    async with World(2, 1).running() as world:
        await world.settled()
        world.host.keep_busy(P1)
        await world.fleet.resize(1, 2)
        await until(lambda: world.pools.has(P1, WorkerState.CHANGING))
        back = asyncio.create_task(world.scaled(2, 1))
        await until(lambda: world.pools.sizes == PoolSizes(2, 1))
        world.host.finish(P1)
        assert await back == PoolSizes(2, 1)
        assert world.router.known == {P0, P1, D0}
        assert (world.host.served_as[-2:], world.host.drained) == ([(P1, "decode"), (P1, "prefill")], [])
        assert world.host.launched == [P0, P1, D0], "none starts anew"


async def test_a_change_that_another_controller_has_begun_is_brought_to_its_end() -> None:
    world = World(2, 1)
    async with world.running():
        await world.settled()
        world.host.keep_busy(P1)
        await world.fleet.resize(1, 2)
        await until(lambda: world.pools.has(P1, WorkerState.CHANGING))
        world.controller_dies()
        await world.fleet.workers.take_over()
        async with world.running():
            await until(lambda: bool(world.router.told))
            world.host.finish(P1)
            await world.settled()
            assert world.pools[P1] == Worker(P1, Role.DECODE, "local:prefill-1", WorkerState.READY)
            assert world.host.launched == [P0, P1, D0]


async def test_without_a_record_a_worker_serves_again_what_its_name_tells() -> None:
    world = World(2, 1)
    async with world.running():
        await world.settled()
        await world.scaled(1, 2)
        world.controller_dies(Pools.recovered(PoolSizes(1, 1), world.host.names()))
        world.host.served_as.clear()
        await world.fleet.workers.take_over()
        async with world.running():
            await world.settled()
            assert set(world.host.served_as) == {(P0, "prefill"), (P1, "prefill"), (D0, "decode")}
            assert world.pools.sizes == PoolSizes(2, 1)


async def test_an_order_that_another_overtakes_ends_with_an_error_that_names_the_other() -> None:
    async with World(1, 2).running() as world:
        await world.settled()
        world.node_is_up.clear()  # no start comes to its end
        first = asyncio.create_task(world.scaled(None, 3))
        await until(lambda: D2 in world.pools)
        assert await world.scaled(None, 1) == PoolSizes(1, 1)
        with pytest.raises(Overtaken, match="overtaken by a later order: decode 1"):
            await first


async def test_a_start_that_an_order_stopped_is_told_as_no_failure(caplog: pytest.LogCaptureFixture) -> None:
    async with World(1, 1).running() as world:
        await world.settled()
        world.node_is_up.clear()
        await world.fleet.resize(None, 2)
        await until(lambda: D1 in world.host.actors)
        await world.scaled(None, 1)
        world.host.failures = [Unavailable("it was ended")]
        with caplog.at_level(logging.INFO):
            world.node_is_up.set()
            await until(lambda: not world.host.failures)
            await world.settled()
        assert "did not start" not in caplog.text + str(world.events.report())


async def test_orders_for_different_pools_and_the_same_order_twice_do_not_overtake_each_other() -> None:
    async with World(1, 1).running() as world:
        await world.settled()
        orders = [await world.fleet.resize(2, None), await world.fleet.resize(None, 2), await world.fleet.resize(2, 2)]
        told = [await world.fleet.scaled(order, 5) for order in reversed(orders)]
        assert told == [PoolSizes(2, 2)] * 3


async def test_an_order_is_done_though_the_other_pool_is_not() -> None:
    async with World(1, 2).running() as world:
        await world.settled()
        world.host.keep_busy(P0)
        world.fleet.drain(P0)
        assert await world.scaled(None, 1) == PoolSizes(0, 1)


async def test_a_drain_overtakes_the_size_asked_for_and_is_overtaken_by_none() -> None:
    async with World(0, 2).running() as world:
        await world.settled()
        world.host.keep_busy(D0)
        order = await world.fleet.resize(None, 3)
        world.fleet.drain(D0)
        with pytest.raises(Overtaken, match="decode 2"):
            await world.fleet.scaled(order, 5)
        later = await world.fleet.resize(None, 1)
        world.host.finish(D0)
        await world.fleet.drained(D0, 5)
        assert await world.fleet.scaled(later, 5) == PoolSizes(0, 1)


@pytest.mark.parametrize("decode", [3, 1])
async def test_the_outcome_of_an_order_is_told_after_a_takeover(decode: int) -> None:
    world = World(1, 2)
    async with world.running():
        await world.settled()
        orders = [await world.fleet.resize(None, size) for size in (4, decode)]
        world.controller_dies()
        await world.fleet.workers.take_over()
        async with world.running():
            assert await world.fleet.resize(None, decode) == orders[1], "given again, it is the same order"
            assert await world.fleet.scaled(orders[1], 5) == PoolSizes(1, decode)
            with pytest.raises(Overtaken, match=f"decode {decode}"):
                await world.fleet.scaled(orders[0], 5)


async def test_workers_that_never_start_give_an_order_up_with_the_size_that_was_reached() -> None:
    world = World(1, 1)
    async with world.running():
        await world.settled()
        world.host.failures = [Unavailable("no memory")] * 3
        order = await world.fleet.resize(None, 4)
        words = "decode stays at 1 of the 4 workers asked for: worker decode-3 did not start: no memory"
        with pytest.raises(Unavailable, match=words):
            await world.fleet.scaled(order, 5)
        assert words in str(world.events.report())
        world.now_s += 100
        await world.settled()
        assert set(world.host.actors) == {P0, D0}
        world.controller_dies()
        with pytest.raises(Unavailable, match=words):
            await world.fleet.scaled(order, 5)


async def test_workers_that_would_not_fit_are_refused_before_any_starts() -> None:
    async with World(1, 1).running() as world:
        await world.settled()
        world.host.memory = {P0: 1 << 30, D0: 2 << 30}
        told = world.record.text
        with pytest.raises(ConfigError, match="6 more workers take 2 GiB of memory each, and 7 GiB are left for them"):
            await world.fleet.resize(2, 6)
        assert (world.pools.sizes, world.host.launched, world.record.text) == (PoolSizes(1, 1), [P0, D0], told)
        order, _ = await asyncio.gather(world.fleet.resize(2, None), world.refused(None, 4))
        assert await world.fleet.scaled(order, 5) == PoolSizes(2, 1)
        world.machine = replace(world.machine, memory_bytes=0)
        assert await world.scaled(0, None) == PoolSizes(0, 1)


async def test_the_router_is_told_the_sizes_whatever_workers_there_are() -> None:
    """The one worker does not start: the pool keeps none, and what it is asked to be changes nothing for now."""
    world = World(0, 1)
    world.host.failures = [Unavailable("not now")]
    async with world.running():
        with pytest.raises(Unavailable):
            await world.settled()
        await until(lambda: world.router.sizes == PoolSizes(0, 1))
        await world.fleet.resize(0, 2)
        await until(lambda: world.router.sizes == PoolSizes(0, 2))
        assert world.router.told[-1] == []


async def test_the_router_knows_of_a_drain_before_it_begins() -> None:
    async with World(0, 2).running() as world:
        await world.settled()
        world.host.keep_busy(D1)
        await world.fleet.resize(None, 1)
        with pytest.raises(DeadlineExceeded):
            await world.fleet.settle(0.05)
        assert [(one.id, one.state) for one in world.router.told[-1]] == [
            (D0, WorkerState.READY),
            (D1, WorkerState.DRAINING),
        ]
        world.host.finish(D1)
        await world.settled()
        assert world.router.known == {D0}


async def test_a_dead_worker_is_replaced() -> None:
    async with World(1, 1).running() as world:
        await world.settled()
        world.host.actors[P0] = Liveness.DEAD
        await world.fleet.workers.probe(P0)
        await world.settled()
        assert world.router.known == {P1, D0}
        assert "worker prefill-0 was lost" in str(world.events.report())


async def test_a_start_that_fails_in_an_unexpected_way_is_tried_again_too() -> None:
    world = World(0, 1)
    world.host.failures = [ValueError("the name is taken")]
    async with world.running():
        with pytest.raises(Unavailable, match=r"decode-0 did not start: .*the name is taken"):
            await world.settled()
        world.now_s += 1
        await world.settled()
        assert world.router.known == {D1}


async def test_a_worker_that_is_slow_to_end_holds_up_its_own_replacement_only() -> None:
    host = SlowHost()
    async with World(1, 1, host).running() as world:
        await world.settled()
        world.host.actors[P0] = Liveness.DEAD
        await world.fleet.workers.probe(P0)
        world.host.actors[D0] = Liveness.DEAD
        await until(lambda: D1 in world.host.actors)
        assert P1 not in world.host.actors
        host.may_end.set()
        await world.settled()
        assert world.router.known == {P1, D1}


async def test_a_worker_that_is_not_wanted_any_more_does_not_start_after_a_burial() -> None:
    host = SlowHost()
    async with World(1, 1, host).running() as world:
        await world.settled()
        world.host.actors[P0] = Liveness.DEAD
        await world.fleet.workers.probe(P0)
        await until(lambda: P1 in world.pools)
        await world.scaled(0, None)
        host.may_end.set()
        await world.settled()
        assert set(world.host.actors) <= {P0, D0}


async def test_the_end_of_a_fleet_waits_for_workers_that_are_slow_to_end() -> None:
    host = SlowHost()
    async with World(1, 1, host).running() as world:
        await world.settled()
        world.host.actors[P0] = Liveness.DEAD
        await world.fleet.workers.probe(P0)
        await asyncio.sleep(0)
        asyncio.get_running_loop().call_soon(host.may_end.set)
    assert host.actors == {}


async def test_an_unforeseen_error_does_not_end_the_care_for_workers() -> None:
    async with World(1, 1, BrokenHost([RuntimeError("no such thing")])).running() as world:
        await world.settled()
        world.host.actors[P0] = Liveness.DEAD
        await until(lambda: P1 in world.host.actors)
        assert "no such thing" in str(world.events.report())


async def test_a_silent_worker_gets_time() -> None:
    async with World(1, 1).running() as world:
        await world.settled()
        await world.silent(P0, 29)
        assert P0 in world.pools
        world.host.actors[P0] = Liveness.ANSWERING
        await world.fleet.workers.probe(P0)
        await world.silent(P0, 31)
        assert P0 not in world.pools
        await world.settled()
        assert P0 not in world.host.actors


async def test_no_worker_is_taken_for_dead_because_the_controller_slept() -> None:
    async with World(1, 1).running() as world:
        await world.settled()
        for worker_id in (P0, D0):
            await world.silent(worker_id, 1)
        world.now_s += 3600
        for worker_id in (P0, D0):
            await world.fleet.workers.probe(worker_id)
        assert {P0, D0} <= {worker.id for worker in world.pools}


async def test_draining_one_worker() -> None:
    async with World(1, 2).running() as world:
        await world.settled()
        await world.drained(D0)
        assert D0 not in world.host.actors
        await world.settled()
        assert world.router.known == {P0, D1}
        with pytest.raises(InvalidRequest):
            world.fleet.drain(D1)
        with pytest.raises(WorkerNotFound):
            world.fleet.drain(D0)


async def test_a_worker_that_dies_while_draining_leaves_all_the_same() -> None:
    async with World(0, 2).running() as world:
        await world.settled()
        world.host.actors[D1] = Liveness.DEAD
        await world.drained(D1)
        await world.settled()
        assert world.router.known == {D0}


async def test_a_router_that_was_away_is_told_later() -> None:
    world = World(0, 1)
    world.router.away = True
    async with world.running():
        with pytest.raises(DeadlineExceeded):
            await world.fleet.settle(0.05)
        world.router.away = False
        await world.settled()
        assert world.router.known == {D0}


async def test_a_worker_that_the_router_refuses_is_offered_again() -> None:
    world = World(0, 1)
    world.router.refused = {D0: "another model"}
    async with world.running():
        with pytest.raises(DeadlineExceeded):
            await world.fleet.settle(0.05)
        assert "does not take worker decode-0: another model" in str(world.events.report())
        world.router.refused = {}
        await world.settled()


async def test_a_new_router_is_told_of_all() -> None:
    async with World(1, 1).running() as world:
        await world.settled()
        world.router.told.clear()
        world.fleet.introduce()
        assert not world.fleet.is_settled
        await world.settled()
        assert world.router.known == {P0, D0}


async def test_a_fleet_goes_on_with_the_workers_that_another_has_left() -> None:
    world = World(1, 1)
    async with world.running():
        await world.settled()
        await world.scaled(1, 2)
        world.controller_dies()
        del world.host.actors[D0]
        world.router.told.clear()
        await world.fleet.workers.take_over()
        async with world.running():
            await world.settled()
            assert all({P0, D1} <= {one.id for one in told} for told in world.router.told)
            assert world.router.known == {P0, D1, D2}
            assert set(world.host.actors) == {P0, D1, D2}
            assert "worker decode-0 was lost" in str(world.events.report())


async def test_workers_that_no_record_names_are_found_before_the_router_is_told_of_any() -> None:
    world = World(1, 2)
    async with world.running():
        await world.settled()
        world.controller_dies(Pools.recovered(PoolSizes(1, 1), world.host.names()))
        world.router.told.clear()
        await world.fleet.workers.take_over()
        async with world.running():
            await world.settled()
            assert all({one.id for one in told} == {P0, D0, D1} for told in world.router.told)
            assert world.host.launched == [P0, D0, D1]


async def test_a_drain_that_another_has_begun_is_brought_to_its_end() -> None:
    world = World(0, 2)
    async with world.running():
        await world.settled()
        world.host.keep_busy(D0)
        world.fleet.drain(D0)
        world.controller_dies()
        await world.fleet.workers.take_over()
        async with world.running():
            as_told = {D0: WorkerState.DRAINING, D1: WorkerState.READY}
            await until(lambda: {one.id: one.state for one in world.router.told[-1]} == as_told)
            world.host.finish(D0)
            await world.fleet.drained(D0, 5)
            await world.settled()
            assert world.router.known == {D1}
            assert world.pools.sizes == PoolSizes(0, 1)


async def test_workers_that_were_starting_when_another_died_are_started() -> None:
    world = World(1, 1)
    async with world.running():
        await until(lambda: world.record.text is not None)
        world.controller_dies()
        del world.host.actors[P0]
        await world.fleet.workers.take_over()
        async with world.running():
            await world.settled()
            assert world.router.known == {P1, D0}


async def test_a_silent_worker_that_another_has_left_gets_as_much_time_as_any() -> None:
    world = World(1, 1)
    async with world.running():
        await world.settled()
        world.controller_dies()
        await world.fleet.workers.take_over()
        async with world.running():
            await world.silent(P0, 29)
            assert P0 in world.pools
            await world.silent(P0, 2)
            assert P0 not in world.pools


async def test_a_full_disk_holds_no_worker_up() -> None:
    world = World(1, 1)
    async with world.running():
        await world.settled()
        before = world.record.text
        world.record.is_full = True
        world.host.actors[P0] = Liveness.DEAD
        await until(lambda: P1 in world.pools)
        await world.settled()
        assert world.router.known == {P1, D0}
        assert P0 not in world.host.actors
        assert str(world.events.report()).count("cannot be written down") == 1
        assert world.record.text == before
        world.record.is_full = False
        await until(lambda: world.record.text != before)


async def test_a_worker_that_has_left_is_not_missed_after_a_takeover() -> None:
    world = World(0, 2)
    async with world.running():
        await world.settled()
        await world.drained(D0)
        world.controller_dies()
        await world.fleet.workers.take_over()
        assert "was lost" not in str(world.events.report())


OTHER = RayNode("b" * 8, "10.0.0.2")


class SpreadHost(FleetHost):
    """A host on two nodes: prefill workers and the first decode worker begin on the second. `left`: at its service."""

    def __init__(self) -> None:
        super().__init__()
        self.ray_nodes.append(OTHER)
        self.left = Drained()
        self.services: tuple[str, ...] = (service_of(OTHER.id),)
        self.asked: list[str] = []

    def launch(
        self, name: str, target: str, resources: Resources, node_id: str | None = None, not_on: Sequence[str] = ()
    ) -> None:
        super().launch(name, target, resources, None if name == D1 or not_on else OTHER.id, not_on)

    async def call(self, name: str, method: str, *arguments: str | int, timeout_s: float) -> str:
        if name not in self.services:
            return await super().call(name, method, *arguments, timeout_s=timeout_s)
        assert method == "drain"
        assert {one for one in self.router.known if self.places[one] == OTHER.id}, (
            "decode finds the node by its workers"
        )
        self.asked.append(name)
        return to_json(self.left)


async def test_a_node_is_drained_with_all_of_its_workers_and_gets_no_others() -> None:
    host = SpreadHost()
    async with World(1, 2, host).running() as world:
        await world.settled()
        host.left = Drained(unfetched=2, unwritten=3)
        await world.fleet.drain_node(OTHER)
        await world.fleet.drained_node(OTHER, 5)
        await world.settled()
        assert world.pools.sizes == PoolSizes(1, 2), "others have taken their places"
        assert world.router.known == {P1, D1, D2}
        assert (host.places[P1], host.places[D2]) == ("head", "head")
        assert host.asked == [service_of(OTHER.id)] * 2
        assert f"{service_of(OTHER.id)} goes with 2 prompts and 3 blocks" in str(world.events.report())


async def test_others_start_in_the_places_of_a_node_that_drains_before_its_workers_have_gone() -> None:
    host = SpreadHost()
    async with World(1, 2, host).running() as world:
        await world.settled()
        host.keep_busy(D0)
        await world.fleet.drain_node(OTHER)
        await until(lambda: world.router.known >= {D0, D1, D2})
        host.finish(D0)
        await world.fleet.drained_node(OTHER, 5)
        await world.settled()


async def test_the_last_decode_worker_of_a_node_that_drains_serves_until_another_does() -> None:
    host = SpreadHost()
    async with World(1, 1, host).running() as world:
        await world.settled()
        world.node_is_up.clear()
        await world.fleet.drain_node(OTHER)
        await until(lambda: D1 in host.launched)
        assert world.pools.has(D0, WorkerState.READY)
        assert not world.pools.are_as_asked
        world.controller_dies()
        await world.fleet.workers.take_over()
        async with world.running():
            assert world.pools.has(D0, WorkerState.READY)
            world.node_is_up.set()
            await world.fleet.drained_node(OTHER, 5)
            await world.settled()
            assert world.router.known == {P1, D1}
            assert all(any(one.role is Role.DECODE for one in told) for told in world.router.told[1:])


async def test_a_node_that_no_other_can_replace_is_drained_and_its_workers_come_back_with_a_node() -> None:
    plan = planned(ClusterConfig.load(None, {"worker": {"prefill": {"resources": {"fast": 1}}}}))
    host = SpreadHost()
    host.ray_nodes[1] = other = replace(OTHER, resources={"fast": 2.0})
    async with World(1, 2, host, plan).running() as world:
        await world.settled()
        await world.fleet.drain_node(other)
        await world.fleet.drained_node(other, 5)
        await until(lambda: world.router.known == {D1, D2})
        events = str(world.events.report())
        assert f"no other node has room for prefill workers of node {other.name}: the pool has its size again" in events
        assert world.pools.sizes == PoolSizes(1, 2)
        host.ray_nodes.append(RayNode("c" * 8, "10.0.0.3", {"fast": 1.0}))
        world.now_s += 60
        await world.settled()
        (prefill,) = (one.id for one in world.pools if one.role is Role.PREFILL)
        assert host.places[prefill] == "c" * 8


async def test_a_drain_of_a_node_that_another_has_begun_waits_for_what_its_arena_alone_has() -> None:
    host = SpreadHost()
    world = World(1, 2, host)
    async with world.running():
        await world.settled()
        host.keep_busy(D0)
        host.keep_busy(P0)
        await world.fleet.drain_node(OTHER)
        host.asked.clear()
        world.controller_dies()
        await world.fleet.workers.take_over()
        async with world.running():
            host.finish(D0)
            host.finish(P0)
            await world.fleet.drained_node(OTHER, 5)
            assert host.asked == [service_of(OTHER.id)] * 2
            await world.settled()
            assert host.places[P1] == "head", "the node still gets no others"


async def test_a_node_with_all_decode_workers_stays_if_no_other_can_have_any() -> None:
    host = SpreadHost()
    host.ray_nodes[1] = replace(OTHER, resources={"fast": 2.0})
    plan = planned(ClusterConfig.load(None, {"worker": {"decode": {"resources": {"fast": 1}}}}))
    async with World(1, 1, host, plan).running() as world:
        await world.settled()
        with pytest.raises(InvalidRequest, match="at least one decode worker must stay, on another node"):
            await world.fleet.drain_node(OTHER)
        assert (world.pools.sizes, host.asked) == (PoolSizes(1, 1), [])
        assert await world.scaled(2, None) == PoolSizes(2, 1)
        assert host.places[P1] == OTHER.id, "a node whose drain was refused may get others"


class UntellingHost(SpreadHost):
    """Tells the node of a worker that is `untold` only once it `may_tell`."""

    def __init__(self, untold: WorkerId) -> None:
        super().__init__()
        self.untold = untold
        self.is_asked, self.may_tell = asyncio.Event(), asyncio.Event()

    async def where(self, name: str, timeout_s: float) -> str:
        if name == self.untold:
            self.is_asked.set()
            try:
                async with asyncio.timeout(timeout_s):
                    await self.may_tell.wait()
            except TimeoutError as error:
                raise DeadlineExceeded("it has no node yet") from error
        return await super().where(name, timeout_s)


async def test_a_worker_that_is_lost_amid_the_drain_of_its_node_is_replaced_elsewhere() -> None:
    """A controller that has taken over asks for the places of workers, and one is lost meanwhile."""
    host = UntellingHost(P0)
    host.may_tell.set()
    world = World(1, 2, host)
    async with world.running():
        await world.settled()
        world.controller_dies()
        await world.fleet.workers.take_over()
        async with world.running():
            host.may_tell.clear()
            host.is_asked.clear()
            draining = asyncio.create_task(world.fleet.drain_node(OTHER))
            await host.is_asked.wait()
            host.actors[P0] = Liveness.DEAD
            await until(lambda: P1 in host.launched)
            host.may_tell.set()
            await draining
            await world.fleet.drained_node(OTHER, 5)
            assert host.places[P1] == "head"
            await until(lambda: world.router.known == {D1, D2, P1})


async def test_a_worker_that_gets_its_node_after_the_drain_began_does_not_start_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(workers_module, "WHERE_TIMEOUT_S", 0.01)
    host = UntellingHost(P1)
    async with World(1, 2, host).running() as world:
        await world.settled()
        await world.fleet.resize(2, None)
        await until(lambda: P1 in host.launched)
        await world.fleet.drain_node(OTHER)
        host.may_tell.set()
        await until(lambda: P1 not in world.pools)
        world.now_s += 10
        await until(lambda: world.router.known == {D1, D2, P2, P3})
        assert (host.places[P1], host.places[P2], host.places[P3]) == (OTHER.id, "head", "head")
        assert f"worker prefill-1 did not start: node {OTHER.name} drains" in str(world.events.report())


class TwoRouters(FleetHost):
    """A host with a second router."""

    def __init__(self) -> None:
        super().__init__()
        self.second = FakeRouter()

    async def call(self, name: str, method: str, *arguments: str | int, timeout_s: float) -> str:
        if name == "router-1":
            return self.second.set_members(str(*arguments))
        return await super().call(name, method, *arguments, timeout_s=timeout_s)


async def test_every_router_is_told_of_the_workers_and_asked_again_until_all_know_them() -> None:
    host, pools = TwoRouters(), Pools(PoolsRecord(sizes=PoolSizes(1, 1)))
    members = RouterMembers(
        pools, planned(ClusterConfig(router=RouterSettings(routers=2))).routers, host, EventLog(float)
    )
    host.second.away = True
    await members.announce()
    assert (len(host.router.told), host.second.told, members.are_announced) == (1, [], False)
    host.second.away = False
    await members.announce()
    assert (host.second.sizes, members.are_announced) == (PoolSizes(1, 1), True)


class RollHost(FleetHost):
    """Remembers the settings that each worker started with; the workers of `bad` threads do not start."""

    def __init__(self) -> None:
        super().__init__()
        self.threads: dict[str, int] = {}
        self.bad = 0
        self.gate = asyncio.Event()
        self.gate.set()

    async def start(self, name: str, config_json: str, timeout_s: float) -> str:
        config = from_json(WorkerConfig, config_json, "worker")
        await self.gate.wait()
        if config.num_threads == self.bad:
            raise ModelError("no such model")
        self.threads[name] = config.num_threads
        return await super().start(name, config_json, timeout_s)

    @property
    def present(self) -> dict[str, int]:
        """The threads of each worker that is there."""
        return {name: self.threads.get(name, 0) for name in self.actors}


BEFORE = planned(ClusterConfig.load(None, {"worker": {"num_threads": 1}}))


def with_threads(num_threads: int) -> ClusterConfig:
    return ClusterConfig.load(None, {"worker": {"num_threads": num_threads}})


class Rollable(World):
    """A world of two and two workers with one thread each, and its host by its own type."""

    def __init__(self, prefill: int, decode: int) -> None:
        self.rolls = RollHost()
        super().__init__(prefill, decode, self.rolls, BEFORE)

    async def has_only(self, num_threads: int, num_workers: int) -> None:
        """Waits until so many workers are there, all with so many threads."""
        await until(lambda: [*self.rolls.present.values()] == [num_threads] * num_workers)


@asynccontextmanager
async def rollable(prefill: int = 2, decode: int = 2) -> AsyncIterator[Rollable]:
    world = Rollable(prefill, decode)
    async with world.running():
        await world.settled()
        yield world


async def test_workers_are_rolled_one_by_one_and_no_pool_gets_smaller() -> None:
    async with rollable() as world:
        number = await world.fleet.roll(with_threads(2), BEFORE.model)
        await world.fleet.rolled(number, 5)
        assert world.rolls.present == dict.fromkeys(("prefill-2", "prefill-3", "decode-2", "decode-3"), 2)
        assert world.router.known == set(world.host.actors)
        for told in world.router.told[1:]:
            serving = [one for one in told if one.state is WorkerState.READY]
            assert 4 <= len(serving) <= 5
            assert len(told) <= 5
        texts = [event.text for event in world.events.report()]
        assert "rolling 4 workers to revision 1: worker.num_threads 2" in texts
        assert [text for text in texts if "is replaced" in text] == [
            f"worker {name} of revision 0 is replaced, and drains"
            for name in ("prefill-0", "decode-0", "prefill-1", "decode-1")
        ]
        assert texts[-1] == "all workers have revision 1 now"
        assert await world.scaled(1, 3) == PoolSizes(1, 3)
        assert set(world.rolls.present.values()) == {2}


async def test_a_roll_without_changes_replaces_the_processes() -> None:
    async with rollable(0, 1) as world:
        await world.fleet.rolled(await world.fleet.roll(BEFORE.config, BEFORE.model), 5)
        assert world.rolls.present == {"decode-1": 1}
        assert any(event.text.endswith("to revision 1: the same settings") for event in world.events.report())


async def test_the_failure_of_the_first_new_worker_takes_the_roll_back_and_the_old_ones_serve_on() -> None:
    async with rollable() as world:
        world.rolls.bad = 2
        number = await world.fleet.roll(with_threads(2), BEFORE.model)
        with pytest.raises(Unavailable, match=r"revision 1 is taken back, and revision 0 serves on: .*no such model"):
            await world.fleet.rolled(number, 5)
        await world.settled()
        assert world.rolls.present == dict.fromkeys((P0, P1, D0, D1), 1)
        assert world.host.drained == []
        await world.fleet.rolled(await world.fleet.roll(with_threads(3), BEFORE.model), 5)
        assert set(world.rolls.present.values()) == {3}


async def test_the_first_failure_of_the_other_pool_rolls_replaced_workers_back() -> None:
    """A prefill worker of the new settings serves already when the first decode worker does not start."""
    async with rollable() as world:
        number = await world.fleet.roll(with_threads(2), BEFORE.model)
        await until(lambda: "prefill-2" in world.rolls.threads)
        world.rolls.bad = 2
        with pytest.raises(Unavailable, match="is taken back"):
            await world.fleet.rolled(number, 5)
        await world.has_only(1, 4)
        await world.settled()


async def test_a_later_failure_is_tried_again_as_pools_do() -> None:
    async with rollable() as world:
        number = await world.fleet.roll(with_threads(2), BEFORE.model)
        await until(lambda: world.pools.roll.proven != () and len(world.pools.roll.proven) == 2)
        world.host.failures = [Unavailable("Ray is busy")]
        await until(lambda: not world.host.failures)
        world.now_s += 60
        await world.fleet.rolled(number, 5)
        assert set(world.rolls.present.values()) == {2}


@pytest.mark.parametrize("num_ready", range(5))
async def test_another_controller_goes_on_with_a_roll_at_each_step(num_ready: int) -> None:
    async with rollable() as world:
        await world.fleet.roll(with_threads(2), BEFORE.model)
        await until(lambda: sum(threads == 2 for threads in world.rolls.threads.values()) >= num_ready)
        world.controller_dies()
        await world.fleet.workers.take_over()
        async with world.running():
            assert await world.fleet.roll(with_threads(2), BEFORE.model) in (1, 2), "the order may be given again"
            await world.has_only(2, 4)
            await world.settled()


async def test_a_second_roll_is_refused_and_the_same_order_is_not() -> None:
    async with rollable() as world:
        world.rolls.gate.clear()
        number = await world.fleet.roll(with_threads(2), BEFORE.model)
        with pytest.raises(InvalidRequest, match="a roll to revision 1 is under way"):
            await world.fleet.roll(with_threads(3), BEFORE.model)
        assert await world.fleet.roll(with_threads(2), BEFORE.model) == number
        world.rolls.gate.set()
        await world.fleet.rolled(number, 5)


async def test_a_roll_without_room_for_one_worker_more_changes_nothing() -> None:
    async with rollable() as world:
        world.machine = replace(world.machine, memory_bytes=0)
        with pytest.raises(ConfigError, match=r"^a roll has one worker more for a while.*: 1 more workers take"):
            await world.fleet.roll(with_threads(2), BEFORE.model)
        with pytest.raises(ConfigError, match="a roll does not change"):
            await world.fleet.roll(ClusterConfig(insecure=True), BEFORE.model)
        assert world.pools.roll.wanted == 0


async def test_a_new_worker_that_the_router_refuses_takes_the_roll_back() -> None:
    async with rollable() as world:
        world.router.refused = {P2: "worker has another model fingerprint than the router"}
        number = await world.fleet.roll(with_threads(2), BEFORE.model)
        with pytest.raises(Unavailable, match="does not take prefill-2: worker has another model fingerprint"):
            await world.fleet.rolled(number, 5)
        await until(lambda: set(world.rolls.present) == {P0, P1, D0, D1})


async def test_workers_that_die_amid_a_roll_are_replaced_by_new_ones() -> None:
    async with rollable() as world:
        number = await world.fleet.roll(with_threads(2), BEFORE.model)
        for name in (D1, P1):
            del world.host.actors[name]
            await world.fleet.workers.probe(name)
        await world.fleet.rolled(number, 5)
        assert (set(world.rolls.present.values()), len(world.rolls.present)) == ({2}, 4)


async def test_a_roll_takes_until_a_busy_worker_has_drained() -> None:
    async with rollable(0, 1) as world:
        world.host.keep_busy(D0)
        number = await world.fleet.roll(with_threads(2), BEFORE.model)
        await until(lambda: world.pools.has(D0, WorkerState.DRAINING))
        with pytest.raises(DeadlineExceeded, match="the roll is still under way"):
            await world.fleet.rolled(number, 0.05)
        world.host.finish(D0)
        await world.fleet.rolled(number, 5)
        assert world.rolls.present == {D1: 2}


async def test_workers_found_without_a_record_are_of_the_revision_that_has_served() -> None:
    async with rollable(1, 1) as world:
        await world.fleet.rolled(await world.fleet.roll(with_threads(2), BEFORE.model), 5)
        await until(lambda: b'"number": 0' not in (world.revisions.read() or b""))
        revisions = Revisions(BEFORE, world.revisions)
        found = list(world.host.actors)
        world.controller_dies(Pools.recovered(PoolSizes(1, 1), found, found, revisions.recovered))
        await world.fleet.workers.take_over()
        async with world.running():
            await until(lambda: len(world.rolls.present) == 2 and not set(world.rolls.present) & set(found))
            assert set(world.rolls.present.values()) == {2}


OTHER_WEIGHTS = replace(BEFORE.model, served=replace(BEFORE.model.served, fingerprint_hex="ab" * 32))


async def test_routers_know_both_versions_amid_a_roll_to_other_weights_the_wanted_one_first() -> None:
    async with rollable(1, 1) as world:
        before, after = BEFORE.model.served, OTHER_WEIGHTS.served
        assert world.router.models == []
        number = await world.fleet.roll(BEFORE.config, OTHER_WEIGHTS)
        await until(lambda: P1 in world.router.known)
        assert world.router.models == [after, before]
        await world.fleet.rolled(number, 5)
        await until(lambda: world.router.models == [after])
        world.fleet.introduce()
        await until(lambda: world.fleet.is_settled)
        assert world.router.models == [after], "a new router hears it, too"


async def test_a_router_starts_with_the_version_before_until_a_decode_worker_has_the_wanted_one() -> None:
    async with rollable(1, 1) as world:
        before, after = BEFORE.model.served, OTHER_WEIGHTS.served
        assert world.fleet.served == before
        world.rolls.gate.clear()
        number = await world.fleet.roll(BEFORE.config, OTHER_WEIGHTS)
        await until(lambda: P1 in world.pools)
        assert world.fleet.served == before
        world.rolls.gate.set()
        await until(lambda: world.pools.has(D1, WorkerState.READY))
        assert world.fleet.served == after
        await world.fleet.rolled(number, 5)
        assert world.fleet.served == after


async def test_before_a_roll_a_router_of_a_release_without_versions_can_read_the_members() -> None:
    async with rollable(1, 1) as world:
        assert world.router.fields == {"sizes", "workers"}


async def test_the_last_decode_worker_of_a_version_stays_while_a_router_needs_it() -> None:
    async with rollable(1, 1) as world:
        world.router.needed = (D0,)
        number = await world.fleet.roll(BEFORE.config, OTHER_WEIGHTS)
        await until(lambda: {P1, D0, D1} == world.router.known)
        with pytest.raises(DeadlineExceeded, match="the roll is still under way"):
            await world.fleet.rolled(number, 0.05)
        assert world.pools.has(D0, WorkerState.DRAINING)
        assert D0 not in world.host.drained
        world.router.needed = ()
        await world.fleet.rolled(number, 5)
        assert world.router.known == {P1, D1}
        assert D0 in world.host.drained


async def by_scale(world: World) -> None:
    await world.fleet.resize(None, 1)


async def by_drain(world: World) -> None:
    world.fleet.drain(D1)


async def by_drain_of_its_node(world: World) -> None:
    await world.fleet.drain_node(OTHER)


LET_GO = [(by_scale, D1), (by_drain, D1), (by_drain_of_its_node, D0)]


async def let_go(world: World, way: Callable[[World], Awaitable[None]], worker_id: WorkerId) -> None:
    """Lets a worker go that the router needs, and returns when the router knows that it drains."""
    await world.settled()
    world.router.needed = (worker_id,)
    await way(world)
    await until(lambda: (worker_id, WorkerState.DRAINING) in [(one.id, one.state) for one in world.router.told[-1]])


@pytest.mark.parametrize(("way", "worker_id"), LET_GO)
async def test_a_worker_that_a_router_needs_drains_once_it_is_needed_no_more(
    way: Callable[[World], Awaitable[None]], worker_id: WorkerId
) -> None:
    host = SpreadHost()
    async with World(1, 2, host).running() as world:
        await let_go(world, way, worker_id)
        num_told = len(world.router.told)
        await until(lambda: len(world.router.told) > num_told + 3)
        assert worker_id not in host.drained
        world.router.needed = ()
        await world.fleet.drained(worker_id, 5)
        assert worker_id in host.drained
        assert f"worker {worker_id} is the last of its model's version" in str(world.events.report())
        await world.settled()


async def test_a_worker_that_a_router_needs_on_and_on_drains_after_the_longest_deadline_of_a_request() -> None:
    async with World(1, 2, SpreadHost()).running() as world:
        await let_go(world, by_scale, D1)
        await until(lambda: "stays for open requests" in str(world.events.report()))
        world.now_s += PLAN.config.router.max_deadline_s
        await world.fleet.drained(D1, 5)


async def test_a_worker_that_a_router_needs_and_that_dies_holds_up_nothing() -> None:
    host = SpreadHost()
    async with World(1, 2, host).running() as world:
        await let_go(world, by_scale, D1)
        host.actors[D1] = Liveness.DEAD
        await world.fleet.drained(D1, 5)


async def test_a_worker_that_a_router_needs_drains_with_its_service_once_ray_drains_its_node() -> None:
    """Ray's drain may have a deadline, and the node's blocks go with it."""
    host = SpreadHost()
    async with World(1, 2, host).running() as world:
        await let_go(world, by_drain_of_its_node, D0)
        host.ray_nodes[:] = [replace(one, is_leaving=one.id == OTHER.id) for one in host.ray_nodes]
        await world.fleet.drained(D0, 5)
        assert D0 in host.drained
        assert service_of(OTHER.id) in host.asked


async def test_a_router_that_does_not_answer_needs_the_workers_that_it_needed() -> None:
    host, pools = TwoRouters(), Pools(PoolsRecord(sizes=PoolSizes(1, 1)))
    routers = planned(ClusterConfig(router=RouterSettings(routers=2))).routers
    members = RouterMembers(pools, routers, host, EventLog(float))
    host.second.needed = (D0,)
    await members.announce()
    host.second.away = True
    await members.announce()
    assert members.needed == {D0}
    host.second.away, host.second.needed = False, ()
    await members.announce()
    assert members.needed == set()


async def test_a_roll_to_other_weights_that_fails_leaves_one_version() -> None:
    async with rollable() as world:
        number = await world.fleet.roll(with_threads(2), OTHER_WEIGHTS)
        await until(lambda: len(world.router.models) == 2)
        world.rolls.bad = 2
        with pytest.raises(Unavailable, match="is taken back"):
            await world.fleet.rolled(number, 5)
        await world.has_only(1, 4)
        await until(lambda: world.router.models == [BEFORE.model.served])


CODES = with_codes(BEFORE.model)
CODED = replace(BEFORE, model=CODES)
ROOMY = Machine(memory_bytes=8 << 30, shared_bytes=1 << 30, num_cores=2)


async def test_workers_are_rolled_to_another_kv_layout_and_the_layouts_in_use_are_known_at_each_time() -> None:
    async with rollable(1, 1) as world:
        world.machine = ROOMY
        assert world.fleet.plan_with(CODED.layout_tag) is None
        number = await world.fleet.roll(with_threads(2), CODES)
        await until(lambda: P1 in world.router.known)
        plans = [world.fleet.plan_with(tag) for tag in (CODED.layout_tag, "")]
        assert [plan and plan.model for plan in plans] == [CODES, BEFORE.model]
        assert world.router.models == [CODES.served, BEFORE.model.served]
        await world.fleet.rolled(number, 5)
        assert world.fleet.plan_with("") is None


async def test_the_layout_of_a_roll_that_is_taken_back_is_in_use_no_more() -> None:
    async with rollable(1, 1) as world:
        world.machine, world.rolls.bad = ROOMY, 2
        number = await world.fleet.roll(with_threads(2), CODES)
        with pytest.raises(Unavailable, match="is taken back"):
            await world.fleet.rolled(number, 5)
        await until(lambda: world.fleet.plan_with(CODED.layout_tag) is None)
        assert world.fleet.plan_with("") == BEFORE


@pytest.mark.parametrize(
    ("free", "problem"),
    [
        (replace(ROOMY, shared_bytes=0), "arena.size_bytes: 0 B is too little"),
        (replace(ROOMY, memory_bytes=WORKER_BYTES), "1 more workers take 256 MiB of memory each, and .* are left"),
    ],
)
async def test_a_roll_without_room_for_a_second_arena_and_a_worker_beside_it_changes_nothing(
    free: Machine, problem: str
) -> None:
    async with rollable(1, 1) as world:
        world.machine = free
        why = "a roll has one worker more for a while, and a second arena where the KV layout changes"
        with pytest.raises(ConfigError, match=f"^{why}: {problem}"):
            await world.fleet.roll(BEFORE.config, CODES)
        assert (world.pools.roll.wanted, len(world.host.launched)) == (0, 2)


async def test_the_room_for_a_worker_of_another_kv_layout_is_by_its_own_settings() -> None:
    """The present workers, whose memory stands for that of a worker more, have shorter numbers and fewer pages."""
    async with rollable(1, 1) as world:
        world.machine = replace(ROOMY, memory_bytes=1 << 30)
        larger = ClusterConfig.load(None, {"worker": {"num_threads": 1, "pool_bytes": "1GiB"}})
        with pytest.raises(ConfigError, match="KV layout changes: 1 more prefill workers do not fit into the memory"):
            await world.fleet.roll(larger, CODES)
        await world.fleet.rolled(await world.fleet.roll(larger, BEFORE.model), 5)


async def test_the_room_of_each_of_several_nodes_is_without_a_second_arena() -> None:
    async with rollable(1, 1) as world:
        world.host.ray_nodes.append(RayNode("b", "10.0.0.2"))
        for node in world.host.ray_nodes:
            world.host.actors[service_of(node.id)] = Liveness.ANSWERING
        world.host.machine = replace(ROOMY, shared_bytes=0)
        with pytest.raises(ConfigError, match=r"a second arena where the KV layout changes: arena\.size"):
            await world.fleet.roll(BEFORE.config, CODES)
        world.host.machine = ROOMY
        number = await world.fleet.roll(BEFORE.config, CODES)
        await world.fleet.rolled(number, 5)


async def test_a_node_that_drains_is_drained_at_the_service_of_each_workers_layout() -> None:
    host = SpreadHost()
    async with World(1, 2, host, BEFORE).running() as world:
        await world.settled()
        world.machine = world.host.machine = ROOMY
        host.actors[service_of(OTHER.id)] = Liveness.ANSWERING
        await world.fleet.rolled(await world.fleet.roll(BEFORE.config, CODES), 5)
        host.services = (name := service_of(OTHER.id, CODED.layout_tag),)
        await world.fleet.drain_node(OTHER)
        await world.fleet.drained_node(OTHER, 5)
        assert {*host.asked} == {name}
