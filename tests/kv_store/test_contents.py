"""Listing and clearing an arena, and the writer of a cold tier beside it."""

import pytest

from kv_store.node.directory import Directory
from kv_store.node.messages import Hold
from kv_store.tiers.contents import PAGE_BLOCKS, HostTier, Selection, clear, find
from tests.harness.fake_clock import FakeClock
from tests.kv_store.names import LAYOUT, committed, names_of
from tests.kv_store.test_cold_writer import Node
from wire.block_names import BlockName, cover, digest_of
from wire.errors import StoreError
from wire.ids import AttemptId, NamespaceRoot
from wire.tier import Cause, Tier, Write
from worker.store_control import Tally

OTHER = NamespaceRoot(b"O" * 32)
OTHERS = cover(OTHER, range(12), LAYOUT.block_size)


class Stored:
    def __init__(self, num_slots: int = 600) -> None:
        self.clock = FakeClock()
        self.directory = Directory(num_slots, self.clock, block_bytes=4096)
        self.tier = HostTier(self.directory)

    def publish(self, names: list[BlockName]) -> None:
        slots = self.directory.reserve("w", names, None).slots
        self.directory.commit("w", committed(slots, names), None)

    def tally(self, selection: Selection) -> Tally:
        tally = Tally(selection)
        for page in find(self.tier, selection):
            tally.add(Tier.HOST, page)
        return tally


def test_an_arena_counts_blocks_bytes_and_uses_of_each_namespace() -> None:
    stored, names = Stored(), names_of(4 * (PAGE_BLOCKS + 9) + 2)
    stored.publish(names)
    stored.clock.now += 10
    stored.publish(OTHERS)
    stored.clock.now += 5
    stored.directory.release(stored.directory.lease("r", [names[3].key], 1.0).lease_id)
    stored.clock.now += 1
    own, other = sorted(stored.tally(Selection()).holdings.holdings, key=lambda one: -one.blocks)
    assert (own.namespace, own.blocks, own.bytes) == (names[0].root_digest, len(names), 4096 * len(names))
    assert (own.newest_s, own.oldest_s) == (1, 16)
    assert (other.namespace, other.blocks, other.newest_s, other.oldest_s) == (digest_of(OTHER), 3, 6, 6)


def test_counting_is_no_use() -> None:
    stored, names = Stored(num_slots=4), names_of(16)
    for name in names:
        stored.publish([name])
    stored.tally(Selection((names[3].key,)))
    stored.tally(Selection())
    stored.publish(OTHERS[:1])
    assert stored.directory.records.exists([names[3].key]) == [False], (
        "the end of the prefix goes first, as it would have"
    )


def test_a_clear_takes_one_namespace_and_why_says_so() -> None:
    stored, names = Stored(), names_of(4 * 300)
    stored.publish(names)
    stored.publish(OTHERS)
    cleared = [one for page in clear(stored.tier, Selection(namespaces=frozenset([digest_of(OTHER)]))) for one in page]
    assert {one.key for one in cleared} == {name.key for name in OTHERS}
    assert not any(stored.directory.records.exists([name.key for name in OTHERS]))
    assert all(stored.directory.records.exists([name.key for name in names]))
    [run] = stored.directory.records.why([OTHERS[0].key], [b""])
    assert (run.miss.cause, run.miss.how) == (Cause.EVICTED, "cleared by the operator, from every tier")
    assert stored.directory.records.check() == []


def test_a_cleared_block_whose_copy_went_too_is_not_looked_for_elsewhere() -> None:
    stored = Stored()
    stored.publish(OTHERS)
    stored.directory.records.mark_cold(Tier.REDIS, [OTHERS[0].key], [])
    stored.directory.contents.clear([OTHERS[0].key])
    [run] = stored.directory.records.why([OTHERS[0].key], [b""])
    assert run.miss.cause is Cause.EVICTED


def test_leases_and_holds_keep_the_slots_of_cleared_blocks() -> None:
    stored = Stored(num_slots=3)
    stored.publish(OTHERS)
    lease = stored.directory.lease("r", [OTHERS[0].key], 5.0)
    names = [name.key for name in OTHERS]
    stored.directory.reserve("w", [], None)
    hold = stored.directory.lease("r", [OTHERS[1].key], 5.0)
    assert stored.directory.contents.clear(names) == 3
    assert stored.directory.records.exists(names) == [False] * 3
    given = stored.directory.reserve("w", names_of(12), None).slots
    assert [slot is not None for slot in given] == [True, False, False], "two slots are being read"
    assert stored.directory.release(lease.lease_id), "the bytes read were the block's to the end"
    assert stored.directory.release(hold.lease_id)
    assert stored.directory.records.check() == []


@pytest.mark.parametrize(("first", "num"), [(-5, 4), (0, -1), (10**9, 4), (0, 0)])
def test_slots_outside_of_the_arena_have_no_keys(first: int, num: int) -> None:
    stored = Stored(num_slots=4)
    stored.publish(OTHERS)
    assert len(stored.directory.contents.keys(first, num)) == (3 if first == -5 else 0)


@pytest.mark.parametrize("clears", [True, False])
def test_a_copy_made_of_a_block_that_is_cleared_meanwhile_is_taken_back(clears: bool) -> None:
    node, names = Node({Tier.REDIS: Write.ALL}), names_of(8)
    node.publish(names)

    def clear_first() -> bool:
        if clears:
            node.directory.contents.clear([names[0].key])
        return True

    node.cold.before = clear_first
    node.writer.write_some()
    assert node.cold.exists([name.key for name in names]) == [not clears, True]
    assert node.directory.records.check() == []


def test_a_tier_that_does_not_answer_is_told() -> None:
    class Away(HostTier):
        def clear(self, keys: object) -> None:
            raise StoreError("away")

    stored = Stored()
    stored.publish(OTHERS)
    with pytest.raises(StoreError):
        list(clear(Away(stored.directory), Selection()))


def test_a_held_block_is_a_miss_for_others_and_its_slot_stays() -> None:
    stored = Stored(num_slots=3)
    stored.publish(OTHERS)
    attempt = AttemptId("a/1")
    stored.directory.reserve("w", OTHERS, Hold(attempt, 10.0))
    assert stored.directory.contents.clear([name.key for name in OTHERS]) == 3
    assert stored.directory.reserve("w", names_of(4), None).slots == [None]
    assert stored.directory.renew([attempt], 10.0) == []
    stored.directory.release_holds([attempt])
    assert stored.directory.records.status().counts.free == 3
    assert stored.directory.records.check() == []
