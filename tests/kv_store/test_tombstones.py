import random

import pytest

from kv_store.node.directory import Directory
from kv_store.node.event_log import BlockEvents, EventCursor
from kv_store.node.tombstones import Loss, Tombstones, _Table
from tests.harness.fake_clock import FakeClock
from tests.kv_store.names import ROOT, committed, names_of
from wire.block_names import BlockName, cover, digest_of
from wire.tier import Cause, EventKind, Miss, Tier

BLOCK = 4


def publish(directory: Directory, names: list[BlockName]) -> None:
    directory.commit("w", committed(directory.reserve("w", names, None).slots, names), None)


def parents(names: list[BlockName]) -> list[bytes]:
    return [b"" if name.parent == name.root_digest else name.parent for name in names]


def told(stones: Tombstones, names: list[BlockName]) -> list[Miss]:
    keys = [name.key for name in names]
    return [*stones.why(dict(zip(keys, parents(names), strict=True))).values()]


def found(directory: Directory, names: list[BlockName]) -> list[Miss]:
    runs = directory.records.why([name.key for name in names], parents(names))
    return [run.miss for run in runs for _ in range(run.num_blocks)]


def causes(misses: list[Miss]) -> list[str]:
    return [miss.cause.value for miss in misses]


def test_a_table_agrees_with_a_dict_over_drawn_calls() -> None:
    drawn, table, model = random.Random(5), _Table(64), dict[int, int]()
    for _ in range(20_000):
        mark = drawn.randrange(1, 200) << drawn.choice((0, 1, 7))  # clusters that wrap and join
        number = drawn.choice((0, drawn.randrange(1, 99)))
        if number and (mark in model or len(model) < 64):
            model[mark] = number
            table.put(mark, number)
        else:
            model.pop(mark, None)
            table.put(mark, 0)
        probe = drawn.randrange(1, 200)
        assert table.get(probe) == model.get(probe, 0)
    assert {mark: table.get(mark) for mark in model} == model


def test_an_evicted_block_has_its_time_and_policy_until_its_place_is_needed() -> None:
    clock = FakeClock()
    stones = Tombstones(3, 3, "hit density", clock)
    [name] = names_of(BLOCK)
    assert told(stones, [name]) == [Miss(Cause.NEVER_SEEN, age_s=0.0)]
    stones.index(name)
    stones.bury(name.key, name.parent, Loss.ROOM, ())
    clock.now += 7.0
    assert told(stones, [name]) == [Miss(Cause.EVICTED, "to make room, by hit density", 7.0)]
    for number in range(1, 4):
        [other] = names_of(BLOCK, first=number * 100)
        stones.index(other)
        stones.bury(other.key, other.parent, Loss.ROOM, ())
    assert told(stones, [name]) == [Miss(Cause.NO_LONGER_KNOWN, age_s=7.0)]


def test_a_block_that_comes_back_has_no_tombstone_and_costs_no_memory_of_others() -> None:
    stones = Tombstones(2, 2, "x", FakeClock())
    [name], [other] = names_of(BLOCK), names_of(BLOCK, first=100)
    for _ in range(5):
        stones.index(name)
        stones.bury(name.key, name.parent, Loss.ROOM, ())
    stones.index(name)
    assert causes(told(stones, [other])) == ["never_seen"]


@pytest.mark.parametrize(
    ("loss", "how"), [("reject", "its checksum was wrong"), ("delete", "purged after logits that were not finite")]
)
def test_a_block_that_was_rejected_or_purged_says_so(loss: str, how: str) -> None:
    directory = Directory(8, FakeClock())
    names = names_of(2 * BLOCK)
    publish(directory, names)
    directory.reject(directory.state.blocks()) if loss == "reject" else directory.delete([name.key for name in names])
    assert found(directory, names) == [Miss(Cause.EVICTED, how)] * 2


def test_a_block_beyond_its_tenants_share_says_so() -> None:
    directory = Directory(8, FakeClock())
    directory.records.set_shares({(digest_of(ROOT),): 0.25})
    names = names_of(4 * BLOCK)
    publish(directory, names)
    publish(directory, names_of(6 * BLOCK, first=500))
    assert found(directory, names)[-1].how.startswith("its tenant was beyond its share")


def test_a_prompt_differs_from_a_known_sibling_on() -> None:
    directory = Directory(8, FakeClock())
    known = names_of(4 * BLOCK)
    publish(directory, known)
    other = cover(ROOT, [0, 1, 2, 3, 4, 5, 6, 99, *range(8)], BLOCK)
    assert causes(found(directory, other)) == ["behind", "differs", "differs", "differs"]
    assert causes(found(directory, names_of(6 * BLOCK))) == ["behind"] * 4 + ["never_seen"] * 2
    assert causes(found(directory, names_of(4 * BLOCK, first=700))) == ["never_seen"] * 4
    directory.reject(directory.state.blocks())
    assert causes(found(directory, other)) == ["evicted", "differs", "differs", "differs"]


def test_tombstones_take_the_memory_that_they_say() -> None:
    for num_places, num_slots in ((1 << 14, 1 << 14), ((1 << 14) + 1, 1 << 16)):
        num_bytes = Tombstones(num_places, num_slots, "x", FakeClock()).num_bytes
        assert num_bytes == pytest.approx(61 * num_places + 18 * num_slots, rel=0.01)


def test_a_lost_block_whose_copies_are_lost_is_elsewhere_no_more() -> None:
    directory = Directory(4, FakeClock())
    names = names_of(4 * BLOCK)
    publish(directory, names)
    keys = [name.key for name in names]
    directory.records.mark_cold(Tier.REDIS, keys, [])
    directory.records.mark_cold(Tier.FILES, keys[:1], [])
    publish(directory, names_of(4 * BLOCK, first=500))
    assert causes(found(directory, names)) == ["elsewhere"] * 4
    place = directory.records.events(EventCursor(directory.attach().epoch)).cursor
    directory.records.mark_cold(Tier.REDIS, [], keys[:2])
    directory.records.mark_cold(Tier.REDIS, [], keys[:2])
    assert causes(found(directory, names)) == ["elsewhere", "evicted", "elsewhere", "elsewhere"]
    assert directory.records.events(place).events == [BlockEvents(EventKind.REMOVED, Tier.REDIS, keys[:2])]
