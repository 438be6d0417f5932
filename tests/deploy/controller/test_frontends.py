import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from deploy.actors.actor_host import LocalHost
from deploy.actors.liveness import Liveness
from deploy.controller import supervised
from deploy.controller.frontends import Frontends
from deploy.controller.supervised import EventLog, Supervision, Tasks
from deploy.plan.cluster_plan import ClusterPlan
from deploy.plan.config import ClusterConfig
from deploy.plan.machine import RayNode
from gateway.config import GatewayConfig
from router.config import RouterConfig
from tests.deploy.plan.test_cluster_plan import planned
from wire.errors import ConfigError, Unavailable
from wire.pools import Addresses
from wire.trust.identity import ROUTER
from wire.typed_reader import from_json, to_json

PORT = 4321


class DoorHost(LocalHost):
    """A host whose doors take these ports where any free one is asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.started: list[GatewayConfig] = []
        self.routers: list[RouterConfig] = []
        self.router_address = "127.0.0.1:1"

    async def start(self, name: str, config_json: str, timeout_s: float) -> str:
        await super().start(name, config_json, timeout_s)
        if name.startswith(ROUTER):
            self.routers.append(from_json(RouterConfig, config_json, "router"))
            return to_json(Addresses(*[self.router_address + name.removeprefix(f"{ROUTER}-").removeprefix(ROUTER)] * 4))
        config = from_json(GatewayConfig, config_json, "gateway")
        assert config.name == name
        self.started.append(config)
        return to_json(Addresses(http=f"{config.host}:{config.joined_port or config.port or PORT}"))


def make(host: DoorHost, run_dir: Path, number: int = 3) -> Frontends:
    plan = planned(
        ClusterConfig.load(
            None, {"router": {"grpc_port": 0}, "http": {"gateways": max(1, number), "port": 0 if number else "off"}}
        )
    )
    return of_plan(plan, host, run_dir)


def of_plan(plan: ClusterPlan, host: DoorHost, run_dir: Path) -> Frontends:
    means = Supervision(host, run_dir, EventLog(lambda: 0.0))
    return Frontends(replace(plan, run_dir=str(run_dir)), "head", means, lambda: plan.model.served)


async def started(host: DoorHost, run_dir: Path, number: int = 3) -> Frontends:
    front = make(host, run_dir, number)
    await front.start_routers()
    await front.start_gateways()
    return front


async def test_the_first_takes_the_port_and_the_others_join_it(tmp_path: Path) -> None:
    host = DoorHost()
    assert (await started(host, tmp_path)).addresses.http == f"127.0.0.1:{PORT}"
    assert [(one.name, one.port, one.joined_port) for one in host.started] == [
        ("gateway-0", 0, None),
        ("gateway-1", 0, PORT),
        ("gateway-2", 0, PORT),
    ]
    assert {one.metrics_folder for one in host.started} == {str(tmp_path)}


STANDBY = {"routers": 2, "grpc_port": 0}
OTHERS = [RayNode("b2", "10.0.0.2"), RayNode("c3", "10.0.0.3")]


def with_standbys(host: DoorHost, run_dir: Path) -> Frontends:
    """One router and one gateway on the head, and one each beside it."""
    ray = {"address": "10.0.0.1:6379", "standby_frontends": True}
    plan = planned(ClusterConfig.load(None, {"router": STANDBY, "ray": ray, "http": {"gateways": 2, "port": 0}}))
    return of_plan(plan, host, run_dir)


async def test_standbys_share_a_node_beside_the_head_and_know_each_other_alone(tmp_path: Path) -> None:
    host = DoorHost()
    host.ray_nodes += OTHERS
    front = with_standbys(host, tmp_path)
    await front.start_routers()
    await front.start_gateways()
    places = {name: host.places[name] for name in ("router", "gateway-0", "router-1", "gateway-1")}
    assert places == {"router": "head", "gateway-0": "head", "router-1": "b2", "gateway-1": "b2"}
    assert [one.address for one in host.started] == ["127.0.0.1:1", "127.0.0.1:11"]
    assert front.addresses.public == "127.0.0.1:1,127.0.0.1:11"
    assert front.addresses.operator == "127.0.0.1:1", "the other one is for its own machine"


async def test_standbys_go_to_another_node_together_once_theirs_is_lost(tmp_path: Path) -> None:
    host = DoorHost()
    host.ray_nodes += OTHERS
    front = with_standbys(host, tmp_path)
    await front.start_routers()
    await front.start_gateways()
    host.ray_nodes.pop(1)
    for name in ("router-1", "gateway-1"):
        await host.end(name)
    await front.take_over(lambda _: None)
    assert [host.places[name] for name in ("router-1", "gateway-1")] == ["c3", "c3"]


async def test_a_new_controller_keeps_the_node_of_standbys_that_have_outlived_the_head(tmp_path: Path) -> None:
    host = DoorHost()
    host.ray_nodes += OTHERS[1:]
    front = with_standbys(host, tmp_path)
    await front.start_routers()
    await front.start_gateways()
    for name in ("router", "gateway-0", "gateway-1"):
        await host.end(name)
    host.ray_nodes.insert(1, OTHERS[0])
    host.launched.clear()
    await with_standbys(host, tmp_path).take_over(lambda _: None)
    assert sorted(host.launched) == ["gateway-0", "gateway-1", "router"]
    assert host.places["gateway-1"] == host.places["router-1"] == "c3"


async def test_standbys_without_a_node_beside_the_head_are_refused(tmp_path: Path) -> None:
    with pytest.raises(Unavailable, match="standby_frontends wants a node beside the head, and none is there"):
        await with_standbys(DoorHost(), tmp_path).start_routers()


async def test_a_port_that_is_taken_is_told(tmp_path: Path) -> None:
    host = DoorHost()
    front = make(host, tmp_path)
    host.failures = [ConfigError("port 1 cannot be had")]
    with pytest.raises(ConfigError):
        await front.start_gateways()
    assert host.started == []


async def test_no_gateways(tmp_path: Path) -> None:
    host = DoorHost()
    assert (await started(host, tmp_path, 0)).addresses.http == ""
    assert host.launched == [ROUTER]


@pytest.mark.parametrize("dead", ["gateway-0", "gateway-2"])
async def test_one_that_dies_joins_again_and_no_other_is_touched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dead: str
) -> None:
    monkeypatch.setattr(supervised, "PROBE_EVERY_S", 0.001)
    host, tasks, back = DoorHost(), Tasks(), asyncio.Queue[str]()
    front = await started(host, tmp_path)
    launched = list(host.launched)
    front.keep(tasks, on_restart=back.put_nowait)
    host.actors[dead] = Liveness.DEAD
    async with asyncio.timeout(5):
        assert await back.get() == dead
    tasks.cancel()
    await tasks.wait()
    assert host.launched == [*launched, dead]
    assert [(one.name, one.joined_port, one.address) for one in host.started[3:]] == [(dead, PORT, "127.0.0.1:1")]


async def test_a_router_that_dies_takes_its_ports_again_and_later_gateways_find_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervised, "PROBE_EVERY_S", 0.001)
    host, tasks, back = DoorHost(), Tasks(), asyncio.Queue[str]()
    front = await started(host, tmp_path)
    assert [one.settings.grpc_port for one in host.routers] == [0]
    front.keep(tasks, on_restart=back.put_nowait)
    host.router_address = "127.0.0.1:2"  # the port was taken
    for dead in (ROUTER, "gateway-1"):
        host.actors[dead] = Liveness.DEAD
        async with asyncio.timeout(5):
            assert await back.get() == dead
    tasks.cancel()
    await tasks.wait()
    again = host.routers[1]
    assert [again.settings.grpc_port, again.local_port, again.operator_port, again.settings.metrics_port] == [1] * 4
    assert [one.address for one in host.started[3:]] == ["127.0.0.1:2"]


async def test_each_of_several_routers_has_ports_of_its_own_and_gateways_know_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervised, "PROBE_EVERY_S", 0.001)
    host, tasks, back = DoorHost(), Tasks(), asyncio.Queue[str]()
    plan = planned(
        ClusterConfig.load(
            None, {"router": {"routers": 3, "grpc_port": 7000, "metrics_port": 7100}, "http": {"port": 0}}
        )
    )
    front = of_plan(plan, host, tmp_path)
    await front.start_routers()
    await front.start_gateways()
    ports = [(one.settings.grpc_port, one.settings.metrics_port) for one in host.routers]
    assert ports == [(7000, 7100), (7001, 7101), (7002, 7102)]
    each = "127.0.0.1:1,127.0.0.1:11,127.0.0.1:12"
    assert front.addresses == Addresses(each, each, each, each, f"127.0.0.1:{PORT}")
    assert (host.started[0].address, host.started[0].operator_address) == (each, each)
    front.keep(tasks, on_restart=back.put_nowait)
    host.actors["router-1"] = Liveness.DEAD
    async with asyncio.timeout(5):
        assert await back.get() == "router-1"
    tasks.cancel()
    await tasks.wait()
    again = host.routers[3]
    assert [again.settings.grpc_port, again.local_port, again.operator_port, again.settings.metrics_port] == [11] * 4


async def test_a_later_controller_finds_the_doors_and_their_ports(tmp_path: Path) -> None:
    host = DoorHost()
    await started(host, tmp_path)
    del host.actors["gateway-0"]
    found: list[str] = []
    await make(host, tmp_path).take_over(on_found=found.append)
    assert found == [ROUTER, "gateway-0", "gateway-1", "gateway-2"]
    assert host.launched == [*found, "gateway-0"]
    assert {one.joined_port for one in host.started[3:]} == {PORT}
