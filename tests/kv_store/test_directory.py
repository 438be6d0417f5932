"""The contract of a directory: of a directory called directly, and of one behind its socket."""

import random
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from kv_store.node import records as records_module
from kv_store.node.directory import Directory
from kv_store.node.directory_client import DirectoryClient
from kv_store.node.directory_port import DirectoryPort
from kv_store.node.directory_server import DirectoryServer
from kv_store.node.event_log import BlockEvents, EventCursor, EventPage
from kv_store.node.messages import NO_LEASE, Block, Entry, Hold, HoldRoom
from tests.harness.fake_clock import FakeClock
from tests.kv_store.names import committed, names_of
from wire.block_names import BlockName, cover, digest_of
from wire.ids import AttemptId, BlockKey, NamespaceRoot, SlotId
from wire.tier import COLD_TIERS, EventKind, FarStatus, Tier, Write

NUM_SLOTS = 8
REQUEST = AttemptId("request")
ROOT_A, ROOT_B, ROOT_C = (NamespaceRoot(letter * 32) for letter in (b"a", b"b", b"c"))


@dataclass
class Served:
    port: DirectoryPort
    directory: Directory
    clock: FakeClock

    def publish(self, names: list[BlockName], hold: Hold | None = None) -> list[Block]:
        """Reserves and commits; the blocks that were written."""
        blocks = committed(self.port.reserve("writer", names, hold).slots, names)
        self.port.commit("writer", blocks, hold)
        return blocks

    def found(self, names: list[BlockName]) -> list[bool]:
        return self.port.records.exists(keys(names))


def keys(names: list[BlockName]) -> list[BlockKey]:
    return [name.key for name in names]


def hold(attempt_id: str = "request", ttl_s: float = 10.0) -> Hold:
    return Hold(AttemptId(attempt_id), ttl_s)


@pytest.fixture(params=["direct", "socket"])
def served(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Served]:
    clock = FakeClock()
    directory = Directory(NUM_SLOTS, clock, arena_path="/arena", block_bytes=4096)
    if request.param == "direct":
        yield Served(directory, directory, clock)
        assert directory.records.check() == []
        return
    server = DirectoryServer(directory, str(tmp_path / "socket"))
    server.start()
    client = DirectoryClient(str(tmp_path / "socket"))
    try:
        yield Served(client, directory, clock)
        assert client.records.check() == []
    finally:
        client.close()
        server.stop()


def test_it_tells_the_arenas_place_and_geometry(served: Served) -> None:
    info = served.port.attach()
    assert (info.arena_path, info.num_slots, info.block_bytes) == ("/arena", NUM_SLOTS, 4096)
    assert info == served.port.attach() == served.directory.attach()
    assert info.epoch == served.port.records.status().epoch != Directory(1).attach().epoch


def test_a_block_is_found_once_it_is_committed(served: Served) -> None:
    names = names_of(10)
    reservation = served.port.reserve("writer", names, None)
    assert (len(set(reservation.slots)), reservation.num_resident) == (3, 0)
    assert served.found(names) == [False] * 3
    assert served.port.records.status().counts.draining == 3
    blocks = committed(reservation.slots, names)
    assert served.port.commit("writer", blocks[:2], None) == 2
    assert served.found(names) == [True, True, False]
    lease = served.port.lease("reader", keys(names), 5.0)
    assert lease.entries == [Entry(block.slot, block.checksum) for block in blocks[:2]] + [None]
    assert served.port.release(lease.lease_id)
    status = served.port.records.status()
    assert (status.hits, status.misses, status.num_leases) == (2, 1, 0)


def followed(served: Served, after: EventCursor, blocks: dict[Tier, set[BlockKey]]) -> EventCursor:
    """Applies all events that there are behind a place to `blocks`; returns the place behind them."""
    while (page := served.port.records.events(after)).cursor != after:
        assert page.after == after
        after = applied(page, blocks)
    return after


def applied(page: EventPage, blocks: dict[Tier, set[BlockKey]]) -> EventCursor:
    for one in page.events:
        if one.kind is EventKind.STORED:
            blocks[one.tier].update(one.keys)
        elif one.kind is EventKind.REMOVED:
            blocks[one.tier].difference_update(one.keys)
        else:
            blocks[one.tier] = set()
    return page.cursor


def test_events_tell_full_blocks_stored_copied_and_removed_in_order(served: Served) -> None:
    start = served.port.records.events(EventCursor()).cursor
    names = names_of(14)
    served.publish(names)
    served.port.records.mark_cold(Tier.REDIS, keys(names[:2]), [])
    served.port.delete(keys(names[2:3]))
    page = served.port.records.events(start)
    assert page.events == [
        BlockEvents(EventKind.STORED, Tier.HOST, keys(names[:3])),
        BlockEvents(EventKind.STORED, Tier.REDIS, keys(names[:2])),
        BlockEvents(EventKind.REMOVED, Tier.HOST, keys(names[2:3])),
    ]
    assert (page.after, page.cursor) == (start, replace(start, number=start.number + 6)), "the tail has no event"
    assert served.port.records.events(replace(start, number=start.number + 5)).events == page.events[2:]
    assert served.port.records.events(start) == page, "asking changes nothing"
    assert served.port.records.events(page.cursor) == EventPage(page.cursor, page.cursor, [])


def test_an_eviction_is_an_event(served: Served) -> None:
    first, second = names_of(4 * NUM_SLOTS), names_of(8, first=1000)
    served.publish(first)
    after = served.port.records.events(EventCursor()).cursor
    served.publish(second)
    assert [(one.kind, len(one.keys)) for one in served.port.records.events(after).events] == [
        (EventKind.REMOVED, 2),
        (EventKind.STORED, 2),
    ]


@pytest.mark.parametrize(
    "strange", [EventCursor("another", 3), EventCursor("", 0, 2), EventCursor(number=1 << 63), EventCursor(slot=-1)]
)
def test_a_place_of_another_epoch_leads_to_a_snapshot(served: Served, strange: EventCursor) -> None:
    names = names_of(10)
    served.publish(names)
    served.port.records.mark_cold(Tier.FILES, keys(names[:1]), [])
    page = served.port.records.events(strange)
    assert [one.kind for one in page.events[:3]] == [EventKind.CLEARED] * 3
    assert {one.tier for one in page.events[:3]} == {Tier.HOST, *COLD_TIERS}
    assert {one.tier: set(one.keys) for one in page.events[3:]} == {
        Tier.HOST: {*keys(names[:2])},
        Tier.FILES: {*keys(names[:1])},
    }
    assert page.cursor == EventCursor(served.port.attach().epoch, 3)


@pytest.mark.parametrize(("number", "slot"), [(1 << 63, 0), (-1, 0), (0, NUM_SLOTS), (0, -1)])
def test_a_place_that_no_page_told_leads_to_a_snapshot(served: Served, number: int, slot: int) -> None:
    place = EventCursor(served.port.attach().epoch, number, slot)
    assert served.port.records.events(place).events[0].kind is EventKind.CLEARED


def test_a_subscriber_that_fell_behind_the_ring_gets_a_snapshot_and_goes_on() -> None:
    directory = Directory(NUM_SLOTS, num_events=4)
    served = Served(directory, directory, FakeClock())
    blocks: dict[Tier, set[BlockKey]] = {}
    place = followed(served, EventCursor(), blocks)
    served.publish(names_of(16))
    assert directory.records.events(place).events[0].kind is EventKind.STORED, "four events are all that the ring takes"
    served.publish(names_of(4, first=1000))
    assert directory.records.events(place).events[0].kind is EventKind.CLEARED
    place = followed(served, place, blocks)
    assert blocks[Tier.HOST] == {*keys(names_of(16)), *keys(names_of(4, first=1000))}
    served.port.delete(keys(names_of(4)))
    followed(served, place, blocks)
    assert blocks[Tier.HOST] == {one.name.key for one in directory.state.blocks()}


def test_a_snapshot_in_parts_is_exact_whatever_changes_between_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(records_module, "MAX_PAGE_BLOCKS", 3)
    directory = Directory(NUM_SLOTS)
    served = Served(directory, directory, FakeClock())
    draw, blocks = random.Random(5), dict[Tier, set[BlockKey]]()
    place = EventCursor()
    for _ in range(300):
        name = draw.choice([*names_of(40)[:10], *names_of(40, first=500)[:10]])
        if draw.random() < 0.6:
            served.publish([name])
        else:
            directory.delete([name.key])
        page = directory.records.events(place)
        assert sum(len(one.keys) for one in page.events) <= 3 * 2, "events, and slots of a snapshot"
        if draw.random() < 0.05:
            place = EventCursor()
        elif draw.random() < 0.5:
            place = applied(page, blocks)
        if draw.random() < 0.2:
            place = followed(served, place, blocks)
            assert blocks[Tier.HOST] == {one.name.key for one in directory.state.blocks()}


def test_what_is_there_gets_no_slot(served: Served) -> None:
    names = names_of(8)
    served.publish(names[:1])
    reservation = served.port.reserve("writer", names, None)
    assert reservation.slots[0] is None
    assert reservation.slots[1] is not None
    assert reservation.num_resident == 1


def test_two_writers_of_one_block_get_a_slot_each_and_the_first_commit_wins(served: Served) -> None:
    names = names_of(4)
    [first] = committed(served.port.reserve("one", names, None).slots, names)
    [second] = committed(served.port.reserve("other", names, None).slots, names)
    assert first.slot != second.slot
    assert served.port.commit("other", [second], None) == 1
    assert served.port.commit("one", [first], None) == 1
    lease = served.port.lease("reader", keys(names), 5.0)
    assert lease.entries == [Entry(second.slot, second.checksum)]
    assert served.port.records.status().counts.free == NUM_SLOTS - 1
    served.port.release(lease.lease_id)


def test_a_batch_without_room_gets_what_there_is(served: Served) -> None:
    names = names_of(4 * NUM_SLOTS + 8)
    slots = served.port.reserve("writer", names, None).slots
    assert [slot is None for slot in slots] == [False] * NUM_SLOTS + [True] * 2


def test_a_batch_never_evicts_its_own_prefix(served: Served) -> None:
    names = names_of(4 * NUM_SLOTS)
    served.publish(names[:6])
    served.publish(names_of(8, first=1000))
    slots = served.port.reserve("writer", names, None).slots
    assert [slot is None for slot in slots] == [True] * 6 + [False] * 2
    assert served.found(names) == [True] * 6 + [False] * 2


def test_a_writers_next_batch_gives_back_what_it_has_not_committed(served: Served) -> None:
    names, others = names_of(8), names_of(8, first=1000)
    late = committed(served.port.reserve("writer", names, None).slots, names)
    served.port.reserve("writer", others[:1], None)
    assert served.port.records.status().counts.draining == 1
    assert served.port.commit("writer", late, None) == 0
    assert served.found(names) == [False, False]


def test_only_the_writer_of_a_slot_commits_it_and_only_as_what_it_is_for(served: Served) -> None:
    [name, other] = names_of(8)
    [block] = committed(served.port.reserve("writer", [name], None).slots, [name])
    assert served.port.commit("another", [block], None) == 0
    assert served.port.commit("writer", [block._replace(name=other)], None) == 0
    assert served.port.commit("writer", [block._replace(slot=SlotId((block.slot + 1) % NUM_SLOTS))], None) == 0
    assert served.port.commit("writer", [block._replace(slot=SlotId(-1)), block._replace(slot=SlotId(99))], None) == 0
    assert served.found([name, other]) == [False, False]
    assert served.port.commit("writer", [block], None) == 1


def test_an_abandoned_reservation_leaves_nothing(served: Served) -> None:
    served.port.reserve("writer", names_of(12), None)
    assert served.port.abandon("writer") == 3
    assert served.port.abandon("writer") == 0
    assert served.port.records.status().counts.free == NUM_SLOTS


def test_a_reservation_never_runs_out(served: Served) -> None:
    slots = served.port.reserve("stopped", names_of(8), None).slots
    served.clock.now += 1e6
    others = served.port.reserve("writer", names_of(4 * NUM_SLOTS, first=1000), None).slots
    assert not set(slots) & set(others)
    assert served.port.records.status().counts.draining == NUM_SLOTS


def test_the_slots_of_a_dead_writer_are_given_back(served: Served) -> None:
    directory, there = served.directory, names_of(4, first=2000)
    served.publish(there)
    directory.reserve("dead", names_of(8), None)
    directory.lease("dead", keys(there), 5.0)
    directory.reserve("alive", names_of(4, first=1000), None)
    directory.lease("alive", keys(there), 5.0)
    directory.writer_died("dead")
    status = served.port.records.status()
    assert (status.counts.draining, status.num_leases) == (1, 1)


def test_a_leased_slot_is_not_given_out_until_the_lease_ends(served: Served) -> None:
    names = names_of(4 * NUM_SLOTS)
    served.publish(names)
    lease = served.port.lease("reader", keys(names), 5.0)
    assert served.port.reserve("writer", names_of(4, first=1000), None).slots == [None]
    assert served.port.release(lease.lease_id)
    assert served.port.reserve("writer", names_of(4, first=1000), None).slots != [None]


def test_a_lease_that_has_run_out_says_so(served: Served) -> None:
    names = names_of(4 * NUM_SLOTS)
    served.publish(names)
    lease = served.port.lease("slow", keys(names), 5.0)
    served.clock.now += 5.0
    assert served.port.reserve("writer", names_of(4, first=1000), None).slots != [None]
    assert not served.port.release(lease.lease_id)
    assert not served.port.release(12345)


def test_a_lease_of_no_slot_is_none_and_a_release_of_it_holds(served: Served) -> None:
    lease = served.port.lease("reader", keys(names_of(8)), 5.0)
    assert (lease.lease_id, lease.entries) == (NO_LEASE, [None, None])
    assert served.port.records.status().num_leases == 0
    served.clock.now += 6.0
    assert served.port.release(lease.lease_id), "a reader of an earlier release releases it"


def test_leases_of_one_block_end_each_for_itself(served: Served) -> None:
    names = names_of(4 * NUM_SLOTS)
    served.publish(names)
    first = served.port.lease("one", keys(names), 5.0)
    second = served.port.lease("other", keys(names), 50.0)
    assert served.port.release(first.lease_id)
    served.clock.now += 6.0
    assert served.port.reserve("writer", names_of(4, first=1000), None).slots == [None]
    assert served.port.release(second.lease_id)


def test_routers_learn_what_holds_of_others_take_until_these_ask_no_more(served: Served) -> None:
    assert served.port.share_room("a", 5, 10.0) == HoldRoom(0, 1)
    assert served.port.share_room("b", 0, 10.0) == HoldRoom(5, 2)
    assert served.port.share_room("a", 7, 10.0) == HoldRoom(0, 1), "b has no holds and waits for none"
    assert served.port.share_room("b", 2, 10.0) == HoldRoom(7, 2)
    assert served.port.share_room("c", 0, 10.0) == HoldRoom(9, 3)
    served.clock.now += 9.0
    served.port.share_room("b", 2, 10.0)
    served.clock.now += 2.0
    assert served.port.share_room("b", 2, 10.0) == HoldRoom(0, 1), "a is gone"


def test_a_hold_keeps_what_is_there_and_what_is_written_for_it(served: Served) -> None:
    names = names_of(10)
    served.publish(names[:1])
    served.publish(names, hold())
    assert served.port.records.status().counts.published == 3
    served.publish(names_of(4 * NUM_SLOTS, first=1000))
    assert served.found(names) == [True] * 3
    assert served.port.release_holds([AttemptId("request"), AttemptId("nobody")]) == 1
    assert (served.port.records.status().num_holds, served.port.records.status().counts.published) == (0, 0)
    served.publish(names_of(4 * NUM_SLOTS, first=2000))
    assert served.found(names) == [False] * 3


def test_what_is_reserved_for_a_hold_holds_what_is_there_at_once(served: Served) -> None:
    names = names_of(8)
    served.publish(names[:1])
    served.port.reserve("slow", names, hold())
    served.publish(names_of(4 * NUM_SLOTS, first=1000))
    assert served.found(names) == [True, False]


def test_a_hold_ends_unless_it_is_renewed(served: Served) -> None:
    names = names_of(8)
    served.publish(names, hold("kept"))
    assert served.port.reserve("another", names, hold("left")).num_resident == 2
    served.clock.now += 9.0
    assert served.port.renew([AttemptId("kept"), AttemptId("nobody")], 10.0) == [AttemptId("nobody")]
    served.clock.now += 1.0
    assert served.port.records.status().num_holds == 1
    assert served.port.records.status().counts.published == 2
    served.clock.now += 9.0
    assert served.port.renew([AttemptId("kept")], 10.0) == [AttemptId("kept")]
    assert served.port.records.status().counts.published == 0


def crowded(tier_state: str = "up") -> tuple[Directory, list[BlockName]]:
    """A directory with a hold of three blocks and a tail, of eight slots."""
    directory = Directory(NUM_SLOTS, FakeClock())
    directory.records.note_cold(FarStatus(tier=Tier.REDIS, state=tier_state))
    names = names_of(14)
    Served(directory, directory, FakeClock()).publish(names, hold())
    return directory, names


def test_a_hold_beyond_a_quarter_of_the_arena_ends_once_its_blocks_are_in_a_cold_tier() -> None:
    directory, names = crowded()
    assert written_next(directory, Tier.REDIS) == keys(names[:3])
    directory.records.mark_cold(Tier.REDIS, keys(names[:2]), [])
    assert directory.renew([REQUEST], 10.0) == []
    assert written_next(directory, Tier.REDIS) == keys(names[2:3])
    directory.records.mark_cold(Tier.REDIS, keys(names[2:3]), [])
    assert directory.records.status().num_holds == 1, "it ends with a renewal, which tells the router"
    assert directory.renew([REQUEST], 10.0) == [REQUEST] == directory.renew([REQUEST], 10.0)
    assert (directory.records.status().num_holds, directory.records.exists(keys(names))) == (0, [True] * 4)
    Served(directory, directory, FakeClock()).publish(names_of(4 * NUM_SLOTS, first=1000))
    assert directory.records.exists(keys(names)) == [False] * 4
    assert directory.records.check() == []


def test_a_hold_that_gets_a_block_stays_until_that_has_a_copy_too() -> None:
    directory, names = crowded()
    directory.records.mark_cold(Tier.REDIS, keys(names[:3]), [])
    directory.delete(keys(names))  # the arena is not crowded any more when the next block comes
    Served(directory, directory, FakeClock()).publish(names_of(4, first=1000), hold())
    assert directory.renew([REQUEST], 10.0) == []
    assert directory.records.check() == []


def test_a_hold_stays_where_no_cold_tier_answers() -> None:
    directory, names = crowded("broken")
    assert written_next(directory, Tier.REDIS) == []
    directory, names = crowded()
    directory.records.mark_cold(Tier.REDIS, keys(names), [])
    directory.records.note_cold(FarStatus(tier=Tier.REDIS, state="broken"))
    assert directory.renew([REQUEST], 10.0) == []


def test_a_hold_of_a_quarter_of_the_arena_stays() -> None:
    directory = Directory(NUM_SLOTS, FakeClock())
    directory.records.note_cold(FarStatus(tier=Tier.REDIS, state="up"))
    names = names_of(8)
    Served(directory, directory, FakeClock()).publish(names, hold())
    assert written_next(directory, Tier.REDIS) == []
    directory.records.mark_cold(Tier.REDIS, keys(names), [])
    assert directory.renew([REQUEST], 10.0) == []


def test_a_block_that_is_to_move_is_written_to_one_tier() -> None:
    directory = Directory(NUM_SLOTS, FakeClock(), writes={Tier.FILES: Write.ALL})
    for tier in COLD_TIERS:
        directory.records.note_cold(FarStatus(tier=tier, state="up"))
    names = names_of(12)
    Served(directory, directory, FakeClock()).publish(names, hold())
    assert (written_next(directory, Tier.REDIS), set(written_next(directory, Tier.FILES))) == ([], set(keys(names)))


def test_a_request_holds_a_block_once(served: Served) -> None:
    names = names_of(4)
    served.publish(names, hold())
    served.port.reserve("another", names, hold())
    served.port.release_holds([AttemptId("request")])
    assert served.port.records.status().counts.published == 0


def test_a_hold_of_nothing_is_none(served: Served) -> None:
    served.port.reserve("another", [], hold())
    assert served.port.records.status().num_holds == 0


def test_a_corrupt_block_is_found_no_more(served: Served) -> None:
    names = names_of(8)
    good, bad = served.publish(names)
    assert served.port.reject([good._replace(checksum=bytes(16)), bad]) == 1
    assert served.found(names) == [True, False]
    assert served.port.reject([bad]) == 0
    assert served.port.records.status().counts.free == NUM_SLOTS - 1


def test_blocks_are_forgotten_by_their_keys(served: Served) -> None:
    names = names_of(10)
    served.publish(names)
    assert served.port.delete(keys([names[0], names[2], *names_of(4, first=1000)])) == 2
    assert served.found(names) == [False, True, False]
    assert served.port.records.status().counts.free == NUM_SLOTS - 1


def test_a_corrupt_block_that_is_held_and_read_is_free_when_both_end(served: Served) -> None:
    names = names_of(4)
    [bad] = served.publish(names, hold())
    lease = served.port.lease("reader", keys(names), 5.0)
    served.port.reject([bad])
    assert served.port.records.status().counts.owned == 1
    served.port.release_holds([AttemptId("request")])
    assert served.port.records.status().counts.draining == 1
    served.port.release(lease.lease_id)
    assert served.port.records.status().counts.free == NUM_SLOTS


def test_tails_are_evicted_first_and_then_a_prefixs_end(served: Served) -> None:
    names, tail = names_of(23)[:5], names_of(23)[5]
    assert tail.is_tail
    served.publish(names[:2])
    served.publish(names[2:])
    served.publish([tail])
    served.publish(names_of(16, first=1000))
    assert served.found([*names, tail]) == [True, True, True, True, False, False]


def test_a_use_of_a_block_is_a_use_of_all_before_it(served: Served) -> None:
    names, others = names_of(16), names_of(16, first=1000)
    served.publish(names[:3])
    served.publish(others)
    served.publish(names[3:])
    served.publish(names_of(16, first=2000))
    assert (served.found(names), served.found(others)) == ([True] * 4, [False] * 4)


def test_names_in_a_circle_do_no_harm(served: Served) -> None:
    [name, other] = names_of(8)
    served.publish([name._replace(parent=other.key)])
    served.publish([other._replace(parent=name.key)])
    assert served.found([name, other]) == [True, True]
    served.publish(names_of(4 * NUM_SLOTS, first=1000))
    assert served.found([name, other]) == [False, False]


def test_a_block_is_told_as_it_was_committed(served: Served) -> None:
    blocks = served.publish(names_of(10))
    assert sorted(served.directory.state.blocks(), key=lambda block: block.slot) == sorted(blocks, key=lambda b: b.slot)


def test_what_the_cold_tier_has_is_evicted_first(served: Served) -> None:
    names, others = names_of(16), names_of(16, first=1000)
    served.publish(names)
    served.publish(others)
    assert served.port.records.mark_cold(Tier.REDIS, keys(others) + keys(names_of(4, first=5000)), []) == 4
    served.publish(names_of(16, first=2000))
    assert (served.found(names), served.found(others)) == ([True] * 4, [False] * 4)
    assert served.port.records.status().evictions == 4


def test_cold_candidates_are_the_oldest_full_blocks_above_the_mark() -> None:
    directory = Directory(NUM_SLOTS, FakeClock(), high_water=0.5)
    served = Served(directory, directory, FakeClock())
    names = names_of(15)
    served.publish(names)
    assert directory.lease_cold(Tier.REDIS, 9, 5.0).blocks == []
    served.publish(names_of(8, first=1000))
    assert directory.records.status().counts.free == 2
    batch = directory.lease_cold(Tier.REDIS, 9, 5.0)
    assert keys([block.name for block in batch.blocks]) == keys([names[2]])
    directory.records.mark_cold(Tier.REDIS, [names[2].key, names[3].key], [])
    assert directory.lease_cold(Tier.REDIS, 9, 5.0).blocks == []
    directory.release(batch.lease_id)
    served.publish(names_of(16, first=2000))
    assert directory.records.exists(keys(names)) == [True, True, False, False]
    assert len(directory.lease_cold(Tier.REDIS, 1, 5.0).blocks) == 1
    assert directory.records.check() == []


def written_next(directory: Directory, tier: Tier, max_blocks: int = 9) -> list[BlockKey]:
    batch = directory.lease_cold(tier, max_blocks, 5.0)
    assert directory.release(batch.lease_id)
    return keys([block.name for block in batch.blocks])


def test_all_full_blocks_are_offered_to_a_tier_that_gets_all() -> None:
    directory = Directory(NUM_SLOTS, FakeClock(), writes={Tier.FILES: Write.ALL})
    served = Served(directory, directory, FakeClock())
    names = names_of(15)
    served.publish(names)
    assert set(written_next(directory, Tier.FILES)) == set(keys(names[:3])), "a tail stays"
    assert len(written_next(directory, Tier.FILES, 2)) == 2
    assert written_next(directory, Tier.REDIS) == []
    directory.records.mark_cold(Tier.REDIS, keys(names[:1]), [])
    assert set(written_next(directory, Tier.FILES)) == set(keys(names[:3])), "each tier for itself"
    directory.records.mark_cold(Tier.FILES, keys(names[:2]), [])
    assert written_next(directory, Tier.FILES) == keys(names[2:3])
    served.publish(names_of(4 * NUM_SLOTS, first=1000))
    assert directory.records.exists(keys(names)) == [False] * 4
    assert not set(written_next(directory, Tier.FILES)) & set(keys(names)), "what was evicted is offered no more"
    assert directory.records.check() == []


def test_blocks_that_were_not_written_are_offered_after_the_others() -> None:
    directory = Directory(NUM_SLOTS, FakeClock(), writes={Tier.FILES: Write.ALL})
    names = names_of(16)
    Served(directory, directory, FakeClock()).publish(names)
    first, second, third = (written_next(directory, Tier.FILES, 2) for _ in range(3))
    assert {*first, *second} == set(keys(names))
    assert third == first


def test_blocks_that_are_read_outside_of_a_hand_off_are_offered_to_a_tier_that_gets_reused_ones() -> None:
    clock = FakeClock()
    directory = Directory(NUM_SLOTS, clock, writes={Tier.REDIS: Write.REUSED})
    served = Served(directory, directory, clock)
    names = names_of(15)
    served.publish(names)
    assert written_next(directory, Tier.REDIS) == []
    directory.reserve("other", names, Hold(AttemptId("a"), 5.0))
    directory.release(directory.lease("decode", keys(names), 1.0).lease_id)
    assert written_next(directory, Tier.REDIS) == [], "that was the hand-off"
    directory.release(directory.lease("decode", keys(names[2:3]), 1.0).lease_id)
    assert written_next(directory, Tier.REDIS) == keys(names[2:3]), "of a second request"
    directory.release_holds([AttemptId("a")])
    directory.release(directory.lease("prefill", keys(names[1:]), 1.0).lease_id)
    assert written_next(directory, Tier.REDIS) == keys([names[2], names[1]])
    directory.records.mark_cold(Tier.REDIS, keys(names[1:3]), [])
    directory.release(directory.lease("prefill", keys(names), 1.0).lease_id)
    assert written_next(directory, Tier.REDIS) == keys(names[:1])
    assert directory.records.check() == []


def test_a_block_with_a_copy_in_any_tier_is_cheap_to_lose() -> None:
    directory = Directory(NUM_SLOTS, FakeClock(), high_water=0.0, writes={Tier.FILES: Write.ALL})
    served = Served(directory, directory, FakeClock())
    names, others = names_of(16), names_of(16, first=1000)
    served.publish(names)
    served.publish(others)
    assert directory.records.mark_cold(Tier.FILES, keys(others), []) == 4
    assert set(written_next(directory, Tier.REDIS)) == set(keys(names)), "no cold tier has these"
    served.publish(names_of(16, first=2000))
    assert (served.found(names), served.found(others)) == ([True] * 4, [False] * 4)


class TestShares:
    """Namespaces a and b; a's share is a quarter of eight slots."""

    def publish(self, directory: Directory, root: NamespaceRoot, first: int, num: int) -> None:
        names = cover(root, range(first, first + 4 * num), 4)
        blocks = committed(directory.reserve("w", names, None).slots, names)
        assert directory.commit("w", blocks, None) == len(blocks) == num
        assert directory.records.check() == []

    def num_of(self, directory: Directory, root: NamespaceRoot) -> int:
        return sum(block.name.root_digest == digest_of(root) for block in directory.state.blocks())

    @pytest.mark.parametrize("is_late", [False, True])
    def test_beyond_its_share_its_own_go_first(self, is_late: bool) -> None:
        directory = Directory(8)
        if not is_late:
            directory.records.set_shares({(digest_of(ROOT_A),): 0.25})
        self.publish(directory, ROOT_B, 0, 2)
        self.publish(directory, ROOT_A, 1000, 6)
        directory.records.set_shares({(digest_of(ROOT_A),): 0.25})
        assert directory.records.check() == []
        assert self.num_of(directory, ROOT_A) == 6, "an arena with room is used"
        self.publish(directory, ROOT_A, 2000, 3)
        assert (self.num_of(directory, ROOT_A), self.num_of(directory, ROOT_B)) == (6, 2), "its own have gone"
        self.publish(directory, ROOT_B, 3000, 4)
        assert (self.num_of(directory, ROOT_A), self.num_of(directory, ROOT_B)) == (2, 6)
        self.publish(directory, ROOT_B, 4000, 1)
        assert self.num_of(directory, ROOT_A) == 2, "within its share, the least recently used of all goes"

    def test_namespaces_of_one_tenant_have_one_share(self) -> None:
        directory = Directory(8)
        directory.records.set_shares({(digest_of(ROOT_A),): 0.25})
        self.publish(directory, ROOT_B, 0, 2)
        self.publish(directory, ROOT_A, 1000, 2)
        directory.records.set_shares({(digest_of(ROOT_C), digest_of(ROOT_A)): 0.25})
        self.publish(directory, ROOT_C, 2000, 2)
        self.publish(directory, ROOT_B, 3000, 4)
        assert self.num_of(directory, ROOT_A) + self.num_of(directory, ROOT_C) == 2
        assert self.num_of(directory, ROOT_B) == 6

    def test_without_a_share_or_after_it_the_oldest_goes(self) -> None:
        directory = Directory(8)
        directory.records.set_shares({(digest_of(ROOT_A),): 0.25})
        directory.records.set_shares({})
        self.publish(directory, ROOT_B, 0, 2)
        self.publish(directory, ROOT_A, 1000, 6)
        self.publish(directory, ROOT_A, 2000, 2)
        assert self.num_of(directory, ROOT_B) == 0


def test_a_wait_for_events_ends_with_the_first_event(served: Served) -> None:
    place = served.port.records.events(EventCursor()).cursor
    with ThreadPoolExecutor(1) as waiter:
        waiting = waiter.submit(served.port.records.wait_for_events, place, 10.0)
        while not served.directory.records.signal.num_waiting:
            time.sleep(0.001)
        served.publish(names_of(10))
        assert waiting.result(5.0)
    assert served.port.records.events(place).events
    assert not served.directory.records.signal.num_waiting


def test_a_wait_for_events_that_are_there_ends_at_once(served: Served) -> None:
    place = served.port.records.events(EventCursor()).cursor
    served.publish(names_of(10))
    assert served.port.records.wait_for_events(place, 10.0)
    assert served.port.records.wait_for_events(EventCursor("another epoch", 3), 10.0)


def test_a_wait_for_events_is_bounded(served: Served) -> None:
    place = served.port.records.events(EventCursor()).cursor
    assert not served.port.records.wait_for_events(place, 0.01)
    assert not served.directory.records.signal.num_waiting


def test_the_loss_of_a_copy_is_an_event_once(served: Served) -> None:
    names = names_of(10)
    served.publish(names)
    records = served.port.records
    records.mark_cold(Tier.REDIS, keys(names[:2]), [])
    place = records.events(EventCursor()).cursor
    unknown = keys(names_of(4, first=5000))
    assert records.mark_cold(Tier.REDIS, [], keys(names[1:3]) + unknown) == 0
    records.mark_cold(Tier.REDIS, [], keys(names[1:2]))
    records.mark_cold(Tier.FILES, [], keys(names[:1]))
    page = records.events(place)
    assert page.events == [BlockEvents(EventKind.REMOVED, Tier.REDIS, keys(names[1:2]))]
    snapshot = {one.tier: one.keys for one in records.events(EventCursor()).events if one.keys}
    assert snapshot == {Tier.HOST: keys(names[:2]), Tier.REDIS: keys(names[:1])}


def test_a_block_whose_copy_is_lost_is_not_demoted_again_and_again() -> None:
    directory = Directory(NUM_SLOTS, FakeClock(), high_water=0.0)
    names = names_of(8)
    Served(directory, directory, FakeClock()).publish(names)
    assert written_next(directory, Tier.REDIS) == keys(names[::-1])
    directory.records.mark_cold(Tier.REDIS, keys(names), [])
    directory.records.mark_cold(Tier.REDIS, [], keys(names))
    assert written_next(directory, Tier.REDIS) == []
