import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from cli.bench.plan import virtual_time
from deploy.actors.actor_host import LocalHost
from deploy.controller.supervised import EventLog, Supervision
from deploy.plan.config import SloSettings
from deploy.scaling.demand import START_S, Loads, PoolLoad
from deploy.scaling.policy import REVERSE_S
from deploy.scaling.scaler import ASK_EVERY_S, FILE, Scaler
from router.observe.demand import Demand
from wire.errors import ConfigError, Unavailable
from wire.pools import PoolSizes
from wire.tier import Duration
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

    def __init__(self, folder: Path) -> None:
        self.host = ScaledHost()
        self.sizes = PoolSizes(1, 1)
        self.orders: list[tuple[float, PoolSizes]] = []
        self.has_room = True
        self.start_time = Duration(START_S)
        clock = asyncio.get_running_loop().time
        self.events = EventLog(clock)
        self.folder = folder
        self._means = Supervision(self.host, folder, self.events, clock)
        self.start()

    def start(self) -> None:
        """Starts a scaler, which knows of earlier ones what they have recorded."""
        self.scaler = Scaler(
            SLO, list(self.host.tokens_s), self._means, lambda: self.sizes, self._resize, self.start_time
        )
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
    async def run(folder: Path) -> None:
        world = World(folder)
        await steps(world)
        world.end()

    with TemporaryDirectory() as folder:
        virtual_time.run(run(Path(folder)))


def test_sizes_follow_a_load_that_comes_and_goes_and_events_say_why() -> None:
    async def steps(world: World) -> None:
        world.host.tokens_s = {"router": 2500, "router-1": 1000}
        assert (await world.pass_by(60.0)).prefill == 4
        assert any(text.startswith("prefill 1 to 2: ") for text in world.texts)
        world.host.tokens_s = dict.fromkeys(world.host.tokens_s, 0)
        assert await world.pass_by(400.0) == PoolSizes(1, 1)
        assert [sizes.prefill for _, sizes in world.orders][-2:] == [4, 1], (
            "not one by one: each bars growth for a minute"
        )
        assert world.texts[-1].startswith("prefill ")
        assert " to 1: 0 uncached tokens/s arrive, 0 wait" in world.texts[-1]

    at_work(steps)


@pytest.mark.parametrize(("start_s", "wanted"), [(8.0, 2), (30.0, 3), (1e6, 6)])
def test_a_longer_start_orders_more_for_what_arrives_until_then(start_s: float, wanted: int) -> None:
    async def steps(world: World) -> None:
        for _ in range(50):
            world.start_time.learn(start_s)
        world.host.tokens_s = {"router": 2500, "router-1": 0}
        assert (await world.pass_by(2 * ASK_EVERY_S + 1)).prefill == wanted

    at_work(steps)


def test_workers_that_start_sooner_than_routers_are_asked_do_not_hide_what_arrives(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    arriving_tokens_s: list[float] = []
    load = Loads.load

    def load_noted(loads: Loads, start_s: float) -> PoolLoad:
        arriving_tokens_s.append((answer := load(loads, start_s)).arriving_tokens_s)
        return answer

    async def steps(world: World) -> None:
        for _ in range(50):
            world.start_time.learn(0.1)
        world.host.tokens_s = {"router": 1000, "router-1": 1500}
        await world.pass_by(3 * ASK_EVERY_S + 1)

    monkeypatch.setattr(Loads, "load", load_noted)
    at_work(steps)
    assert arriving_tokens_s == [0.0, 2500.0, 2500.0], "no rate by one answer"


def test_a_new_controller_does_not_reverse_the_last_order_of_its_predecessor_soon() -> None:
    async def steps(world: World) -> None:
        world.host.tokens_s = {"router": 3500, "router-1": 0}
        await world.pass_by(60.0)
        world.host.tokens_s["router"] = 0
        while world.sizes.prefill > 1:
            await world.pass_by(ASK_EVERY_S)
        shrunk_s, _ = world.orders[-1]
        world.end()
        world.start()
        assert world.scaler.pools[0].last_order == [one for one in world.texts if one.startswith("prefill ")][-1]
        world.host.tokens_s["router"] = 3500
        assert (await world.pass_by(REVERSE_S + 3 * ASK_EVERY_S)).prefill > 1
        grown_s, _ = next(one for one in world.orders if one[0] > shrunk_s)
        assert grown_s - shrunk_s >= REVERSE_S

    at_work(steps)


@pytest.mark.parametrize(
    "record", ["{", '{"orders": [{"role": "prefill", "before": 2, "size": 1, "reason": "", "at_s": 1e9}]}']
)
def test_a_record_that_is_damaged_or_of_an_earlier_start_of_the_machine_bars_no_order(record: str) -> None:
    async def steps(world: World) -> None:
        world.end()
        (world.folder / FILE).write_text(record)
        world.start()
        world.host.tokens_s["router"] = 3500
        assert (await world.pass_by(10 * ASK_EVERY_S)).prefill > 1

    at_work(steps)


def test_a_pool_tells_its_limit_and_its_last_order() -> None:
    async def steps(world: World) -> None:
        prefill, decode = world.scaler.pools
        assert prefill.limit == "slo.ttft_ms 2000 for 95% of requests, 1 to 6 workers"
        assert decode.limit == "slo.itl_ms 50 for 95% of requests, 1 to 4 workers"
        assert not prefill.last_order
        world.host.tokens_s["router"] = 3500
        await world.pass_by(60.0)
        prefill, decode = world.scaler.pools
        assert prefill.last_order in world.texts
        assert prefill.age_s > 0
        assert not decode.last_order

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
