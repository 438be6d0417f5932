"""The store over all tiers: of the twins, and of real sockets, shared memory and Redis."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
import redis
import torch

from kv_store import node_store
from kv_store.device_pool import DevicePool
from kv_store.node.arena import Arena
from kv_store.node.directory import Directory
from kv_store.node.directory_client import DirectoryClient
from kv_store.node.directory_port import DirectoryPort
from kv_store.node.directory_server import DirectoryServer
from kv_store.node_store import HOLD_TTL_S, NodeStore
from kv_store.peers.block_reader import LocalBlocks
from kv_store.prefix.plan import Read
from kv_store.tiers.cold_tier import ColdTier
from kv_store.tiers.cold_writer import ColdWriter
from kv_store.tiers.memory_tier import MemoryTier
from kv_store.tiers.redis_tier import RedisTier
from tests.harness.directory_gate import DirectoryGate
from tests.harness.fake_clock import FakeClock
from tests.kv_store.names import LAYOUT, MAC_KEY, committed, names_of, payload_of, put_one
from tests.kv_store.pools import filled_pool, page_of, pages_from
from wire.block_names import BlockName
from wire.errors import ConfigError
from wire.ids import AttemptId, BlockKey, PageId, SlotId
from wire.layout import KVLayout
from wire.tier import Cause, Miss, Tier

NUM_SLOTS = 16
FIRST_FETCHED = 40
REQUEST = AttemptId("request")


class Node:
    """Arena, directory and cold tier, and stores of several processes over them."""

    def __init__(self, arena: Arena, directory: Directory, clock: FakeClock, cold: ColdTier | None) -> None:
        self.arena = arena
        self.directory = directory
        self.clock = clock
        self.cold = cold
        self.connect: Callable[[], tuple[Arena, DirectoryPort]] = lambda: (arena, directory)

    def store(self, pool: DevicePool) -> NodeStore:
        arena, port = self.connect()
        return NodeStore(LAYOUT, arena, port, [] if self.cold is None else [self.cold], pool)

    def publish(self, names: list[BlockName], hold: AttemptId | None = None) -> NodeStore:
        """By a store of its own."""
        store = self.store(filled_pool(names))
        published = store.write_through(names, pages_from(0, len(names)), hold)
        assert published == len(names)
        return store

    def fetch(self, names: list[BlockName]) -> list[Tier]:
        """By a store of its own; what was fetched is what was asked for, and the rest of the pool is untouched."""
        pool = filled_pool([])
        tiers = self.store(pool).fetch(names, pages_from(FIRST_FETCHED, len(names))).tiers
        for page, name in zip(pages_from(FIRST_FETCHED, len(tiers)), names, strict=False):
            assert page_of(pool, page) == payload_of(name)
        assert not any(any(page_of(pool, page)) for page in pages_from(0, FIRST_FETCHED))
        return tiers

    def evict_all(self) -> None:
        """Fills the arena with blocks of no interest, and empties it of those."""
        filler = names_of(4 * NUM_SLOTS, first=900_000)
        blocks = committed(self.directory.reserve("filler", filler, None).slots, filler)
        self.directory.commit("filler", blocks, None)
        self.directory.reject(blocks)

    def write_cold(self) -> None:
        assert self.cold is not None
        writer = ColdWriter(LAYOUT, self.arena, self.directory, self.cold)
        while writer.write_some():
            pass


@contextmanager
def twins() -> Iterator[Node]:
    clock = FakeClock()
    arena = Arena.anonymous(LAYOUT.block_bytes, NUM_SLOTS)
    try:
        yield Node(arena, Directory(NUM_SLOTS, clock, high_water=0.0), clock, MemoryTier(LAYOUT))
    finally:
        arena.close()


@contextmanager
def real(folder: Path, redis_url: str) -> Iterator[Node]:
    clock, path = FakeClock(), str(folder / "arena")
    arena = Arena.create(path, LAYOUT.block_bytes, NUM_SLOTS)
    directory = Directory(NUM_SLOTS, clock, arena_path=path, block_bytes=LAYOUT.block_bytes, high_water=0.0)
    server = DirectoryServer(directory, str(folder / "socket"))
    server.start()
    with redis.Redis.from_url(redis_url) as client:
        client.flushdb()
    node = Node(arena, directory, clock, RedisTier(redis_url, LAYOUT, MAC_KEY, timeout_s=10.0))
    clients: list[DirectoryClient] = []

    def connect() -> tuple[Arena, DirectoryPort]:
        clients.append(DirectoryClient(str(folder / "socket"), timeout_s=10.0))
        return Arena.open(clients[-1].attach().arena_path), clients[-1]

    node.connect = connect
    try:
        yield node
    finally:
        for one in clients:
            one.close()
        server.stop()


@pytest.fixture(params=["twins", pytest.param("real", marks=pytest.mark.redis)])
def node(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Node]:
    nodes = twins() if request.param == "twins" else real(tmp_path, request.getfixturevalue("redis_url") + "?db=5")
    with nodes as node:
        yield node
        assert node.directory.records.check() == []
        node.clock.now += 100.0
        counts = node.directory.records.status().counts
        assert counts.free + counts.cached == counts.total


def test_what_one_publishes_another_fetches(node: Node) -> None:
    names = names_of(18)
    node.publish(names)
    assert node.fetch(names) == [Tier.HOST] * 5
    assert node.fetch(names_of(16)) == [Tier.HOST] * 4
    assert node.fetch(names_of(18, first=1000)) == []


def test_a_prefix_ends_at_the_first_hole(node: Node) -> None:
    names = names_of(20)
    node.publish([*names[:2], *names[3:]])
    assert node.fetch(names) == [Tier.HOST] * 2
    assert node.fetch([]) == []


def test_what_is_there_is_not_written_again(node: Node) -> None:
    names = names_of(16)
    store = node.publish(names[:2])
    assert store.write_through(names, pages_from(0, 4), None) == 4
    assert node.directory.records.status().counts.cached == 4


def test_cold_blocks_come_back_through_the_arena(node: Node) -> None:
    names = names_of(18)
    node.publish(names)
    node.write_cold()
    node.evict_all()
    assert node.fetch(names) == [Tier.REDIS] * 4
    assert node.fetch(names) == [Tier.HOST] * 4
    assert node.cold is not None
    assert node.cold.status().hits == 4
    assert node.directory.lease_cold(Tier.REDIS, 99, 5.0).blocks == []


def tiers_with(names: dict[Tier, list[BlockName]]) -> list[ColdTier]:
    tiers: list[ColdTier] = []
    for tier, stored in names.items():
        tiers.append(MemoryTier(LAYOUT, tier=tier))
        assert all(put_one(tiers[-1], name) for name in stored)
    return tiers


def test_each_block_comes_from_the_nearest_tier_that_has_it(node: Node) -> None:
    names = names_of(4 * 6)
    node.publish(names[1:2])
    redis, files = tiers_with({Tier.REDIS: [names[0], *names[3:5]], Tier.FILES: names[1:]})
    pool = filled_pool([])
    arena, port = node.connect()
    store = NodeStore(LAYOUT, arena, port, [redis, files], pool)
    tiers = store.fetch(names, pages_from(0, 6)).tiers
    assert tiers == [Tier.REDIS, Tier.HOST, Tier.FILES, Tier.REDIS, Tier.REDIS, Tier.FILES]
    assert [page_of(pool, page) for page in pages_from(0, 6)] == [payload_of(name) for name in names]
    assert (redis.status().hits, files.status().hits) == (3, 2)
    assert store.fetch(names, pages_from(0, 6)).tiers == [Tier.HOST] * 6
    store.purge(names)
    assert not any(redis.exists([name.key for name in names]) + files.exists([name.key for name in names]))


def test_a_prefix_ends_where_no_tier_has_a_block_or_the_nearest_has_lost_it(node: Node) -> None:
    names = names_of(4 * 6)
    redis, files = tiers_with({Tier.REDIS: names[:4], Tier.FILES: [*names[3:4], *names[5:]]})
    arena, port = node.connect()
    store = NodeStore(LAYOUT, arena, port, [redis, files], filled_pool([]))
    assert store.fetch(names, pages_from(0, 6)).tiers == [Tier.REDIS] * 4
    node.evict_all()
    assert isinstance(redis, MemoryTier)
    redis.frames[names[3].key] = redis.frames[names[2].key]
    assert store.fetch(names, pages_from(0, 6)).tiers == [Tier.REDIS] * 3
    node.evict_all()
    assert store.fetch(names, pages_from(0, 6)).tiers == [*[Tier.REDIS] * 3, Tier.FILES], "what was wrong is gone"


def test_tails_never_go_to_the_cold_tier(node: Node) -> None:
    names = names_of(3)
    node.publish(names)
    node.write_cold()
    assert node.cold is not None
    assert node.cold.exists([name.key for name in names]) == [False]


def test_a_prefix_may_lie_in_both_tiers_in_any_order(node: Node) -> None:
    names = names_of(24)
    node.publish(names)
    node.write_cold()
    node.evict_all()
    node.publish([names[1], names[4]])
    expected = [Tier.HOST if index in (1, 4) else Tier.REDIS for index in range(6)]
    assert node.fetch(names) == expected


def test_without_room_in_the_arena_cold_blocks_still_come(node: Node) -> None:
    names = names_of(16)
    node.publish(names)
    node.write_cold()
    node.evict_all()
    node.publish(names_of(4 * NUM_SLOTS, first=1000), REQUEST)
    assert node.fetch(names) == [Tier.REDIS] * 4
    assert node.directory.records.status().counts.published == NUM_SLOTS


def test_without_room_publishing_does_what_it_can(node: Node) -> None:
    node.publish(names_of(4 * (NUM_SLOTS - 2), first=1000), REQUEST)
    names = names_of(16)
    store = node.store(filled_pool(names))
    assert store.write_through(names, pages_from(0, 4), AttemptId("other")) == 2
    assert node.fetch(names) == [Tier.HOST] * 2


def test_a_hold_keeps_a_prompt_until_released(node: Node) -> None:
    names = names_of(18)
    node.publish(names[:2])
    store = node.publish(names, REQUEST)
    node.publish(names_of(4 * (NUM_SLOTS - 5), first=1000))
    node.publish(names_of(4 * (NUM_SLOTS - 5), first=2000))
    assert node.fetch(names) == [Tier.HOST] * 5
    node.clock.now += HOLD_TTL_S - 1
    store.control.renew([REQUEST])
    node.clock.now += HOLD_TTL_S - 1
    assert store.control.status().directory is not None
    assert node.directory.records.status().num_holds == 1
    store.control.release_holds([REQUEST])
    assert node.directory.records.status().num_holds == 0
    assert store.write_through(names, pages_from(0, 5), REQUEST) == 5
    assert node.directory.records.status().num_holds == 1
    node.clock.now += HOLD_TTL_S
    assert node.directory.records.status().num_holds == 0


def test_a_corrupt_block_in_the_arena_is_never_used_and_leaves(node: Node) -> None:
    names = names_of(16)
    node.publish(names)
    [entry] = node.directory.lease("test", [names[2].key], 1.0).entries
    assert entry is not None
    node.arena.slot(entry.slot)[7] ^= 1
    node.clock.now += 2.0
    store = node.store(filled_pool([]))
    assert store.fetch(names, pages_from(0, 4)).blocks == [
        *[Tier.HOST] * 2,
        Miss(Cause.LOAD_FAILED, "its checksum in the arena was wrong"),
        Miss(Cause.BEHIND),
    ]
    assert store.control.status().num_corrupt == 1
    assert node.directory.records.exists([name.key for name in names]) == [True, True, False, True]
    node.publish(names)
    assert node.fetch(names) == [Tier.HOST] * 4


class SpoilingPool(DevicePool):
    """A copy to page 2 goes wrong."""

    def write_pages(self, first: PageId, data: memoryview) -> None:
        super().write_pages(first, data)
        if first == 2:
            self.page_bytes(first)[5] ^= 1


@pytest.mark.parametrize("is_cold", [False, True], ids=["arena", "cold"])
def test_a_block_that_its_copy_spoils_is_never_used(
    node: Node, is_cold: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Its checksum is taken in its page. A cold one does not go into the arena either."""
    names = names_of(16)
    node.publish(names)
    if is_cold:
        node.write_cold()
        node.evict_all()
    tier = Tier.REDIS if is_cold else Tier.HOST
    with caplog.at_level("WARNING"):
        store = node.store(SpoilingPool(LAYOUT, 4, torch.device("cpu")))
        assert store.fetch(names, pages_from(0, 4)).tiers == [tier] * 2
    assert f"block {names[2].key.hex()[:16]} of tier {tier} came to its page with a wrong checksum" in caplog.text
    assert node.directory.records.exists([name.key for name in names]) == [True, True, False, not is_cold]


def test_a_corrupt_cold_block_ends_the_prefix(node: Node) -> None:
    names = names_of(16)
    node.publish(names)
    node.write_cold()
    node.evict_all()
    assert node.cold is not None
    node.cold.put(names[2], memoryview(bytes(LAYOUT.payload_bytes)), bytes(16))
    assert node.fetch(names) == [Tier.REDIS] * 2
    assert node.cold.status().corrupt == 1
    assert node.directory.records.status().counts.draining == 0


class SlowPool(DevicePool):
    """Time goes by while a page is written."""

    def __init__(self, clock: FakeClock, seconds: float) -> None:
        super().__init__(LAYOUT, 64, torch.device("cpu"))
        self._clock = clock
        self._seconds = seconds

    def write_pages(self, page: PageId, data: memoryview) -> None:
        super().write_pages(page, data)
        self._clock.now += self._seconds


def test_a_lease_that_runs_out_while_reading_gives_nothing(node: Node) -> None:
    names = names_of(16)
    node.publish(names)
    assert node.store(SlowPool(node.clock, 100.0)).fetch(names, pages_from(0, 4)).tiers == []
    assert node.store(SlowPool(node.clock, 0.5)).fetch(names, pages_from(0, 4)).tiers == [Tier.HOST] * 4


@pytest.mark.parametrize(("block_s", "num_read"), [(100.0, 0), (0.01, 4)])
def test_a_step_that_was_left_gives_nothing_once_its_lease_has_run_out(
    node: Node, block_s: float, num_read: int
) -> None:
    names = names_of(16)
    node.publish(names)
    store = node.store(SlowPool(node.clock, block_s))
    assert store.read(Read(names, [None] * 4, store.costs), pages_from(0, 4)).tiers == [Tier.HOST] * num_read


class SlowSource(MemoryTier):
    """Time goes by while it is asked, and it has nothing."""

    def __init__(self, clock: FakeClock) -> None:
        super().__init__(LAYOUT)
        self._clock = clock
        self.num_asked = 0

    def exists(self, keys: Sequence[BlockKey]) -> list[bool]:
        self.num_asked += 1
        self._clock.now += 1.0
        return [False] * len(keys)


def test_sources_are_asked_only_while_computing_would_take_longer(node: Node) -> None:
    names, sources = names_of(16), [SlowSource(node.clock) for _ in range(3)]
    node.publish(names[:2])
    store = NodeStore(LAYOUT, node.arena, node.directory, sources, filled_pool([]), node.clock)
    assert store.fetch(names, pages_from(0, 4)).tiers == [Tier.HOST] * 2
    assert [source.num_asked for source in sources] == [1, 0, 0]


class BrokenPool(DevicePool):
    def read_pages(self, page: PageId, into: memoryview) -> None:
        raise RuntimeError("the device is lost")


def test_a_device_that_fails_publishes_nothing(node: Node) -> None:
    names = names_of(8)
    store = node.store(BrokenPool(LAYOUT, 4, torch.device("cpu")))
    with pytest.raises(RuntimeError, match="lost"):
        store.write_through(names, pages_from(0, 2), None)
    assert node.fetch(names) == []
    assert node.directory.records.status().counts.draining == 0


class FetchingPool(DevicePool):
    """Another transfer of the same store fetches while the first page is read, and fails."""

    fetch: Callable[[], object] | None = None

    def read_pages(self, page: PageId, into: memoryview) -> None:
        super().read_pages(page, into)
        fetch, self.fetch = self.fetch, None
        if fetch is not None:
            with pytest.raises(RuntimeError, match="lost"):
                fetch()

    def write_pages(self, page: PageId, data: memoryview) -> None:
        raise RuntimeError("the device is lost")


@pytest.mark.parametrize("is_cold", [False, True], ids=["arena", "cold"])
def test_a_fetch_that_fails_leaves_an_open_publish_its_slots(node: Node, is_cold: bool) -> None:
    """A fetch from a cold tier has a reservation of its own, which is given back."""
    names, others = names_of(8), names_of(8, first=1000)
    node.publish(others)
    if is_cold:
        node.write_cold()
        node.evict_all()
    pool = FetchingPool(LAYOUT, 4, torch.device("cpu"))
    store = node.store(pool)
    pool.fetch = lambda: store.fetch(others, pages_from(2, 2))
    assert store.write_through(names, pages_from(0, 2), None) == 2
    assert node.directory.records.exists([name.key for name in names]) == [True, True]
    assert node.directory.records.status().counts.draining == 0


def test_withdrawn_blocks_are_found_nowhere(node: Node) -> None:
    names = names_of(18)
    store = node.publish(names)
    node.write_cold()
    assert node.fetch(names) == [Tier.HOST] * 5
    store.purge(names)
    assert node.fetch(names) == []
    node.evict_all()
    assert node.fetch(names) == []
    assert node.directory.records.check() == []


def test_blocks_are_withdrawn_from_the_nodes_that_may_have_them(node: Node) -> None:
    names, (arena, port) = names_of(18), node.connect()
    node.publish(names)
    with closing(Arena.anonymous(LAYOUT.block_bytes, NUM_SLOTS)) as own:
        peers = {"there": LocalBlocks(port, arena, LAYOUT.payload_bytes)}
        store = NodeStore(LAYOUT, own, Directory(NUM_SLOTS), [], filled_pool([]), peer=peers.__getitem__)
        assert store.fetch(names, pages_from(0, 5), ["there"]).tiers == [Tier.PEERS] * 5
        store.purge(names[1:], ["there"])
        assert store.fetch(names, pages_from(0, 5), ["there"]).tiers == [Tier.HOST]
    assert node.directory.records.exists([name.key for name in names]) == [True] + [False] * 4


def test_without_a_cold_tier(node: Node) -> None:
    node.cold = None
    names = names_of(8)
    store = node.publish(names)
    assert node.fetch(names_of(16)) == [Tier.HOST] * 2
    assert store.control.status().cold == []


@pytest.fixture
def calls() -> list[str]:
    """The calls of `gated`'s directory."""
    return []


@pytest.fixture
def gated(calls: list[str]) -> Iterator[Node]:
    """Twins behind a gate that notes the calls of the directory."""
    with twins() as node:
        gate = DirectoryGate(node.directory)
        gate.before = lambda method, _: calls.append(method)
        node.connect = lambda: (node.arena, gate)
        yield node


def test_a_prompt_that_is_nowhere_asks_the_directory_twice(gated: Node, calls: list[str]) -> None:
    assert gated.fetch(names_of(18)) == []
    assert calls == ["lease", "why"]


class BatchingPool(DevicePool):
    """A pool in host memory that copies two pages at once, as a device's does many."""

    num_copied_at_once = 2


def test_a_publish_reserves_once_and_commits_only_what_it_copies(gated: Node, calls: list[str]) -> None:
    names = names_of(20)
    store = gated.store(BatchingPool(LAYOUT, 8, torch.device("cpu")))
    assert store.write_through(names[:3], pages_from(0, 3), None) == 3
    assert store.write_through(names, pages_from(0, 5), REQUEST) == 5
    assert store.write_through(names, pages_from(0, 5), REQUEST) == 5
    assert calls == ["reserve", "commit", "commit", "reserve", "commit", "reserve"]
    gated.directory.release_holds([REQUEST])


def test_a_publish_of_many_blocks_leaves_slots_to_others_meanwhile(
    gated: Node, calls: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(node_store, "RESERVED_AT_ONCE", 4)
    store, names = gated.store(BatchingPool(LAYOUT, 8, torch.device("cpu"))), names_of(20)
    assert store.write_through(names, pages_from(0, 5), None) == 5
    assert calls == ["reserve", "commit", "commit", "reserve", "commit"]


def test_an_arena_for_other_blocks_is_refused() -> None:
    with closing(Arena.anonymous(8192, 1)) as arena, pytest.raises(ConfigError, match="8192"):
        NodeStore(LAYOUT, arena, Directory(1), [], filled_pool([]))


class Restartable:
    """A node service that can be killed and started again at one place."""

    def __init__(self, folder: Path, layout: KVLayout = LAYOUT) -> None:
        self._folder = folder
        self._layout = layout
        self._num_starts = 0
        self.socket = str(folder / "socket")

    def start(self) -> None:
        self._num_starts += 1
        path = str(self._folder / f"arena-{self._num_starts}")
        self.arena = Arena.create(path, self._layout.block_bytes, NUM_SLOTS)
        self.directory = Directory(NUM_SLOTS, arena_path=path, block_bytes=self._layout.block_bytes)
        self.server = DirectoryServer(self.directory, self.socket)
        self.server.start()

    def stop(self) -> None:
        self.server.stop()
        self.arena.unlink()
        self.arena.close()


def test_when_the_directory_is_gone_all_is_a_miss_and_after_its_restart_nothing_old_is_found(tmp_path: Path) -> None:
    service = Restartable(tmp_path)
    service.start()
    with closing(DirectoryClient(service.socket, timeout_s=10.0)) as client:
        names = names_of(8)
        store = NodeStore(LAYOUT, Arena.open(client.attach().arena_path), client, [], filled_pool(names))
        assert store.write_through(names, pages_from(0, 2), REQUEST) == 2
        service.stop()
        assert store.fetch(names, pages_from(8, 2)).tiers == []
        assert store.control.check() == ["the directory is out of reach"]
        service.start()
        assert store.fetch(names, pages_from(8, 2)).tiers == []
        assert store.write_through(names, pages_from(0, 2), REQUEST) == 2
        assert store.fetch(names, pages_from(8, 2)).tiers == [Tier.HOST] * 2
        assert store.control.check() == []
        assert bytes(service.arena.slot(SlotId(0))[:8]) == payload_of(names[0])[:8]
        assert store.control.status().num_failed == 3
        service.stop()


def test_all_at_once_and_nothing_of_it_raises(tmp_path: Path) -> None:
    """A store whose directory was never there."""
    with closing(Arena.anonymous(LAYOUT.block_bytes, 4)) as arena:
        store = NodeStore(
            LAYOUT, arena, DirectoryClient(str(tmp_path / "nobody")), [MemoryTier(LAYOUT)], filled_pool([])
        )
        names = names_of(8)
        assert store.fetch(names, pages_from(0, 2)).tiers == []
        assert store.write_through(names, pages_from(0, 2), REQUEST) == 0
        store.control.renew([REQUEST])
        store.control.release_holds([REQUEST])
        assert store.control.status().directory is None
        assert store.control.check() != []
