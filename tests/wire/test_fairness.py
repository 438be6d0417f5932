"""Counters of tenants, and the order in which queues that tenants share are served."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from wire.load.fairness import ALONE, BURST, QUANTUM, FairShares, Precedence, Standing, by_share


@dataclass(frozen=True)
class Item:
    """A request in a queue: a name, its place by arrival, and what it takes."""

    name: str
    place: int = 0
    cost: float = 10.0
    standing: Standing = ALONE


def of(tenant: str, *places: int, spent: float = 0.0, weight: float = 1.0, cost: float = 10.0) -> list[Item]:
    standing = Standing(tenant.encode(), spent, weight=weight)
    return [Item(f"{tenant}{place}", place, cost, standing) for place in places]


def names(queued: Sequence[Item]) -> str:
    return " ".join(one.name for one in by_share(queued, lambda one: one.place))


@pytest.mark.parametrize(
    ("queued", "expected"),
    [
        pytest.param([], "", id="an empty queue"),
        pytest.param(of("a", 2, 0, 1, 1), "a0 a1 a1 a2", id="one tenant's are in their own order"),
        pytest.param([*of("a", 0, 1, 2), *of("b", 3)], "a0 b3 a1 a2", id="a second tenant's waits for one request"),
        pytest.param([*of("a", 0, 1, spent=1), *of("b", 2, 3)], "b2 a0 b3 a1", id="the one that spent less begins"),
        pytest.param([*of("a", 0, 1, cost=40), *of("b", *range(2, 7))], "a0 b2 b3 b4 b5 a1 b6", id="costs count"),
        pytest.param([*of("a", *range(4), weight=2), *of("b", 4, 5)], "a0 b4 a1 a2 b5 a3", id="weights count"),
        pytest.param([*of("a", 0, 1, spent=99), *of("b", 2, 3, 4)], "b2 b3 b4 a0 a1", id="a debt is paid first"),
        pytest.param([*of("a", 0, cost=0), *of("a", 1, cost=0), *of("b", 2)], "a0 a1 b2", id="cached tokens are free"),
    ],
)
def test_the_tenant_that_spent_least_is_next(queued: list[Item], expected: str) -> None:
    assert names(queued) == expected


def test_a_priority_counts_within_its_tenant_alone() -> None:
    hurried = [Item(f"a{place}", place, 10, Standing(b"a", priority=-place)) for place in range(3)]
    assert names([*hurried, *of("b", 3, 4)]) == "a2 b3 a1 b4 a0"


def test_a_deferred_request_goes_behind_others_of_its_tenant_and_priority() -> None:
    late, urgent_late = Standing(b"a", is_deferred=True), Standing(b"a", priority=-1, is_deferred=True)
    queued = [Item("late", 0, 10, late), Item("urgent_late", 1, 10, urgent_late), *of("a", 2, 3), *of("b", 4, 5, 6, 7)]
    assert names(queued) == "urgent_late b4 a2 b5 a3 b6 late b7"


def test_a_request_tells_whether_it_is_deferred_by_now() -> None:
    shares, answers = FairShares(), iter([False, True, False])
    precedence = Precedence(is_deferred=lambda: next(answers))
    assert [shares.standing("a", precedence).is_deferred for _ in range(3)] == [False, True, False]
    assert not shares.standing("a", Precedence()).is_deferred


def test_an_idle_tenant_saves_a_burst_at_most() -> None:
    shares = FairShares()
    shares.enter("heavy")
    shares.charge("heavy", 10 * BURST)
    shares.enter("light")
    assert shares.spent("light") == 8 * BURST, "a burst below the other"
    shares.charge("light", 5)
    shares.leave("light")
    shares.enter("light")
    assert shares.spent("light") == 8 * BURST + 5, "what it was served stays"
    shares.charge("heavy", 300)
    shares.leave("light")
    shares.enter("light")
    assert shares.spent("light") == 8 * BURST + 300, "it has been overtaken by more than a burst while it was idle"
    shares.charge("light", 2 * BURST)
    shares.leave("light")
    shares.enter("light")
    assert shares.spent("light") == 10 * BURST + 300, "what it was served beyond the others stays, too"


def test_tenants_that_come_one_after_another_begin_alike() -> None:
    shares = FairShares()
    shares.enter("heavy")
    shares.charge("heavy", 5 * BURST)
    for tenant in ("a", "b", "c"):
        shares.enter(tenant)
    assert [shares.spent(tenant) for tenant in ("a", "b", "c")] == [3 * BURST] * 3


def test_a_tenant_with_streams_alone_counts_as_idle_and_is_charged() -> None:
    shares = FairShares()
    for tenant in ("streams", "heavy"):
        shares.enter(tenant)
    shares.begin_stream("streams")
    shares.charge_output("streams", 10)
    shares.charge("heavy", 9 * BURST)
    shares.enter("streams")
    assert (shares.spent("streams"), shares.output_cost("streams")) == (7 * BURST, 10)
    for tenant in ("streams", "heavy"):
        shares.leave(tenant)
    assert shares.check() == ["1 requests are counted for tenants"]
    shares.end_stream("streams")
    assert shares.check() == []


def test_the_second_of_a_burst_of_a_light_tenant_is_before_a_backlog() -> None:
    shares, costs = FairShares(), {"heavy": 1000.0, "light": 1000.0}
    shares.enter("heavy")
    shares.charge("heavy", 5 * BURST)
    order = []
    for _ in range(12):
        shares.enter("light")
        queued = [Item(one, 0, cost, shares.standing(one, Precedence())) for one, cost in costs.items()]
        order.append(by_share(queued, lambda one: one.place)[0].name)
        shares.charge(order[-1], 1000)
        shares.leave("light")
    assert order[:9] == ["light"] * 9
    assert order[9:] == ["heavy", "light", "heavy"], "beyond a burst they take turns"


def test_a_prompt_counts_once_it_is_over_or_has_taken_a_quantum() -> None:
    shares = FairShares()
    for tenant in ("a", "b"):
        shares.enter(tenant)
    start = shares.spent("a")
    shares.defer("a", 1000)
    shares.defer("b", 10)
    assert (shares.spent("a"), shares.spent("b")) == (start, start)
    shares.settle("a")
    assert shares.spent("a") == start + 1000
    shares.defer("a", QUANTUM)
    assert shares.spent("a") == start + 1000 + QUANTUM


def test_nothing_is_kept_once_no_tenant_has_an_open_request() -> None:
    shares = FairShares()
    shares.enter("heavy")
    shares.charge("heavy", 1000)
    assert shares.check() == ["1 requests are counted for tenants"]
    shares.leave("heavy")
    assert shares.check() == []
    shares.enter("light")
    assert (shares.spent("heavy"), shares.spent("light")) == (0, -BURST)
    shares.charge("heavy", 10)
    shares.charge_output("heavy", 10)
    assert (shares.spent("heavy"), shares.output_cost("heavy")) == (0, 0), "a charge that comes late is dropped"


def test_a_worker_charges_what_the_sum_of_a_router_has_grown_by() -> None:
    router, worker = FairShares(), FairShares()
    for one in (router, worker):
        one.enter("a")
        one.charge("a", BURST)
    router.charge("a", 7)
    router.charge_output("a", 50)
    worker.learn_output("a", router.output_cost("a"))
    assert worker.spent("a") == 0, "the first sum is where it begins"
    router.charge_output("a", 30)
    worker.learn_output("a", router.output_cost("a"))
    worker.learn_output("a", router.output_cost("a"))
    assert (router.spent("a"), worker.spent("a")) == (87, 30)
    worker.learn_output("a", 10)
    assert worker.spent("a") == 30, "another router begins anew"
    worker.learn_output("a", 15)
    assert worker.spent("a") == 35


@dataclass
class Server:
    """Serves one request after another, of tenants that always have one waiting."""

    shares: FairShares = field(default_factory=FairShares)
    served: dict[str, float] = field(default_factory=dict)

    def serve(self, costs: dict[str, float], weights: dict[str, float]) -> None:
        queued = [
            Item(tenant, 0, cost, self.shares.standing(tenant, Precedence(weights[tenant])))
            for tenant, cost in costs.items()
        ]
        chosen = by_share(queued, lambda one: one.place)[0]
        self.shares.charge(chosen.name, chosen.cost / weights[chosen.name])
        self.served[chosen.name] += chosen.cost / weights[chosen.name]


TENANTS = ["a", "b", "c"]
COSTS = st.lists(st.lists(st.integers(0, 500), min_size=3, max_size=3), min_size=1, max_size=60)


@settings(max_examples=200)
@given(COSTS, st.lists(st.sampled_from([0.5, 1.0, 4.0]), min_size=3, max_size=3))
def test_no_tenant_with_a_backlog_falls_behind_by_more_than_the_largest_request(
    rounds: list[list[int]], given_weights: list[float]
) -> None:
    weights = dict(zip(TENANTS, given_weights, strict=True))
    server = Server(served=dict.fromkeys(TENANTS, 0.0))
    for tenant in TENANTS:
        server.shares.enter(tenant)
    largest = max(cost / weights[tenant] for costs in rounds for tenant, cost in zip(TENANTS, costs, strict=True))
    for costs in rounds:
        server.serve(dict(zip(TENANTS, map(float, costs), strict=True)), weights)
        assert max(server.served.values()) - min(server.served.values()) <= largest + 2


@settings(max_examples=200)
@given(st.lists(st.tuples(st.sampled_from(TENANTS), st.integers(0, 50), st.integers(0, 3)), max_size=40))
def test_each_tenant_keeps_its_own_order_and_nothing_is_lost(drawn: list[tuple[str, int, int]]) -> None:
    queued = [
        Item(tenant, place, cost, Standing(tenant, priority=priority))
        for place, (tenant, cost, priority) in enumerate(drawn)
    ]
    ordered = by_share(queued, lambda one: one.place)
    for tenant in TENANTS:
        own = [one for one in queued if one.name == tenant]
        assert [one for one in ordered if one.name == tenant] == sorted(own, key=lambda one: one.standing.priority)
    assert sorted(ordered, key=lambda one: one.place) == queued
