"""Each cause as a store finds it behind a fetch."""

from collections.abc import Iterator
from contextlib import closing

import pytest

from kv_store.node.arena import Arena
from kv_store.node.directory import Directory
from kv_store.node.event_log import EventCursor
from kv_store.node_store import NodeStore
from kv_store.prefix.plan import Needs
from kv_store.tiers.cold_tier import ColdTier
from kv_store.tiers.memory_tier import MemoryTier
from tests.harness.fake_clock import FakeClock
from tests.kv_store.names import LAYOUT, names_of, put_one
from tests.kv_store.pools import filled_pool, pages_from
from wire.block_names import BlockName
from wire.errors import StoreError
from wire.tier import Cause, Miss, Tier

NUM_SLOTS = 8


class One:
    """A store over an arena, a directory and at most one cold tier."""

    def __init__(self, cold: list[ColdTier]) -> None:
        self.clock = FakeClock()
        self.arena = Arena.anonymous(LAYOUT.block_bytes, NUM_SLOTS)
        self.directory = Directory(NUM_SLOTS, self.clock)
        self.cold = cold

    def close(self) -> None:
        self.arena.close()

    def store(self, names: list[BlockName]) -> NodeStore:
        return NodeStore(LAYOUT, self.arena, self.directory, self.cold, filled_pool(names), self.clock)

    def publish(self, names: list[BlockName]) -> None:
        assert self.store(names).write_through(names, pages_from(0, len(names)), None) == len(names)

    def why(self, names: list[BlockName], store: NodeStore | None = None) -> list[Miss]:
        """The causes behind a fetch of these blocks."""
        reading = (store or self.store([])).fetch(names, pages_from(0, len(names)))
        assert len(reading.blocks) == len(names)
        return [block for block in reading.blocks if isinstance(block, Miss)]


@pytest.fixture
def one() -> Iterator[One]:
    with closing(One([MemoryTier(LAYOUT)])) as made:
        yield made


def cold(one: One) -> MemoryTier:
    [tier] = one.cold
    assert isinstance(tier, MemoryTier)
    return tier


def fill(one: One) -> None:
    """Makes the arena lose all that it had."""
    one.publish(names_of(4 * NUM_SLOTS, first=5000))


def test_a_hit_has_no_cause_and_a_tail_is_partial(one: One) -> None:
    names = names_of(10)
    one.publish(names[:2])
    assert one.why(names) == [Miss(Cause.PARTIAL)]
    assert one.why(names[:2]) == []


def test_blocks_behind_a_hole_are_behind_it(one: One) -> None:
    names = names_of(16)
    one.publish([names[0], *names[2:]])
    assert [miss.cause for miss in one.why(names)] == [Cause.NEVER_SEEN, Cause.BEHIND, Cause.BEHIND]


def test_an_evicted_block_says_when_and_by_which_policy(one: One) -> None:
    names = names_of(8)
    one.publish(names)
    fill(one)
    one.clock.now += 60.0
    assert one.why(names) == [Miss(Cause.EVICTED, "to make room, by least recent use", 60.0)] * 2


def test_an_evicted_block_whose_cold_copy_is_gone_says_so(one: One) -> None:
    names = names_of(8)
    one.publish(names)
    one.directory.records.mark_cold(Tier.REDIS, [name.key for name in names], [])
    fill(one)
    first, second = one.why(names)
    assert first == Miss(
        Cause.EVICTED,
        "to make room, by least recent use; its copy in a cold tier is gone: evicted, cleared or expired (ttl)",
    )
    assert second == Miss(Cause.BEHIND)


def test_a_copy_in_a_tier_that_is_not_worth_asking_is_elsewhere_and_too_far(one: One) -> None:
    names = names_of(8)
    one.publish(names)
    assert all(put_one(cold(one), name) for name in names)
    one.directory.records.mark_cold(Tier.REDIS, [name.key for name in names], [])
    fill(one)
    store = one.store([])
    costs = store.costs.of(cold(one))
    costs.ask.mean_s, costs.due_s = 9.0, 1e9
    assert {miss.cause for miss in one.why(names, store)} == {Cause.ELSEWHERE}


@pytest.mark.parametrize("is_asked", [False, True])
def test_with_windows_a_copy_in_a_cold_tier_has_the_same_causes(one: One, is_asked: bool) -> None:
    names = names_of(12)
    one.publish(names)
    one.directory.records.mark_cold(Tier.REDIS, [name.key for name in names], [])
    fill(one)
    store = one.store([])
    if not is_asked:
        store.costs.of(cold(one)).ask.mean_s, store.costs.of(cold(one)).due_s = 9.0, 1e9
    blocks = store.fetch(names, pages_from(0, 2), needs=Needs([0, 0, 1])).blocks
    causes = [block.cause for block in blocks if isinstance(block, Miss)]
    assert causes == ([Cause.EVICTED, Cause.BEHIND, Cause.BEHIND] if is_asked else [Cause.ELSEWHERE] * 3)


def test_found_blocks_that_are_slower_to_read_are_cheaper_to_compute(one: One) -> None:
    names = names_of(16)
    assert all(put_one(cold(one), name) for name in names)
    store = one.store([])
    costs = store.costs.of(cold(one))
    costs.ask.mean_s, costs.found = 1e-5, 0.0
    costs.first.mean_s = costs.rest.mean_s = 0.03
    assert one.why(names, store) == [Miss(Cause.CHEAPER)] * 4


def test_a_frame_that_is_not_right_has_failed_to_load_and_later_ones_are_behind(one: One) -> None:
    names = names_of(12)
    assert all(put_one(cold(one), name) for name in names)
    cold(one).frames[names[1].key] = b"not a frame"
    failed, behind = one.why(names)
    assert failed == Miss(
        Cause.LOAD_FAILED, "redis gave none, or wrong bytes, which the log of the worker that read them names"
    )
    assert behind == Miss(Cause.BEHIND)


def test_a_wrong_checksum_in_the_arena_is_a_failed_load(one: One) -> None:
    names = names_of(8)
    one.publish(names)
    [slot] = [block.slot for block in one.directory.state.blocks() if block.name.key == names[0].key]
    one.arena.slot(slot)[0] ^= 1
    assert one.why(names) == [Miss(Cause.LOAD_FAILED, "its checksum in the arena was wrong"), Miss(Cause.BEHIND)]
    assert one.why(names)[0] == Miss(Cause.EVICTED, "its checksum was wrong")


def test_a_directory_out_of_reach_is_a_failed_load(one: One, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise StoreError("gone")

    names = names_of(8)
    one.publish(names)
    monkeypatch.setattr(one.directory, "lease", refuse)
    assert one.why(names) == [Miss(Cause.LOAD_FAILED, "the arena's directory was out of reach")] * 2


def test_a_lease_that_ran_out_is_a_failed_load(one: One, monkeypatch: pytest.MonkeyPatch) -> None:
    names = names_of(8)
    one.publish(names)
    monkeypatch.setattr(one.directory, "release", lambda _: False)
    assert one.why(names) == [Miss(Cause.LOAD_FAILED, "its lease in the arena ran out while it was read")] * 2


def test_a_copy_that_a_cold_tier_is_found_not_to_have_is_told_to_the_directory_once(one: One) -> None:
    names = names_of(8)
    one.publish(names)
    one.directory.records.mark_cold(Tier.REDIS, [name.key for name in names], [])
    fill(one)
    place = one.directory.records.events(EventCursor(one.directory.attach().epoch)).cursor
    for _ in range(2):
        one.why(names + names_of(4, first=900))
        page = one.directory.records.events(place)
        lost = [key for events in page.events if events.tier is Tier.REDIS for key in events.keys]
        assert sorted(lost) == sorted(name.key for name in names)
