import asyncio
import json
import os
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest

from deploy.actors.actor_host import LocalHost
from deploy.actors.liveness import Liveness
from deploy.controller import controller as controller_module
from deploy.controller import supervised
from deploy.controller.controller import Controller
from deploy.controller.fleet import Fleet
from deploy.local.key_file import KeyFile
from deploy.plan.cluster_plan import NodeConfig
from deploy.plan.config import ClusterConfig
from deploy.plan.machine import service_of
from deploy.roll.revisions import Revision
from router.config import RouterConfig
from router.workers.controller_port import ControllerReport
from tests.deploy.plan.test_cluster_plan import planned
from tests.harness.cluster import until
from wire.block_names import digest_of
from wire.errors import ConfigError, Unavailable
from wire.pools import Addresses, MembersAnswer, OrderNumbers, Shares
from wire.served_model import ServedModel
from wire.trust.identity import ROUTER
from wire.trust.key_ring import NO_CALLER, Allowance, Key, KeyList, Scope, make_key
from wire.typed_reader import from_json, to_json

WAIT_S = 5.0
NODE = service_of(LocalHost.own_node)
FIRST, SECOND = (make_key(tenant, [Scope.GENERATE], Allowance())[0] for tenant in ("acme", "beta"))


class KeysHost(LocalHost):
    """A host whose actors remember the keys that they were told."""

    def __init__(self) -> None:
        super().__init__()
        self.keys: dict[str, KeyList] = {}
        self.shares = Shares({})
        self.started: list[tuple[str, str]] = []
        self.deaf: set[str] = set()
        self.gate: asyncio.Event | None = None
        self.num_at_gate = 0

    async def start(self, name: str, config_json: str, timeout_s: float) -> str:
        here = "127.0.0.1:1"
        self.started.append((name, config_json))
        return to_json(Addresses(here, here, here, here, here))

    async def call(self, name: str, method: str, *arguments: str | int, timeout_s: float) -> str:
        if method == "set_members":
            return to_json(MembersAnswer({}))
        if name in self.deaf or name not in self.actors:
            raise Unavailable(f"{name} died")
        if method == "set_keys" and name == "gateway-0" and self.gate is not None:
            self.num_at_gate += 1
            await self.gate.wait()
        if method == "set_shares":
            self.shares = from_json(Shares, str(arguments[0]), "shares")
        if method == "set_keys":
            self.keys[name] = from_json(KeyList, str(arguments[0]), "keys")
        return "{}"


class Cluster:
    """A run folder, a file of keys, actors, and the controllers that follow one another."""

    def __init__(self, folder: Path) -> None:
        self.host = KeysHost()
        self.run_dir = folder
        self.file = KeyFile(folder / "a.keys.json")
        plan = planned(ClusterConfig.load(None, {"pools": {"prefill": 0}}))
        self.plan = replace(plan, run_dir=str(folder), key_file=str(self.file.path))

    def make_controller(self) -> Controller:
        return Controller(to_json(self.plan), self.host)

    async def start(self) -> Controller:
        """The first controller of a cluster that serves."""
        controller = self.make_controller()
        async with asyncio.timeout(WAIT_S):
            await controller.start()
        return controller

    async def controller_dies(self) -> Controller:
        """Returns the next one."""
        for task in asyncio.all_tasks() - {asyncio.current_task()}:
            task.cancel()
        await asyncio.sleep(0)
        self.host.keys.clear()
        return self.make_controller()

    async def is_told(self, listed: KeyList) -> None:
        """Returns when router and gateway go by these keys."""
        async with asyncio.timeout(WAIT_S):
            while self.host.keys != dict.fromkeys(("router", "gateway-0"), listed):  # noqa: ASYNC110
                await asyncio.sleep(0.01)

    def damage(self) -> None:
        self.file.path.chmod(0o644)

    def mend(self) -> None:
        self.file.path.chmod(0o600)


@pytest.fixture
async def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Cluster]:
    made = Cluster(tmp_path)
    monkeypatch.setattr(controller_module, "start_logging", lambda _: None)
    monkeypatch.setattr(supervised, "PAUSE_S", 0.01)
    yield made
    for task in asyncio.all_tasks() - {asyncio.current_task()}:
        task.cancel()


async def report(controller: Controller) -> tuple[list[str], list[str]]:
    """Returns the texts of events, and the problems."""
    told = from_json(ControllerReport, await controller.report(), "report")
    return [event.text for event in told.events], list(told.problems)


def keys(*listed: Key) -> KeyList:
    return KeyList(listed)


async def test_a_controller_comes_back_over_a_damaged_key_file_with_the_keys_read_last(cluster: Cluster) -> None:
    cluster.file.write(keys(FIRST))
    await cluster.start()
    cluster.damage()
    controller = await cluster.controller_dies()
    await cluster.is_told(keys(FIRST))
    events, [problem] = await report(controller)
    assert "a.keys.json must be readable by you only" in problem
    assert problem.endswith("the keys read last stay in force")
    assert sum("a.keys.json must be readable" in event for event in events) == 1, "once, though it is tried each second"
    cluster.file.write(keys(FIRST, SECOND))
    cluster.mend()
    await cluster.is_told(keys(FIRST, SECOND))
    async with asyncio.timeout(WAIT_S):
        while (await report(controller))[1]:  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def test_without_keys_to_recall_a_damaged_file_lets_no_caller_in(cluster: Cluster) -> None:
    cluster.file.write(keys(FIRST))
    await cluster.start()
    cluster.damage()
    (cluster.run_dir / "keys.json").write_text("{")
    await cluster.controller_dies()
    await cluster.is_told(NO_CALLER)
    cluster.mend()
    await cluster.is_told(keys(FIRST))


async def test_a_change_that_does_not_come_into_force_is_said_and_tried_again(cluster: Cluster) -> None:
    cluster.file.write(keys(FIRST))
    controller = await cluster.start()
    assert (await report(controller))[1] == []
    cluster.file.write(keys(FIRST, SECOND))
    cluster.host.deaf = {"gateway-0"}
    with pytest.raises(Unavailable, match="gateway-0 died"):
        await controller.reload_keys()
    [problem] = (await report(controller))[1]
    assert "gateway-0 died" in problem
    cluster.damage()
    with pytest.raises(ConfigError, match="must be readable by you only"):
        await controller.reload_keys()
    cluster.host.deaf = set()
    cluster.mend()
    await cluster.is_told(keys(FIRST, SECOND))


async def test_a_change_that_fails_while_an_earlier_one_is_tried_again_comes_into_force(cluster: Cluster) -> None:
    cluster.file.write(keys(FIRST))
    controller = await cluster.start()
    cluster.file.write(keys(SECOND))
    cluster.host.deaf = {"gateway-0"}
    with pytest.raises(Unavailable):
        await controller.reload_keys()
    cluster.host.gate, cluster.host.deaf = asyncio.Event(), set()
    async with asyncio.timeout(WAIT_S):
        while not cluster.host.num_at_gate:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
    cluster.file.write(keys(FIRST, SECOND))
    cluster.host.deaf = {"gateway-0"}
    later = asyncio.create_task(controller.reload_keys())
    await asyncio.sleep(0)
    cluster.host.gate.set()
    with pytest.raises(Unavailable):
        await later
    assert cluster.host.keys["gateway-0"] == keys(SECOND)
    assert (await report(controller))[1], "the later change is not in force yet"
    cluster.host.deaf = set()
    await cluster.is_told(keys(FIRST, SECOND))
    async with asyncio.timeout(WAIT_S):
        while (await report(controller))[1]:  # noqa: ASYNC110
            await asyncio.sleep(0.001)


@pytest.mark.parametrize("content", [b"", b"{", b"\xff", b"[]", b'{"sizes": 3}', b'{"sizes": {}, "version": 99}', None])
@pytest.mark.parametrize("name", ["pools", "router", "gateway-0", "authority", "keys"])
async def test_a_controller_comes_back_over_any_damaged_record(
    cluster: Cluster, name: str, content: bytes | None
) -> None:
    controller = await cluster.start()
    await controller.scale(json.dumps({"prefill": 0, "decode": 2}))
    async with asyncio.timeout(WAIT_S):
        await controller.scaled(to_json(OrderNumbers({"decode": 1})))
    path = cluster.run_dir / f"{name}.json"
    path.unlink(missing_ok=True)
    if content is not None:
        path.write_bytes(content)
    launched = list(cluster.host.launched)
    controller = await cluster.controller_dies()
    await cluster.is_told(KeyList())
    async with asyncio.timeout(WAIT_S):
        await controller.scale(json.dumps({"prefill": 1, "decode": 2}))
        while not {"decode-0", "decode-1", "prefill-0"} <= cluster.host.actors.keys():  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    assert cluster.host.launched == [*launched, "prefill-0"], "all that was there was found, and goes on"


async def test_a_controller_keeps_the_run_folder_young(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(controller_module, "RENEW_EVERY_S", 0.01)
    await cluster.start()
    record = cluster.run_dir / "router.json"
    os.utime(record, (0, 0))
    async with asyncio.timeout(WAIT_S):
        while not record.stat().st_mtime:  # noqa: ASYNC110
            await asyncio.sleep(0.01)


def certified(cluster: Cluster) -> None:
    """Makes it a cluster of several nodes, whose processes speak TLS."""
    cluster.plan = replace(cluster.plan, machine=None)


async def test_a_controller_that_takes_over_certifies_under_the_same_authority(cluster: Cluster) -> None:
    certified(cluster)
    await cluster.start()
    path = cluster.run_dir / "authority.json"
    made = path.read_bytes()
    assert path.stat().st_mode & 0o077 == 0
    assert not any("authority" in event for event in (await report(await cluster.controller_dies()))[0])
    assert path.read_bytes() == made


@pytest.mark.parametrize("content", ["{", '{"key_pem": "?", "certificate_pem": "?"}', None])
async def test_a_damaged_or_lost_authority_is_made_anew_and_said(cluster: Cluster, content: str | None) -> None:
    certified(cluster)
    first = await cluster.start()
    events, problems = await report(first)
    assert not problems
    assert not any("authority" in event for event in events)
    path = cluster.run_dir / "authority.json"
    path.unlink() if content is None else path.write_text(content)
    events, problems = await report(await cluster.controller_dies())
    assert sum("authority.json is damaged or lost" in event for event in events) == 1
    [problem] = problems
    assert "authority.json" in problem
    assert "`baton down` and `baton up`" in problem
    made = path.read_bytes()
    assert len((await report(await cluster.controller_dies()))[1]) == 0
    assert path.read_bytes() == made


async def test_a_controller_that_ray_brings_back_after_the_end_of_its_cluster_ends_what_is_left(
    cluster: Cluster, tmp_path: Path
) -> None:
    """`baton down` finds no Ray while a head is away, and removes the run folder and the state alone."""
    await cluster.start()
    cluster.plan = replace(cluster.plan, run_dir=str(tmp_path / "removed"))
    await cluster.controller_dies()
    async with asyncio.timeout(WAIT_S):
        while cluster.host.actors:  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def test_a_controller_whose_run_folder_a_cleaner_has_removed_serves_on(cluster: Cluster, tmp_path: Path) -> None:
    await cluster.start()
    cluster.plan = replace(cluster.plan, run_dir=str(tmp_path / "removed"))
    cluster.plan.state_file.touch()
    there = dict(cluster.host.actors)
    controller = await cluster.controller_dies()
    async with asyncio.timeout(WAIT_S):
        while "the controller was lost, and is back" not in (await report(controller))[0]:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    assert there.items() <= cluster.host.actors.items()


async def test_a_tenants_share_of_arenas_holds_for_both_versions_of_a_rolled_model(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Fleet, "_require_room", lambda *_: asyncio.sleep(0))
    cluster.file.write(KeyList((make_key("acme", [Scope.GENERATE], Allowance(arena_share=0.25))[0],)))
    controller, served = await cluster.start(), cluster.plan.model.served
    rolled = replace(cluster.plan.model, served=replace(served, fingerprint_hex="ab" * 32))
    await controller.roll(to_json(Revision(config=cluster.plan.config, model=rolled)))
    secret = cluster.plan.router.cluster.secret
    roots = [one.namespace.root_of(secret, "acme") for one in (served, rolled.served)]
    both = Shares({",".join(digest_of(root).hex() for root in roots): 0.25})
    await until(lambda: cluster.host.shares == both)
    cluster.host.shares = Shares({})
    await cluster.controller_dies()
    await until(lambda: cluster.host.shares == both)


def models_of(cluster: Cluster, name: str, kind: type[RouterConfig | NodeConfig]) -> list[ServedModel]:
    return [from_json(kind, text, name).model for one, text in cluster.host.started if one == name]


async def begin_roll(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> tuple[Controller, str, ServedModel]:
    """Starts a cluster and a roll to other weights; returns the controller, the revision's number and its model."""
    monkeypatch.setattr(Fleet, "_require_room", lambda *_: asyncio.sleep(0))
    monkeypatch.setattr(supervised, "PROBE_EVERY_S", 0.01)
    controller, served = await cluster.start(), replace(cluster.plan.model.served, fingerprint_hex="ab" * 32)
    revision = Revision(config=cluster.plan.config, model=replace(cluster.plan.model, served=served))
    return controller, await controller.roll(to_json(revision)), served


async def models_of_restarts(cluster: Cluster, name: str, kind: type[RouterConfig | NodeConfig]) -> list[ServedModel]:
    """Ends an actor, the controller and the actor again; returns the models with which the actor was started again."""
    cluster.host.actors[name] = Liveness.DEAD
    await until(lambda: len(models_of(cluster, name, kind)) == 2)
    await cluster.controller_dies()
    cluster.host.actors[name] = Liveness.DEAD
    await until(lambda: len(models_of(cluster, name, kind)) == 3)
    return models_of(cluster, name, kind)[1:]


async def test_a_router_that_starts_again_amid_a_roll_has_the_model_that_decode_workers_have(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Fleet, "_require_room", lambda *_: asyncio.sleep(0))
    monkeypatch.setattr(supervised, "PROBE_EVERY_S", 0.01)
    start = cluster.host.start

    async def start_others(name: str, config_json: str, timeout_s: float) -> str:
        if name == "decode-1":
            await asyncio.sleep(timeout_s)
        return await start(name, config_json, timeout_s)

    monkeypatch.setattr(cluster.host, "start", start_others)
    controller, served = await cluster.start(), cluster.plan.model.served
    rolled = replace(cluster.plan.model, served=replace(served, fingerprint_hex="ab" * 32))
    await controller.roll(to_json(Revision(config=cluster.plan.config, model=rolled)))
    cluster.host.actors[ROUTER] = Liveness.DEAD
    await until(lambda: len(models_of(cluster, ROUTER, RouterConfig)) == 2)
    assert models_of(cluster, ROUTER, RouterConfig) == [served] * 2


async def test_a_router_that_starts_again_after_a_roll_has_the_rolled_model(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    controller, number, served = await begin_roll(cluster, monkeypatch)
    await controller.rolled(number)
    assert await models_of_restarts(cluster, ROUTER, RouterConfig) == [served] * 2


async def test_a_node_service_that_starts_again_amid_a_roll_has_the_model_that_workers_are_rolled_to(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, _, served = await begin_roll(cluster, monkeypatch)
    assert await models_of_restarts(cluster, NODE, NodeConfig) == [served] * 2
