"""The choice between reading blocks and computing them, on a clock that moves only with work."""

from contextlib import closing
from math import inf

import pytest

from kv_store.node.arena import Arena
from kv_store.node.directory import Directory
from kv_store.node_store import NodeStore
from kv_store.prefix.costs import Costs, SourceCosts
from tests.harness.fake_clock import FakeClock
from tests.harness.paced_tier import PacedTier
from tests.kv_store.learned_costs import taught
from tests.kv_store.names import LAYOUT, names_of, put_one
from tests.kv_store.pools import filled_pool, pages_from

NUM_BLOCKS = 16
NUM_WARM = 20
NUM_TIMED = 20


class Server:
    """A worker that fetches what it can of each prompt, and computes the rest at `block_s` a block."""

    def __init__(self, tier: PacedTier | None, clock: FakeClock, block_s: float) -> None:
        self._clock = clock
        self._block_s = block_s
        self._arena = Arena.anonymous(LAYOUT.block_bytes, 1)
        cold = [] if tier is None else [tier]
        self._store = NodeStore(LAYOUT, self._arena, Directory(1, clock), cold, filled_pool([]), clock)

    def close(self) -> None:
        self._arena.close()

    def ttft_s(self, prompt: int) -> float:
        began_s = self._clock.now
        names = names_of(NUM_BLOCKS * LAYOUT.block_size, first=prompt)
        num_found = len(self._store.fetch(names, pages_from(0, NUM_BLOCKS)).tiers)
        computing_s = (NUM_BLOCKS - num_found) * self._block_s
        self._clock.now += computing_s
        # Tokens of 1024 a step, whatever is left of this prompt: other prompts share the steps.
        self._store.costs.note_prefill(1024, 1024 * self._block_s / LAYOUT.block_size)
        return self._clock.now - began_s


def fill(tier: PacedTier, prompt: int) -> None:
    for name in names_of(NUM_BLOCKS * LAYOUT.block_size, first=prompt):
        put_one(tier, name)


def mean_ttft_s(tier: PacedTier | None, clock: FakeClock, block_s: float) -> float:
    """Of prompts that the tier has, after the first twenty."""
    with closing(Server(tier, clock, block_s)) as server:
        took_s = []
        for number in range(NUM_WARM + NUM_TIMED):
            prompt = number * 1000
            if tier is not None:
                fill(tier, prompt)
            took_s.append(server.ttft_s(prompt))
    return sum(took_s[NUM_WARM:]) / NUM_TIMED


@pytest.mark.parametrize("block_kib", [4, 16, 1024])
@pytest.mark.parametrize("compute_s", [0.002, 0.05])
def test_a_tier_of_1_mb_a_second_and_50_ms_makes_a_hit_no_slower_than_a_miss(block_kib: int, compute_s: float) -> None:
    clock = FakeClock()
    slow = PacedTier(LAYOUT, clock, latency_s=0.05, block_s=block_kib / 1000)
    assert mean_ttft_s(slow, clock, compute_s) <= 1.10 * mean_ttft_s(None, clock, compute_s)


def test_a_tier_that_never_has_a_block_is_hardly_asked() -> None:
    clock = FakeClock()
    tier = PacedTier(LAYOUT, clock, latency_s=0.05, block_s=0.001)
    with closing(Server(tier, clock, 0.01)) as server:
        took_s = [server.ttft_s(number * 1000) for number in range(60)]
    assert sum(took_s[20:]) <= 1.10 * 40 * NUM_BLOCKS * 0.01
    assert tier.num_calls < 60


def test_a_quick_tier_is_read() -> None:
    clock = FakeClock()
    quick = PacedTier(LAYOUT, clock, latency_s=0.001, block_s=0.0001)
    assert mean_ttft_s(quick, clock, 0.01) <= 0.08 * mean_ttft_s(None, clock, 0.01)


def test_a_tier_that_was_slow_is_read_again_within_a_minute_of_being_quick() -> None:
    clock = FakeClock()
    tier = PacedTier(LAYOUT, clock, latency_s=0.3, block_s=0.1)
    with closing(Server(tier, clock, 0.01)) as server:
        for number in range(100):
            fill(tier, number * 1000)
            if number == NUM_WARM:
                tier.latency_s, tier.block_s = 0.001, 0.0001
                clock.now += 60.0
            took_s = server.ttft_s(number * 1000)
    assert took_s < 0.1 * NUM_BLOCKS * 0.01


def test_an_outlier_does_not_spoil_what_was_learned() -> None:
    costs = Costs(block_size=16)
    for took_s in [0.1] * NUM_WARM + [30.0]:
        costs.note_prefill(100, took_s)
    assert costs.compute_s < 3 * 0.016
    costs.note_prefill(1, 5.0)
    costs.note_prefill(100, 0.0)
    assert costs.compute_s < 3 * 0.016, "a token alone, and a run without a clock, say nothing"


@pytest.mark.parametrize(("block_s", "is_asked"), [(0.001, True), (0.02, True), (0.2, False)])
def test_a_tier_is_asked_for_blocks_to_split_though_reading_all_is_slower(block_s: float, is_asked: bool) -> None:
    costs, [tier] = taught(block_s, block_s, compute_s=0.01)
    for _ in range(100):
        costs.of(tier).ask.learn(0.05)
    costs.of(tier).due_s = inf
    asked = costs.worth_asking([tier], 40, SourceCosts.split_lookup_s)
    assert asked == ({tier: False} if is_asked else {})
    assert costs.worth_asking([tier], 40) == ({tier: False} if block_s < 0.01 else {})
    costs.of(tier).due_s = 0.0
    assert costs.worth_asking([tier], 40) == {tier: block_s > 0.01}, "what is due is a probe"
