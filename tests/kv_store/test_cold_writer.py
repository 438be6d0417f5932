import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest

from kv_store.node.arena import Arena
from kv_store.node.directory import Directory
from kv_store.node.event_log import EventCursor
from kv_store.tiers.cold_writer import ColdWriter
from kv_store.tiers.memory_tier import MemoryTier
from kv_store.tiers.redis_tier import RedisTier
from tests.harness.fake_clock import FakeClock
from tests.harness.redis_process import RedisProcess
from tests.kv_store.names import LAYOUT, MAC_KEY, committed, got_one, names_of, payload_of
from wire.block_names import BlockName
from wire.ids import BlockKey
from wire.tier import EventKind, Tier, Write

NUM_SLOTS = 16
WAIT_S = 20.0


class Slow(MemoryTier):
    """A cold tier that does something first, and may fail."""

    def __init__(self, max_blocks: int) -> None:
        super().__init__(LAYOUT, max_blocks)
        self.before: Callable[[], bool] = lambda: True
        self.answers = True

    def break_it(self) -> None:
        self.answers = False
        for _ in range(3):
            self._failed(OSError("out of reach"))

    def exists(self, keys: Sequence[BlockKey]) -> list[bool]:
        if self.answers:
            self._succeeded()
        return super().exists(keys)

    def put(self, name: BlockName, payload: memoryview, checksum: bytes) -> bool:
        return self.before() and super().put(name, payload, checksum)


class Node:
    def __init__(self, writes: Mapping[Tier, Write] | None = None, max_cold_blocks: int = 1024) -> None:
        self.clock = FakeClock()
        self.arena = Arena.anonymous(LAYOUT.block_bytes, NUM_SLOTS)
        self.directory = Directory(NUM_SLOTS, self.clock, high_water=0.0, writes=writes)
        self.cold = Slow(max_cold_blocks)
        self.writer = ColdWriter(LAYOUT, self.arena, self.directory, self.cold, max_blocks=4, interval_s=0.01)

    def publish(self, names: list[BlockName]) -> None:
        blocks = committed(self.directory.reserve("writer", names, None).slots, names)
        for block in blocks:
            self.arena.slot(block.slot)[: LAYOUT.payload_bytes] = payload_of(block.name)
        self.directory.commit("writer", blocks, None)

    def is_cold(self, name: BlockName) -> bool:
        return got_one(self.cold, name)


@pytest.fixture
def node() -> Iterator[Node]:
    node = Node()
    yield node
    assert node.directory.records.check() == []
    assert node.directory.records.status().num_leases == 0
    node.arena.close()


def test_the_oldest_blocks_go_first_each_once(node: Node) -> None:
    names = names_of(24)
    node.publish(names[3:])
    node.publish(names_of(12, first=1000))
    assert [node.writer.write_some(), node.writer.write_some(), node.writer.write_some()] == [4, 2, 0]
    [cold] = node.directory.records.status().cold
    assert (cold.tier, cold.written) == (Tier.REDIS, 6)
    assert all(node.is_cold(name) for name in names[3:])


def test_a_failure_ends_the_batch_and_is_tried_again(node: Node) -> None:
    names = names_of(16)
    node.publish(names)
    answers = iter([True, False, True, True, True])
    node.cold.before = lambda: next(answers)
    assert node.writer.write_some() == 1
    assert node.writer.write_some() == 3
    assert all(node.is_cold(name) for name in names)


@pytest.mark.redis
def test_a_redis_that_is_full_is_told_by_the_directory(tmp_path: Path) -> None:
    server = RedisProcess(tmp_path, ["--maxmemory-policy", "noeviction"])
    server.start()
    try:
        node = Node()
        cold = RedisTier(server.url, LAYOUT, MAC_KEY, WAIT_S)
        with server.client() as client:
            client.config_set("maxmemory", "1kb")
        writer = ColdWriter(LAYOUT, node.arena, node.directory, cold)
        node.publish(names_of(24))
        assert node.directory.records.status().cold == []
        assert [writer.write_some() for _ in range(3)] == [0, 0, 0]
        [status] = node.directory.records.status().cold
        assert (status.state, status.refused, status.written) == ("full", 3, 0)
        cold.close()
    finally:
        server.kill()


def test_a_writer_without_blocks_asks_a_tier_that_was_broken_whether_it_answers(node: Node) -> None:
    node.cold.break_it()
    assert node.writer.write_some() == 0
    assert [status.state for status in node.directory.records.status().cold] == ["broken"]
    node.cold.answers = True
    assert node.writer.write_some() == 0
    assert [status.state for status in node.directory.records.status().cold] == ["up"]


def test_what_was_read_after_its_lease_is_not_marked(node: Node) -> None:
    node.publish(names_of(8))

    def stall() -> bool:
        node.clock.now += 60.0
        return True

    node.cold.before = stall
    assert node.writer.write_some() == 0
    assert len(node.directory.lease_cold(Tier.REDIS, 9, 0.5).blocks) == 2
    node.clock.now += 1.0


def test_a_block_that_is_being_written_is_not_evicted(node: Node) -> None:
    names = names_of(4 * NUM_SLOTS)
    node.publish(names)

    def press() -> bool:
        node.publish(names_of(4 * NUM_SLOTS, first=1000))
        return True

    node.cold.before = press
    assert node.writer.write_some() == 4
    cold = [name for name in names if node.cold.exists([name.key]) == [True]]
    assert len(cold) == 4
    assert all(node.is_cold(name) for name in cold)
    assert node.cold.status().corrupt == 0


def test_the_thread_writes_what_comes_survives_faults_and_stops(node: Node, caplog: pytest.LogCaptureFixture) -> None:
    failed = threading.Event()

    def fail_once() -> bool:
        if not failed.is_set():
            failed.set()
            raise RuntimeError("out of luck")
        return True

    node.cold.before = fail_once
    node.writer.start()
    names = names_of(24)
    node.publish(names)
    assert failed.wait(WAIT_S)
    deadline = time.monotonic() + WAIT_S
    while not all(node.is_cold(name) for name in names):
        assert time.monotonic() < deadline
        time.sleep(0.005)
    node.writer.stop()
    assert "out of luck" in caplog.text
    node.publish(names_of(4, first=1000))
    assert not node.is_cold(names_of(4, first=1000)[0])


def test_a_tier_that_is_too_slow_for_a_batch_gets_it_in_parts(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    """Or the lease would run out, and the same blocks be written again for ever."""
    now = 0.0

    def be_slow() -> bool:
        nonlocal now
        now += 4.0
        node.clock.now += 4.0
        return True

    monkeypatch.setattr("kv_store.tiers.cold_writer.time", SimpleNamespace(monotonic=lambda: now))
    names = names_of(16)
    node.publish(names)
    node.cold.before = be_slow
    assert node.writer.write_some() == 2
    assert node.writer.write_some() == 2
    assert all(node.is_cold(name) for name in names)


def test_it_may_be_stopped_before_it_was_started(node: Node) -> None:
    node.writer.stop()


def test_stopping_does_not_wait_for_a_whole_batch(node: Node) -> None:
    node.publish(names_of(4 * NUM_SLOTS))
    begun, go_on = threading.Event(), threading.Event()

    def stall() -> bool:
        begun.set()
        return go_on.wait(WAIT_S)

    node.cold.before = stall
    node.writer.start()
    assert begun.wait(WAIT_S)
    stopping = threading.Thread(target=node.writer.stop)
    stopping.start()
    deadline = time.monotonic() + WAIT_S
    while not node.writer.is_stopping:
        assert time.monotonic() < deadline
        time.sleep(0.005)
    go_on.set()
    stopping.join(WAIT_S)
    assert node.cold.status().written == 1


@pytest.mark.parametrize(("grace_s", "num_written"), [(WAIT_S, NUM_SLOTS), (0.0, 1)])
def test_it_may_finish_within_a_grace(grace_s: float, num_written: int) -> None:
    node = Node({Tier.REDIS: Write.ALL})
    node.publish(names_of(4 * NUM_SLOTS))
    begun, go_on = threading.Event(), threading.Event()

    def stall() -> bool:
        begun.set()
        return go_on.wait(WAIT_S)

    node.cold.before = stall
    node.writer.start()
    assert begun.wait(WAIT_S)
    node.writer.finish(grace_s)
    go_on.set()
    node.writer.stop()
    assert node.cold.status().written == num_written


def test_nothing_is_left_to_finish_for_a_tier_that_fails() -> None:
    node = Node({Tier.REDIS: Write.ALL})
    node.publish(names_of(4 * NUM_SLOTS))
    node.cold.before = lambda: False
    node.writer.start()
    node.writer.finish(1000.0)
    node.writer.stop()
    assert node.cold.status().written == 0


def test_what_a_tier_evicts_for_what_it_is_given_is_told() -> None:
    node = Node(max_cold_blocks=2)
    names = names_of(16)
    node.publish(names)
    while node.writer.write_some():
        pass
    events = node.directory.records.events(EventCursor(node.directory.attach().epoch)).events
    there = set[BlockKey]()
    for one in events:
        if one.tier is node.cold.tier:
            (there.update if one.kind is EventKind.STORED else there.difference_update)(one.keys)
    assert there == {*node.cold.frames}
    assert len(there) == 2


def test_losses_are_told_by_a_pass_that_fails() -> None:
    node = Node({Tier.REDIS: Write.ALL})
    node.publish(names_of(4 * NUM_SLOTS))
    assert node.writer.write_some()
    lost = [*node.cold.frames]
    node.cold.frames.clear()
    node.cold.exists(lost)

    def fail() -> bool:
        raise OSError("amid a pass")

    node.cold.before = fail
    with pytest.raises(OSError, match="amid a pass"):
        node.writer.write_some()
    events = node.directory.records.events(EventCursor(node.directory.attach().epoch, 0)).events
    told = {key for one in events if one.tier is node.cold.tier and one.kind is EventKind.REMOVED for key in one.keys}
    assert told == {*lost}
