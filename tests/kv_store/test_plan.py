"""The plan of a prefix: against oracles that try every division, and in its bounds."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kv_store.prefix.costs import Costs
from kv_store.prefix.plan import Needs, Plan, Read, plan_split, plan_whole
from kv_store.tiers.cold_tier import BlockSource
from tests.harness.fake_clock import FakeClock
from tests.harness.paced_tier import PacedTier
from tests.kv_store.learned_costs import taught
from tests.kv_store.names import LAYOUT, names_of

SLACK_S, SHARE = 0.01, 0.9
MAX_BLOCKS = 40


def read_of(costs: Costs, sources: Sequence[BlockSource | None], has_tail: bool = False) -> Read:
    names = names_of(len(sources) * LAYOUT.block_size - has_tail)
    return Read(names, sources, costs)


@dataclass(frozen=True)
class Drawn:
    """Found blocks in up to two far sources and the arena, and what was learned of each."""

    found: Read
    probes: Sequence[BlockSource]

    def whole_s(self, num_read: int) -> float:
        """Seconds to read the first blocks and compute the others; a probe's first two are free."""
        took_s, num_of = 0.0, dict[BlockSource | None, int]()
        for source in self.found.sources[:num_read]:
            num_of[source] = num_of.get(source, 0) + 1
            if source is not None and not (source in self.probes and num_of[source] <= 2):
                costs = self.found.costs.of(source)
                took_s += (costs.first if num_of[source] == 1 else costs.rest).mean_s
        return took_s + (len(self.found.sources) - num_read) * self.found.costs.compute_s

    def back_s(self, num_here: int, num_read: int) -> float:
        """Seconds until the last blocks are read and all before them, but for the arena's, are computed."""
        took_s, begun = 0.0, set[BlockSource | None]()
        for source in list(reversed(self.found.sources))[:num_read]:
            if source is not None:
                costs = self.found.costs.of(source)
                took_s += (costs.rest if source in begun else costs.first).mean_s
                begun.add(source)
        return max(took_s, (len(self.found.sources) - num_here - num_read) * self.found.costs.compute_s)


@st.composite
def drawn(draw: st.DrawFn) -> Drawn:
    clock = FakeClock()
    costs, duration = Costs(LAYOUT.block_size, clock), st.floats(1e-4, 0.3)
    tiers = [PacedTier(LAYOUT, clock, 0.0, 0.0) for _ in range(2)]
    costs.note_prefill(1000, draw(duration) * 1000 / LAYOUT.block_size)
    for tier in tiers:
        costs.of(tier).first.mean_s, costs.of(tier).rest.mean_s = draw(duration), draw(duration)
    sources = draw(st.lists(st.sampled_from([None, *tiers]), max_size=MAX_BLOCKS))
    probes = [tier for tier in tiers if draw(st.integers(0, 3)) == 0]
    return Drawn(read_of(costs, sources, draw(st.booleans()) and bool(sources)), probes)


@given(drawn())
def test_of_a_whole_prefix_the_most_blocks_are_read_that_lose_at_most_10_ms(one: Drawn) -> None:
    front, later = plan_whole(one.found, one.probes)
    num_blocks = len(one.found.names)
    took_s = [one.whole_s(num) for num in range(num_blocks + 1)]
    good = [num for num, this_s in enumerate(took_s) if this_s <= min(took_s) + SLACK_S + 1e-9]
    assert len(front.names) in (good[-1], max([num for num in good if took_s[num] < min(took_s) + SLACK_S - 1e-9]))
    assert front == one.found.part(0, len(front.names))
    assert later is None


@given(drawn())
def test_a_prefix_is_split_where_no_other_division_is_nearly_as_quick(one: Drawn) -> None:
    front, later = plan_split(one.found, one.probes)
    num_blocks, (whole, _) = len(one.found.names), plan_whole(one.found, one.probes)
    num_here = next((place for place, source in enumerate(one.found.sources) if source is not None), num_blocks)
    split_s = min(one.back_s(num_here, num) for num in range(num_blocks - num_here + 1))
    unprobed = Drawn(one.found, [])
    whole_s = unprobed.whole_s(len(whole.names))
    bound_s = min(whole_s - SLACK_S, SHARE * whole_s)
    if later is None:
        has_tail_alone = [name.is_tail for name in one.found.names[num_here:]] == [True]
        assert split_s > bound_s - 1e-9 or has_tail_alone
        assert front == whole or has_tail_alone
    else:
        assert split_s < bound_s + 1e-9
        assert len(front.names) == num_here
        assert later.names == [name for name in one.found.names[num_here:] if not name.is_tail] != []


@given(st.data())
def test_what_is_usable_is_found_by_way_of_holes_alone(data: st.DataObject) -> None:
    num_blocks = data.draw(st.integers(1, 12))
    is_here = data.draw(st.lists(st.booleans(), min_size=num_blocks, max_size=num_blocks))
    drawn_starts = sorted(data.draw(st.integers(0, place)) for place in range(num_blocks))
    needs = Needs([min(start, place) for place, start in enumerate(drawn_starts)], data.draw(st.integers(0, 2)))
    asked: list[int] = []

    def from_the_end() -> Iterator[tuple[int, bool]]:
        for place in reversed(range(num_blocks)):
            asked.append(place)
            yield place, is_here[place]

    end = needs.usable_end(from_the_end())
    assert needs.starts is not None
    ends = [end for end in range(1, num_blocks + 1) if all(is_here[needs.starts[end - 1] : end])]
    assert end == max(ends, default=0)
    assert end == 0 or min(asked) >= needs.starts[end - 1] - 1, "it asks no further than it needs"
    places = needs.places(end)
    start = needs.starts[end - 1] if end else 0
    assert places == sorted({*range(min(needs.num_sinks, start)), *range(start, end)})


def sizes_of(plan: Plan) -> list[int]:
    return [len(step.names) for step in plan if step is not None]


def test_of_blocks_in_several_places_the_front_that_pays_is_read() -> None:
    clock = FakeClock()
    costs = Costs(block_size=16, clock=clock)
    near, far = (PacedTier(LAYOUT, clock, 0.0, 0.0) for _ in range(2))
    for _ in range(20):
        costs.note_prefill(1600, 1.0)
        costs.of(near).note_reads([0.001, 0.001])
        costs.of(far).note_reads([1.0, 0.1])
    assert read_of(costs, [near] * 4 + [far] * 4).num_worth_reading() == 4
    assert read_of(costs, [far] * 4 + [near] * 4).num_worth_reading() == 0
    assert read_of(costs, [None, *[far] * 4]).num_worth_reading() == 1
    assert read_of(costs, [*[far] * 2, *[None] * 200]).num_worth_reading() == 202, "what follows is worth the wait"
    assert read_of(costs, []).num_worth_reading() == 0


@pytest.mark.parametrize(
    ("first_s", "rest_s", "num_blocks", "splits"),
    [
        (0.01, 0.01, 40, True),
        (0.02, 0.02, 40, True),
        (0.01, 0.001, 40, False),  # reading is ten times as quick
        (0.3, 0.2, 40, False),  # computing is
        (0.01, 0.01, 2, False),  # no more than 10 ms to gain
        (0.6, 0.01, 40, False),  # a latency longer than computing
        (0.01, 0.01, 0, False),
    ],
)
def test_a_prefix_is_split_where_that_beats_reading_and_computing_it(
    first_s: float, rest_s: float, num_blocks: int, splits: bool
) -> None:
    costs, [tier] = taught(first_s, rest_s, compute_s=0.01)
    sources = [None, None, *[tier] * num_blocks]
    found = read_of(costs, sources)
    steps = plan_split(found, [])
    assert steps[0].part(0, 2) == found.part(0, 2)
    assert sizes_of(steps) == ([2, num_blocks] if splits else sizes_of(plan_whole(found, [])))


def test_a_group_is_read_before_computing_gets_there_and_is_bounded_in_time() -> None:
    costs, [tier] = taught(0.02, 0.01, compute_s=0.01)
    assert read_of(costs, [tier] * 100).num_in_group([*range(100)]) == 19, "a fifth of a second, with the latency"
    assert read_of(costs, [tier] * 20).num_in_group([*range(20)]) == 9, "11 blocks are computed while 9 are read"
    assert read_of(costs, [tier] * 2).num_in_group([*range(2)]) == 0
    assert read_of(costs, [tier, *[None] * 5]).num_in_group([*range(6)]) == 5, "blocks of the arena take no time"
    assert read_of(costs, []).num_in_group([]) == 0
    assert read_of(costs, [tier] * 100).num_in_chunk == 3
    slow, [far] = taught(0.5, 0.01, compute_s=0.01)
    assert read_of(slow, [far]).group_s == pytest.approx(2.0, rel=0.01), "four latencies"
