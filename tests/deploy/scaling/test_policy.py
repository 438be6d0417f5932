import math
import tracemalloc
from collections.abc import Callable, Iterable
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deploy.plan.config import SloSettings
from deploy.scaling.demand import PoolLoad
from deploy.scaling.policy import (
    IDLE_DWELLS,
    MOST_FACTOR,
    RESERVE_DWELLS,
    REVERSE_S,
    Margin,
    Policy,
    PoolOrders,
)
from wire.pools import PoolSizes, Role

EVERY_S = 2.0
DWELL_S = 120.0
START = PoolSizes(1, 1)
SLO = SloSettings(ttft_ms=2000.0, itl_ms=50.0, dwell_s=DWELL_S, max_prefill=8, max_decode=6)
QUIET = PoolLoad(prefill_token_s=0.001)


def prompts(workers: float) -> PoolLoad:
    """A load of prompts that keeps so many workers busy, of a token in 1 ms."""
    return PoolLoad(prefill_tokens_s=workers * 1000, prompt_len=1.0, prefill_token_s=0.001)


def streams(number: float, itl_s: float = 0.02) -> PoolLoad:
    tokens_s = number / itl_s
    return PoolLoad(
        decode_tokens_s=tokens_s, num_streams=number, streams_beside=number, itl_s=itl_s, prefill_token_s=0.001
    )


class Night:
    """A policy, and pools that have each size at once. orders: the time, the role, the sizes before and after."""

    def __init__(self, slo: SloSettings = SLO, sizes: PoolSizes = START) -> None:
        self.policy, self.sizes, self.now_s = Policy(slo), sizes, 0.0
        self.orders: list[tuple[float, Role, int, int]] = []
        self.reasons: list[str] = []

    def pass_by(self, seconds: float, load: Callable[[float], PoolLoad] | PoolLoad) -> PoolSizes:
        for _ in range(round(seconds / EVERY_S)):
            self.now_s += EVERY_S
            now = load(self.now_s) if callable(load) else load
            for order in list(self.policy.decide(now, self.sizes, self.now_s)):
                self.orders.append((self.now_s, order.role, self.sizes[order.role], order.size))
                self.reasons.append(order.reason)
                sizes = {role.value: self.sizes[role] for role in Role} | {order.role.value: order.size}
                self.sizes = PoolSizes(**sizes)
        return self.sizes


def reversed_soon(orders: Iterable[tuple[float, Role, int, int]]) -> list[tuple[float, float]]:
    """Returns the pairs of orders of one pool in opposite directions within REVERSE_S."""
    listed = list(orders)
    pairs = []
    for role in Role:
        own = [(at_s, after > before) for at_s, of, before, after in listed if of is role]
        pairs += [(one[0], two[0]) for one, two in pairwise(own) if one[1] is not two[1]]
    return [(first_s, then_s) for first_s, then_s in pairs if then_s - first_s < REVERSE_S]


def test_a_pool_grows_at_once_and_says_why() -> None:
    night = Night()
    assert night.pass_by(EVERY_S, prompts(3.5)).prefill == 4
    assert night.reasons == ["prefill 1 to 4: 3500 uncached tokens/s arrive, 0 wait, and a worker computes 1000/s"]


def test_pools_go_to_the_minimum_without_traffic_after_the_dwell_and_not_before() -> None:
    night = Night()
    night.pass_by(60.0, prompts(3.5))
    assert night.pass_by(DWELL_S - 4 * EVERY_S, QUIET).prefill == 4
    assert night.pass_by(60.0, QUIET) == PoolSizes(1, 1)


def test_the_minimum_of_prefill_may_be_none() -> None:
    night = Night(SloSettings(ttft_ms=2000.0, dwell_s=60.0, min_prefill=0, max_prefill=4))
    assert night.pass_by(200.0, QUIET) == PoolSizes(0, 1)
    assert night.pass_by(EVERY_S, prompts(1.5)).prefill == 2, "a pool of none is seen, too"


def test_a_square_wave_holds_the_size_of_its_peaks() -> None:
    night = Night()
    night.pass_by(1200.0, lambda now_s: prompts(3.5 if now_s % 40 < 20 else 0.0))
    assert night.sizes.prefill >= 4
    assert len([one for one in night.orders if one[1] is Role.PREFILL]) <= 2


def test_a_queue_counts_though_nothing_arrives() -> None:
    waiting = PoolLoad(waiting_tokens=60_000.0, prefill_token_s=0.001)
    assert Night().pass_by(EVERY_S, waiting).prefill >= 3


def test_streams_are_sized_by_the_learned_time_of_a_token() -> None:
    night = Night()
    night.pass_by(60.0, streams(10.0))
    night.pass_by(60.0, streams(5.0, 0.015))
    assert night.sizes.decode == 1, "a worker carries 40 streams within 50 ms: 10 ms and 1 ms for each"
    night.pass_by(EVERY_S, streams(100.0, 0.11))
    assert night.sizes.decode >= 3


def test_quick_workers_with_few_streams_are_not_taken_for_idle() -> None:
    night = Night(sizes=PoolSizes(1, 4))
    load = PoolLoad(decode_tokens_s=4000.0, num_streams=60.0, streams_beside=15.0, itl_s=0.015, prefill_token_s=0.001)
    night.pass_by((RESERVE_DWELLS + 1) * DWELL_S, load)
    assert night.sizes.decode == 3, "200 streams at 50 ms a token, of which a worker carries 85"


def test_streams_that_end_between_two_looks_are_learned_from() -> None:
    night = Night()
    seen = PoolLoad(decode_tokens_s=23.0, itl_s=0.01, prefill_token_s=0.001)
    assert night.pass_by(EVERY_S, seen).decode == 1, "one stream at a time, in a fifth of the limit"


def test_a_first_stream_is_no_reason_to_grow_before_its_tokens_have_a_time() -> None:
    night = Night()
    assert night.pass_by(EVERY_S, PoolLoad(num_streams=1.0)).decode == 1
    assert night.pass_by(EVERY_S, streams(500.0, 0.1)).decode > 1


def test_a_pool_without_a_limit_keeps_its_size() -> None:
    night = Night(SloSettings(ttft_ms=2000.0, max_prefill=8), PoolSizes(1, 2))
    night.pass_by(1000.0, streams(500.0, 0.3))
    assert night.sizes.decode == 2


def test_a_size_by_hand_holds_for_the_dwell_time() -> None:
    night = Night()
    night.pass_by(200.0, QUIET)
    night.sizes = PoolSizes(5, 1)
    assert night.pass_by(DWELL_S - EVERY_S, QUIET).prefill == 5
    assert night.pass_by(2 * EVERY_S, QUIET).prefill == 1
    night.sizes = PoolSizes(2, 1)
    assert night.pass_by(DWELL_S - EVERY_S, prompts(5.5)).prefill == 2
    assert night.pass_by(2 * EVERY_S, prompts(5.5)).prefill == 6


def test_late_requests_raise_the_margin_and_the_reserve_and_punctual_ones_lower_them() -> None:
    margin = Margin(allowed=0.05, most=8)
    margin.learn(judged=1000, late=0, late_elsewhere=0, size=2)
    assert (margin.factor, margin.reserve) == (1.0, 0.5)
    margin.learn(judged=100, late=40, late_elsewhere=0, size=2)
    raised = margin.factor, margin.reserve
    assert raised == pytest.approx((1.7, 1.55))
    margin.learn(judged=100, late=0, late_elsewhere=5, size=2)
    assert (margin.factor, margin.reserve) == raised, "the other pool has used up what may be late"
    margin.learn(judged=100, late=1e9, late_elsewhere=0, size=2)
    assert (margin.factor, margin.reserve) == (MOST_FACTOR, 8)
    for _ in range(1000):
        margin.learn(judged=100, late=0, late_elsewhere=0, size=2)
    assert (margin.factor, margin.reserve) == (0.0, 0.0)


def late_bursts(now_s: float) -> PoolLoad:
    """Bursts of 20 s every 3 dwell times less a bit, all of whose requests are late; one request between them."""
    is_burst = now_s % (3 * DWELL_S - 30.0) < 20
    return replace(prompts(5.5 if is_burst else 0.1), judged=20.0 * is_burst, late_first=20.0 * is_burst)


def test_late_requests_keep_a_reserve_between_bursts() -> None:
    night = Night()
    night.pass_by(1200.0, late_bursts)
    seen: list[int] = []
    for _ in range(300):
        seen.append(night.pass_by(EVERY_S, late_bursts).prefill)
    assert min(seen) >= 6, "a dwell time alone is shorter than the time between two bursts"
    assert reversed_soon(night.orders) == []


def test_without_traffic_the_pools_are_at_the_minimum_in_a_bounded_time_whatever_was_late() -> None:
    night = Night()
    night.pass_by(1200.0, late_bursts)
    assert night.sizes.prefill > 1
    assert night.pass_by(IDLE_DWELLS * DWELL_S + EVERY_S, QUIET) == PoolSizes(1, 1)


def test_a_trickle_does_not_keep_the_reserve_for_long() -> None:
    night = Night()
    night.pass_by(1200.0, late_bursts)
    assert night.pass_by((RESERVE_DWELLS + 1) * DWELL_S, prompts(0.1)).prefill <= 2


def test_a_burst_that_the_queue_takes_within_the_limit_is_no_reason_to_grow() -> None:
    night = Night(SloSettings(ttft_ms=20_000.0, max_prefill=8), PoolSizes(3, 1))
    burst = PoolLoad(prefill_tokens_s=1500.0, arriving_tokens_s=8000.0, waiting_tokens=12_000.0, prefill_token_s=0.001)
    assert night.pass_by(EVERY_S, burst).prefill == 3, "8 s at 5 beyond 3, and 12 s of backlog, are 52 s: 3 in 20 s"
    assert night.pass_by(EVERY_S, replace(burst, waiting_tokens=60_000.0)).prefill == 5


@pytest.mark.parametrize(
    "wanted",
    [
        lambda now_s: 6.5 if now_s % 90 < 20 else 0.0,
        lambda now_s: 3.5 + 3.0 * math.sin(now_s / 600.0),
        lambda now_s: 5.5 if now_s > 900.0 else 1.5,
    ],
    ids=["bursts", "a curve of the day", "a step"],
)
def test_no_load_makes_a_pool_oscillate(wanted: Callable[[float], float]) -> None:
    night = Night()
    night.pass_by(7200.0, lambda now_s: prompts(wanted(now_s)))
    assert reversed_soon(night.orders) == []
    prefill = [after > before for _, role, before, after in night.orders if role is Role.PREFILL]
    assert sum(one is not two for one, two in pairwise(prefill)) <= 4, "a turn for each rise and fall of the load"


@pytest.mark.parametrize("slo", [SLO, SloSettings(itl_ms=5.0, max_decode=2)])
def test_a_limit_below_the_fastest_token_is_a_problem_and_no_crash(slo: SloSettings) -> None:
    night = Night(slo)
    night.pass_by(60.0, streams(3.0, 0.012))
    told = ("slo.itl_ms is 5: the fastest tokens so far took 12.0 ms, with slo.max_decode workers",)
    assert night.policy.problems == (told if slo.itl_ms == 5.0 else ())


def test_a_limit_below_the_time_of_one_prompt_is_a_problem() -> None:
    night = Night(SloSettings(ttft_ms=100.0, max_prefill=2))
    night.pass_by(4.0, PoolLoad(prompt_len=900.0, prefill_tokens_s=900.0, prefill_token_s=0.001))
    told = "slo.ttft_ms is 100: a prompt has 900 uncached tokens, which take a worker 900 ms alone"
    assert night.policy.problems == (told,)
    night.pass_by(4.0, PoolLoad(prompt_len=9.0, prefill_tokens_s=9.0, prefill_token_s=0.001))
    assert not night.policy.problems


def test_the_nonsense_of_one_worker_moves_no_pool() -> None:
    night = Night()
    night.pass_by(60.0, prompts(0.5))
    lie = PoolLoad(prefill_tokens_s=500.0, prompt_len=1.0, prefill_token_s=60.0)
    assert night.pass_by(EVERY_S, lie) == PoolSizes(1, 1)


def test_a_dwell_time_of_a_day_takes_little_memory() -> None:
    orders = PoolOrders((1, 8), 0.95, 86400.0)
    tracemalloc.start()
    try:
        assert {orders.decide(1.0, 1.0, 1, EVERY_S * number) for number in range(10_000)} == {None}
        assert tracemalloc.get_traced_memory()[0] < 50_000
    finally:
        tracemalloc.stop()


def test_a_peak_within_a_long_dwell_time_is_wanted_to_its_end() -> None:
    orders, size, given_orders, dwell_s = PoolOrders((1, 8), 0.95, 86400.0), 1, list[tuple[float, int]](), 86400.0
    for minute in range(3000):
        load = 6.0 if minute == 33 else 1.0
        if (ordered := orders.decide(load, load**9, size, 60.0 * minute)) is not None:
            given_orders.append((60.0 * minute, ordered))
            size = ordered
    (grown_s, most), (shrunk_s, least) = given_orders
    assert (most, least) == (6, 1)
    assert 0.98 * dwell_s < shrunk_s - grown_s < 1.02 * dwell_s


AMOUNTS = st.floats(0, 1e15)
LOADS = st.builds(
    PoolLoad,
    prefill_tokens_s=AMOUNTS,
    waiting_tokens=AMOUNTS,
    prompt_len=AMOUNTS,
    decode_tokens_s=AMOUNTS,
    num_streams=AMOUNTS,
    streams_beside=AMOUNTS,
    itl_s=st.none() | AMOUNTS,
    prefill_token_s=st.none() | st.floats(1e-9, 60.0),
    judged=AMOUNTS,
    late_first=AMOUNTS,
    late_next=AMOUNTS,
)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(LOADS | st.just(QUIET), st.sampled_from([0.0, 29.0, 61.0, 150.0])), max_size=30))
def test_orders_stay_within_bounds_and_are_never_reversed_soon(drawn: list[tuple[PoolLoad, float]]) -> None:
    night = Night(SloSettings(ttft_ms=1.0, itl_ms=0.1, dwell_s=60.0, max_prefill=8, min_decode=2, max_decode=6))
    night.sizes = PoolSizes(1, 2)
    for load, passed_s in drawn:
        night.now_s += passed_s
        night.pass_by(EVERY_S, load)
    assert reversed_soon(night.orders) == []
    assert all(1 <= after <= 8 for _, role, _, after in night.orders if role is Role.PREFILL)
    assert all(2 <= after <= 6 for _, role, _, after in night.orders if role is Role.DECODE)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.floats(0, 10), st.sampled_from([2.0, 30.0, 61.0])), max_size=80))
def test_a_drawn_wave_is_never_followed_back_and_forth(drawn: list[tuple[float, float]]) -> None:
    orders, size, now_s, given_orders = PoolOrders((1, 8), 0.95, 60.0), 1, 0.0, []
    for wanted, passed_s in drawn:
        now_s += passed_s
        if (ordered := orders.decide(wanted, wanted, size, now_s)) is not None:
            given_orders.append((now_s, Role.DECODE, size, ordered))
            size = ordered
    assert reversed_soon(given_orders) == []
    assert all(before != after and math.isfinite(after) for _, _, before, after in given_orders)
