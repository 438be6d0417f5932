"""Planted causes: the page names each on the request that it slowed, and scripts read the same words."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import pytest

from tests.gateway.local_gateway import LocalDoor
from tests.harness.answer import Reader, ask
from tests.harness.assembled_worker import TOKEN
from tests.harness.cluster import until
from tests.harness.faulty_cluster import FaultyCluster
from tests.harness.known_model import MODEL, prompt_of
from tests.harness.local_cluster import Sizes
from wire.errors import StoreError
from wire.trust.key_ring import NO_KEYS, page_key
from worker.config import BatchSettings

KEY = page_key(TOKEN)
NUM_TOKENS = 12
PLANTED_S = 0.06
ONE_AT_A_TIME = BatchSettings(max_running=1)
SMALL_STEPS = BatchSettings(max_step_tokens=40, max_running=8, max_chunk_tokens=32)


@dataclass
class Seen:
    """A cluster, and what its page has of the requests that ended."""

    cluster: FaultyCluster
    door: LocalDoor

    def open(self, number: int, num_tokens: int = NUM_TOKENS) -> Reader:
        request = ask(prompt_of(number), num_tokens)
        request.request_id = f"r-{number}"
        return self.cluster.open(request)

    async def ask(self, number: int) -> dict[str, Any]:
        await self.open(number).read_all()
        return await self.find(number)

    async def find(self, number: int) -> dict[str, Any]:
        found: dict[str, Any] = (await self.door.get(f"/ui/requests/r-{number}", KEY)).json["requests"][-1]
        return found

    async def all(self) -> list[dict[str, Any]]:
        requests: list[dict[str, Any]] = (await self.door.get("/ui/requests", KEY)).json["requests"]
        return requests


@asynccontextmanager
async def seen(num_prefill: int, num_decode: int, sizes: Sizes | None = None) -> AsyncIterator[Seen]:
    async with FaultyCluster.running(MODEL, num_prefill, num_decode, sizes) as cluster:
        door = LocalDoor(cluster.router, NO_KEYS)
        yield Seen(cluster, door)
        await door.client.close()
        await door.operator.close()


def slow_down(cluster: FaultyCluster, name: str, step_s: float = PLANTED_S / 10) -> None:
    """Makes each step of a worker's model take longer."""
    cluster.models[name].on_step = lambda _: time.sleep(step_s)


def took_ms(request: dict[str, Any], span: str) -> float:
    return sum((float(one[3]) for one in request["spans"] if one[0] == span), 0.0)


@pytest.mark.parametrize(
    ("span", "cause", "worker", "num_prefill", "sizes"),
    [
        ("router.wait_room", "waited for room in the arena", "p0", 1, Sizes(num_slots=10)),
        ("prefill.wait_slot", "waited at p0 for a place", "p0", 1, Sizes(batch=ONE_AT_A_TIME)),
        ("prefill.wait_pages", "waited at p0 for free pages: its pool was full", "p0", 1, Sizes(num_blocks=9)),
        ("prefill.wait_turn", "waited at p0 for its turn in a step", "p0", 1, Sizes(batch=SMALL_STEPS)),
        ("decode.wait_pages", "waited at d0 for free pages: its pool was full", "d0", 0, Sizes(num_blocks=9)),
    ],
)
async def test_a_gate(span: str, cause: str, worker: str, num_prefill: int, sizes: Sizes) -> None:
    async with seen(num_prefill, 1, sizes) as page:
        slow_down(page.cluster, worker)
        await asyncio.gather(*(page.open(number).read_all() for number in range(6)))
        slowed = max(await page.all(), key=lambda request: took_ms(request, span))
    assert took_ms(slowed, span) > 0.1 * slowed["total_ms"]
    assert any(cause in one for one in slowed["causes"]), slowed["causes"]


async def test_a_long_step() -> None:
    async with seen(1, 1) as page:
        model = page.cluster.models["p0"]
        model.pause()
        first = asyncio.create_task(page.ask(1))
        await until(lambda: model.num_steps)
        second = asyncio.create_task(page.ask(2))
        await until(lambda: page.cluster.router.dispatcher.num_queued == 2)
        await asyncio.sleep(4 * PLANTED_S)
        model.go_on()
        slowed = (await first, await second)[1]
    assert any("waited at p0 for a step of its engine to end" in one for one in slowed["causes"]), slowed["causes"]


async def test_no_decode_worker() -> None:
    async with seen(1, 0) as page:
        asked = asyncio.create_task(page.ask(1))
        await until(lambda: page.cluster.router.dispatcher.num_running)
        await asyncio.sleep(4 * PLANTED_S)
        await page.cluster.enlist("p0", "d0")
        slowed = await asked
    assert "waited for a decode worker that is ready: none was" in slowed["causes"][0]


async def test_a_lost_worker() -> None:
    async with seen(1, 2) as page:
        reader = page.open(1, 40)
        for name in ("d0", "d1"):
            slow_down(page.cluster, name)
        await until(lambda: any(page.cluster.models[name].num_steps > 3 for name in ("d0", "d1")))
        lost = max(("d0", "d1"), key=lambda name: page.cluster.models[name].num_steps)
        page.cluster.crash(lost)
        await reader.read_all()
        slowed = await page.find(1)
    assert f"lost {lost}: it went away" in slowed["causes"][0]
    assert (slowed["outcome"], slowed["attempts"]) == ("OK", 2)


async def test_a_worker_that_drains() -> None:
    async with seen(1, 2) as page:
        reader = page.open(1, 40)
        for name in ("d0", "d1"):
            slow_down(page.cluster, name)
        await until(lambda: any(page.cluster.models[name].num_steps > 3 for name in ("d0", "d1")))
        left = max(("d0", "d1"), key=lambda name: page.cluster.models[name].num_steps)
        assert await page.cluster.drain(left, 0.0) == 1
        await reader.read_all()
        slowed = await page.find(1)
    assert f"{left} gave it back: it drains" in slowed["causes"][0]


async def test_a_slow_worker() -> None:
    async with seen(1, 2) as page:
        slow_down(page.cluster, "d1", 0.04)
        for start in range(0, 12, 4):
            await asyncio.gather(*(page.open(start + place).read_all() for place in range(4)))
        by_slow = [request for request in await page.all() if request["decode"] == "d1"]
        by_fast = [request for request in await page.all() if request["decode"] == "d0"]
    slow = [one for request in by_slow for one in request["causes"] if "times as slowly as other workers" in one]
    assert any("at d1, " in one for one in slow), by_slow
    assert not any("slowly" in one for request in by_fast for one in request["causes"] if "decode" in one)


async def test_a_cold_tier_that_is_slow() -> None:
    async with seen(1, 1) as page:
        await page.ask(1)
        page.cluster.move_to_cold()
        await page.cluster.enlist("p1", "d0")
        page.cluster.colds["p1"].on_get = lambda: time.sleep(PLANTED_S)
        slowed = await page.ask(1)
    assert any("fetched KV at p1: " in one and "blocks from redis" in one for one in slowed["causes"]), slowed["causes"]


async def test_blocks_that_decode_does_not_find() -> None:
    def refuse(method: str, _: tuple[Any, ...]) -> None:
        if method == "lease":
            raise StoreError("the directory does not answer")

    async with seen(1, 1) as page:
        page.cluster.gates["d0"].before = refuse
        slow_down(page.cluster, "d0", PLANTED_S)
        await page.open(1, 2).read_all()
        slowed = await page.find(1)
    assert any("at d0 whose KV decode did not find" in one for one in slowed["causes"]), slowed["causes"]
