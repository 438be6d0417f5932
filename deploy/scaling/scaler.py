"""The loop of the controller that asks the routers for their demand, and orders the sizes of the pools."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from deploy.actors.actor_host import ask
from deploy.controller.supervised import Supervision, reason_of, repeat
from deploy.plan.config import SloSettings
from deploy.processes.atomic_file import AtomicFile
from deploy.scaling.demand import WINDOW_S, Loads
from deploy.scaling.policy import Policy, SizeOrder
from router.observe.demand import Demand
from router.workers.controller_port import SizedPool
from wire.errors import BatonError
from wire.pools import PoolSizes, Role
from wire.tier import Duration
from wire.typed_reader import from_json, to_json

FILE = "orders.json"
ASK_EVERY_S = 2.0
ASK_TIMEOUT_S = 5.0


@dataclass(frozen=True)
class OrdersRecord:
    """The last order of each pool, from which a new controller goes on."""

    orders: tuple[SizeOrder, ...] = ()

    @classmethod
    def from_json(cls, text: str) -> "OrdersRecord":
        """Raises ConfigError for a malformed record."""
        return from_json(cls, text, "orders")


class Scaler:
    """Sizes that follow `slo`: the demand of the routers in, orders to the fleet out, each with its reason as an event.

    A router that does not answer, or answers nonsense, keeps its last demand, and is named once.
    """

    def __init__(
        self,
        slo: SloSettings,
        routers: Sequence[str],
        means: Supervision,
        sizes: Callable[[], PoolSizes],
        resize: Callable[[int | None, int | None], Awaitable[object]],
        start_duration: Duration,
    ) -> None:
        """sizes: returns the ordered sizes. resize: orders sizes, None leaving a pool as it is; see `Fleet.resize`.

        start_duration: a worker's time from its order until it serves.

        Goes on from the last orders of an earlier controller, by their record in the run folder.
        """
        self._routers = routers
        self._means = means
        self._sizes = sizes
        self._resize = resize
        self._start_duration = start_duration
        self._loads = Loads((slo.ttft_ms or 0.0) / 1000)
        self._slo = slo
        self._record = AtomicFile(means.run_dir / FILE)
        known = self._record.recall(OrdersRecord.from_json) or OrdersRecord()
        # A later time is of the machine's life before this one.
        self._last = {order.role: order for order in known.orders if order.at_s <= means.clock()}
        self._policy = Policy(slo, self._last.values())
        self._noted: dict[str, str] = {}

    @property
    def problems(self) -> tuple[str, ...]:
        """Limits that no size within the bounds meets, in words."""
        return self._policy.problems

    @property
    def pools(self) -> tuple[SizedPool, ...]:
        """The pools that follow a limit, with their last orders."""
        return tuple(self._pool(role) for role in self._slo.roles)

    async def run(self) -> None:
        """Follows the demand until cancelled."""
        await repeat("the care for the limits", self._step, self._means.events)

    async def _step(self) -> None:
        await asyncio.sleep(ASK_EVERY_S)
        await asyncio.gather(*map(self._ask, self._routers))
        load = self._loads.load(min(self._start_duration.mean_s, WINDOW_S))
        orders = list(self._policy.decide(load, self._sizes(), self._means.clock()))
        if orders:
            await self._order(orders)
        for role in Role:
            self._note(f"limit of {role.value}", self._policy.problem(role))

    async def _ask(self, router: str) -> None:
        try:
            answer = await ask(self._means.host, router, "demand", answers=Demand, timeout_s=ASK_TIMEOUT_S)
        except BatonError as error:
            self._note(router, f"the {router} tells no demand, and counts as before: {error.message}")
        else:
            self._note(router, "")
            self._loads.take(router, answer, self._means.clock())

    async def _order(self, orders: Sequence[SizeOrder]) -> None:
        """Orders both pools at once, so that a worker may go from one to the other."""
        for order in orders:
            self._means.events.note(order.reason)
        try:
            await self._resize(*(next((one.size for one in orders if one.role is role), None) for role in Role))
        except BatonError as error:
            self._note("order", f"the pools stay as they are: {reason_of(error)}")
        else:
            self._note("order", "")
            self._last |= {order.role: order for order in orders}
            self._record.try_write(to_json(OrdersRecord(tuple(self._last.values()))).encode())

    def _pool(self, role: Role) -> SizedPool:
        limit, last = self._slo.describe(role), self._last.get(role)
        return (
            SizedPool(role, limit, last.reason, max(0.0, self._means.clock() - last.at_s))
            if last
            else SizedPool(role, limit)
        )

    def _note(self, what: str, text: str) -> None:
        """Notes a state as an event when it begins; "" ends it."""
        if text and text != self._noted.get(what):
            self._means.events.note(text)
        self._noted[what] = text
