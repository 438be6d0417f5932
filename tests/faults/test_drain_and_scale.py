"""Pools that change under load: no request fails, and every answer is what it would have been."""

import asyncio
from dataclasses import replace

import pytest

from router.config import RouterSettings
from tests.faults.load import Load, under_load
from tests.faults.rest import at_rest
from tests.harness.answer import ask
from tests.harness.assembled_worker import behaviour_of
from tests.harness.faulty_cluster import FaultyCluster
from tests.harness.known_model import MODEL
from tests.harness.local_cluster import Sizes
from wire.pools import Role

SIZES = Sizes(num_blocks=96, num_slots=256)


async def scale(cluster: FaultyCluster, num_prefill: int, num_decode: int, grace_s: float) -> int:
    """As the controller scales: what is new joins first, then what is too much drains."""
    too_many: list[str] = []
    for role, wanted in ((Role.PREFILL, num_prefill), (Role.DECODE, num_decode)):
        there = [name for name in cluster.listed if name.startswith(role.value[0])]
        for _ in range(wanted - len(there)):
            await cluster.add(role)
        too_many += there[wanted:]
    return sum(await asyncio.gather(*(cluster.drain(name, grace_s) for name in too_many)))


@pytest.mark.parametrize("grace_s", [20.0, 0.0])
async def test_scaling_there_and_back(grace_s: float) -> None:
    """1/2 -> 2/1 -> 1/2; workers that leave finish what they have, or give it back."""
    async with FaultyCluster.running(MODEL, 1, 2, SIZES) as cluster:
        async with under_load(Load(cluster, MODEL)) as load:
            num_given_back = await scale(cluster, 2, 1, grace_s)
            await load.goes_on()
            num_given_back += await scale(cluster, 1, 2, grace_s)
            await load.goes_on()
        assert len(cluster.listed) == 3
        assert num_given_back == 0 or grace_s == 0
        await at_rest(cluster)


@pytest.mark.parametrize("grace_s", [20.0, 0.0])
async def test_all_workers_are_replaced_one_by_one(grace_s: float) -> None:
    async with FaultyCluster.running(MODEL, 2, 2, SIZES) as cluster:
        async with under_load(Load(cluster, MODEL)) as load:
            for name in tuple(cluster.listed):
                await cluster.add(Role.PREFILL if name.startswith("p") else Role.DECODE)
                await cluster.drain(name, grace_s)
                await load.goes_on()
        assert sorted(cluster.listed) == ["d2", "d3", "p2", "p3"]
        await at_rest(cluster)


@pytest.mark.parametrize("grace_s", [20.0, 0.0])
async def test_workers_change_their_roles_there_and_back(grace_s: float) -> None:
    """2/2 -> 1/3 -> 2/2 -> 3/1 -> 2/2."""
    async with FaultyCluster.running(MODEL, 2, 2, SIZES) as cluster:
        async with under_load(Load(cluster, MODEL)) as load:
            num_given_back = 0
            for name, role in (("p0", Role.PREFILL), ("d0", Role.DECODE)):
                for to in (role.other, role):
                    num_given_back += await cluster.change_role(name, to, grace_s)
                    await load.goes_on()
        assert num_given_back == 0 or grace_s == 0
        assert sorted(cluster.listed) == ["d0", "d1", "p0", "p1"]
        await at_rest(cluster)


async def test_a_long_request_follows_workers_that_change_their_roles() -> None:
    """Its reader takes nothing meanwhile, so there is room for all of its tokens."""
    sizes = replace(SIZES, settings=RouterSettings(max_buffered_tokens=512))
    async with FaultyCluster.running(MODEL, 1, 2, sizes) as cluster:
        reader = cluster.open(ask(range(50), 400))
        for num_tokens in range(3, 60, 8):
            await reader.read_tokens(num_tokens)
            (serving,) = (member.id for member in cluster.router.members if member.num_choices)
            await cluster.change_role(serving, Role.PREFILL, grace_s=0.0)
            await cluster.change_role(serving, Role.DECODE, grace_s=0.0)
        [choice] = await reader.read_all()
        assert choice.token_ids == MODEL.oracle(range(50), 400)
        await at_rest(cluster)


async def test_a_long_request_is_passed_on_again_and_again() -> None:
    """Its reader takes nothing while workers come and go, so there is room for all of its tokens."""
    sizes = replace(SIZES, settings=RouterSettings(max_buffered_tokens=512))
    async with FaultyCluster.running(MODEL, 1, 1, sizes) as cluster:
        reader = cluster.open(ask(range(50), 400))
        for num_tokens in range(3, 60, 8):
            await reader.read_tokens(num_tokens)
            name = next(name for name in cluster.listed if name.startswith("d"))
            await cluster.add(Role.DECODE)
            await cluster.drain(name, grace_s=0.0)
        [choice] = await reader.read_all()
        assert choice.token_ids == MODEL.oracle(range(50), 400)
        await at_rest(cluster)


async def test_a_worker_that_drains_unknown_to_the_router_gives_work_back() -> None:
    """As one does that got a SIGTERM: who is sent there is served elsewhere."""
    async with FaultyCluster.running(MODEL, 2, 2, SIZES) as cluster:
        async with under_load(Load(cluster, MODEL)) as load:
            for name in ("p0", "d0"):
                await cluster.workers[name].service.attempts.drain(grace_s=0.0)
            await load.goes_on()
            states = {member.id: member.state.value for member in cluster.router.members}
        assert states == {"p0": "draining", "d0": "draining", "p1": "ready", "d1": "ready"}
        await at_rest(cluster)


async def test_a_worker_that_changes_its_role_unknown_to_the_router_gets_nothing_of_the_role_before() -> None:
    """As one whose controller was not heard: it is lost to the router until it is listed in its new role."""
    async with FaultyCluster.running(MODEL, 2, 2, SIZES) as cluster:
        async with under_load(Load(cluster, MODEL)) as load:
            for name, role in (("p0", Role.DECODE), ("d0", Role.PREFILL)):
                await cluster.workers[name].service.serve_as(behaviour_of(role, SIZES.batch), 0.0)
                cluster.changed_roles[name] = role
            await load.goes_on()
            states = {member.id: member.state.value for member in cluster.router.members}
            assert {name for name, state in states.items() if state == "ready"} == {"p1", "d1"}
            await cluster.enlist(*cluster.listed)
            await load.goes_on()
        assert {member.id for member in cluster.router.members.ready(Role.DECODE)} == {"p0", "d1"}
        await at_rest(cluster)
