import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from cli.bench.plan import virtual_time
from deploy.actors.actor_host import LocalHost
from deploy.controller.supervised import EventLog, Supervision
from deploy.plan.config import SloSettings
from deploy.scaling.scaler import ASK_EVERY_S, Scaler
from router.observe.demand import Demand
from wire.errors import ConfigError, Unavailable
from wire.pools import PoolSizes
from wire.typed_reader import to_json

SLO = SloSettings(ttft_ms=2000.0, itl_ms=50.0, dwell_s=60.0, max_prefill=6, max_decode=4)


class ScaledHost(LocalHost):
    """Routers whose sums grow by `tokens_s` prompt tokens a second, or that answer `answer`."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens_s = dict.fromkeys(("router", "router-1"), 0)
        self.sums = dict.fromkeys(self.tokens_s, 0)
        self.answer: dict[str, str | Exception] = {}
        self.started = "first"

    async def call(self, name: str, method: str, *arguments: str | int, timeout_s: float) -> str:
        assert method == "demand"
        self.sums[name] += round(self.tokens_s[name] * ASK_EVERY_S)
        if isinstance(answer := self.answer.get(name), Exception):
            raise answer
        demand = Demand(started=self.started, prompt_tokens=self.sums[name], prefill_token_s=0.001)
        return answer or to_json(demand)


class World:
    """A scaler over two routers, and a fleet that has each size at once, or has no room."""

    def __init__(self) -> None:
        self.host = ScaledHost()
        self.sizes = PoolSizes(1, 1)
        self.orders: list[tuple[float, PoolSizes]] = []
        self.has_room = True
        clock = asyncio.get_running_loop().time
        self.events = EventLog(clock)
        means = Supervision(self.host, Path(), self.events, clock)
        self.scaler = Scaler(SLO, list(self.host.tokens_s), means, lambda: self.sizes, self._resize)
        self._task = asyncio.create_task(self.scaler.run())

    async def pass_by(self, seconds: float) -> PoolSizes:
        await asyncio.sleep(seconds)
        return self.sizes

    def end(self) -> None:
        self._task.cancel()

    @property
    def texts(self) -> list[str]:
        return [event.text for event in self.events.report()]

    async def _resize(self, prefill: int | None, decode: int | None) -> None:
        if not self.has_room:
            raise ConfigError("4 more prefill workers do not fit")
        self.sizes = PoolSizes(prefill or self.sizes.prefill, decode or self.sizes.decode)
        self.orders.append((asyncio.get_running_loop().time(), self.sizes))


def at_work(steps: Callable[[World], Awaitable[None]]) -> None:
    async def run() -> None:
        world = World()
        await steps(world)
        world.end()

    virtual_time.run(run())


def test_sizes_follow_a_load_that_comes_and_goes_and_events_say_why() -> None:
    async def steps(world: World) -> None:
        world.host.tokens_s = {"router": 2500, "router-1": 1000}
        assert (await world.pass_by(60.0)).prefill == 4
        assert any(text.startswith("prefill 1 to 2: ") for text in world.texts)
        world.host.tokens_s = dict.fromkeys(world.host.tokens_s, 0)
        assert await world.pass_by(400.0) == PoolSizes(1, 1)
        assert world.texts[-1].startswith("prefill ")
        assert " to 1: 0 uncached tokens/s arrive, 0 wait" in world.texts[-1]

    at_work(steps)


@pytest.mark.parametrize(
    "answer",
    [
        Unavailable("away"),
        "{",
        '{"started": "first", "gaps_s": NaN}',
        '{"started": "first", "prompt_tokens": -5}',
        '{"started": "first", "prompt_tokens": 1e300}',
        '{"started": "first", "prefill_token_s": 1e9}',
    ],
)
def test_a_router_that_is_silent_or_answers_nonsense_moves_no_size_and_is_named_once(answer: str | Exception) -> None:
    async def steps(world: World) -> None:
        world.host.tokens_s = {"router": 1500, "router-1": 1500}
        before = await world.pass_by(60.0)
        world.host.answer = {"router-1": answer}
        assert await world.pass_by(300.0) == before
        assert sum(text.startswith("the router-1 tells no demand, and counts as before") for text in world.texts) == 1

    at_work(steps)


def test_a_router_that_starts_again_moves_no_size() -> None:
    async def steps(world: World) -> None:
        world.host.tokens_s = {"router": 3500, "router-1": 0}
        before = await world.pass_by(60.0)
        orders = len(world.orders)
        world.host.sums, world.host.started = dict.fromkeys(world.host.sums, 0), "second"
        assert await world.pass_by(300.0) == before
        assert len(world.orders) == orders

    at_work(steps)


def test_an_order_without_room_is_an_event_and_is_not_repeated_within_the_dwell_time() -> None:
    async def steps(world: World) -> None:
        world.has_room = False
        world.host.tokens_s = {"router": 3500, "router-1": 0}
        assert await world.pass_by(50.0) == PoolSizes(1, 1)
        assert world.texts[1:] == ["the pools stay as they are: 4 more prefill workers do not fit"]
        world.has_room = True
        assert (await world.pass_by(60.0)).prefill == 4

    at_work(steps)
