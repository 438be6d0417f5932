"""Times to live in Redis and in files, and what one tenant may hold there."""

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kv_store.frame import FRONT_BYTES
from kv_store.node.arena import Arena
from kv_store.node.directory import Directory
from kv_store.tiers.cold_writer import ColdWriter
from kv_store.tiers.files_tier import FilesTier
from kv_store.tiers.redis_tier import PREFIX, RedisTier
from tests.harness.fake_clock import FakeClock
from tests.harness.redis_process import RedisProcess
from tests.kv_store.names import LAYOUT, MAC_KEY, got_one, names_of, put_one
from wire.block_names import BlockName, cover, digest_of
from wire.errors import StoreError
from wire.ids import NamespaceRoot
from wire.tier import Write

WAIT_S = 20.0
FRAME_BYTES = FRONT_BYTES + LAYOUT.payload_bytes
OTHER = NamespaceRoot(b"O" * 32)


def others(num: int) -> list[BlockName]:
    return cover(OTHER, range(4 * num), LAYOUT.block_size)


def wait_until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


class Folder:
    """A tier of files, whose ages a test sets."""

    def __init__(self, path: Path, num_blocks: int = 1000, ttl_s: float = 0.0) -> None:
        self.path = path
        self.tier = FilesTier(str(path), LAYOUT, MAC_KEY, WAIT_S, num_blocks * FRAME_BYTES, ttl_s=ttl_s)

    def age(self, name: BlockName, age_s: float) -> None:
        os.utime(self.path_of(name), (time.time() - age_s,) * 2)

    def has(self, name: BlockName) -> bool:
        return self.path_of(name).exists()

    def path_of(self, name: BlockName) -> Path:
        return self.path / name.key.hex()[:2] / name.key.hex()


@pytest.fixture
def redis(tmp_path: Path) -> Iterator[RedisProcess]:
    server = RedisProcess(tmp_path, ("--maxmemory-policy", "noeviction"), "")
    server.start()
    yield server
    server.kill()


def test_a_file_beyond_its_time_is_a_miss_before_any_sweep_and_a_use_prolongs_it(tmp_path: Path) -> None:
    folder, names = Folder(tmp_path, ttl_s=100.0), names_of(12)
    for name in names:
        assert put_one(folder.tier, name)
    folder.age(names[0], 101)
    folder.age(names[1], 90)
    assert folder.tier.exists([name.key for name in names]) == [False, True, True]
    assert [got_one(folder.tier, name) for name in names] == [False, True, True]
    assert (folder.tier.status().corrupt, folder.tier.status().errors) == (0, 0)
    assert Path(folder.path_of(names[1])).stat().st_mtime > time.time() - 60, "it was used"
    folder.tier.sweep({})
    wait_until(lambda: not folder.has(names[0]))
    assert folder.has(names[1])
    assert folder.tier.status().evicted == 1
    folder.tier.close()


def test_without_a_time_no_age_ends_a_file(tmp_path: Path) -> None:
    folder, [name] = Folder(tmp_path), names_of(4)
    assert put_one(folder.tier, name)
    folder.age(name, 10**9)
    folder.tier.sweep({})
    assert got_one(folder.tier, name)
    folder.tier.close()


def test_a_sweep_of_one_node_at_a_time(tmp_path: Path) -> None:
    folder, [name] = Folder(tmp_path, ttl_s=100.0), names_of(4)
    assert put_one(folder.tier, name)
    folder.age(name, 200)
    (tmp_path / ".lock").touch()
    folder.tier.sweep({})
    folder.tier.close()
    assert folder.has(name)


@pytest.mark.redis
def test_redis_ends_a_value_by_itself_and_a_read_prolongs_it(redis: RedisProcess) -> None:
    tier, names = RedisTier(redis.url, LAYOUT, MAC_KEY, WAIT_S, FakeClock(), ttl_s=100.0), names_of(12)
    for name in names:
        assert put_one(tier, name)
    with redis.client() as client:
        assert all(90_000 < client.pttl(PREFIX + name.key) <= 100_000 for name in names)
        client.pexpire(PREFIX + names[0].key, 1)
        client.pexpire(PREFIX + names[1].key, 60_000)
        wait_until(lambda: not client.exists(PREFIX + names[0].key))
        assert [got_one(tier, name) for name in names] == [False, True, True]
        assert client.pttl(PREFIX + names[1].key) > 90_000
    assert tier.status().errors == 0
    tier.close()
    forever = RedisTier(redis.url, LAYOUT, MAC_KEY, WAIT_S, FakeClock())
    assert put_one(forever, names[2])
    assert got_one(forever, names[2])
    with redis.client() as client:
        assert client.pttl(PREFIX + names[2].key) == -1
    forever.close()


def test_a_full_folder_evicts_what_is_beyond_a_share_first(tmp_path: Path) -> None:
    folder, own, other = Folder(tmp_path, num_blocks=40), names_of(4 * 10), others(24)
    for age_s, name in enumerate([*own, *other]):
        assert put_one(folder.tier, name)
        folder.age(name, 1000 - age_s)
    folder.tier.sweep({digest_of(OTHER): 0.25})
    for name in names_of(4 * 8, first=5000):
        assert put_one(folder.tier, name)
    wait_until(lambda: sum(map(folder.has, other)) < 24)
    wait_until(lambda: not (tmp_path / ".lock").exists())
    assert all(map(folder.has, own)), "though they were not used for longest"
    kept = [folder.has(name) for name in other]
    assert kept == sorted(kept), "the oldest of the tenant go first"
    assert 10 <= sum(kept) < 24
    assert folder.tier.status().evicted == 24 - sum(kept)
    folder.tier.close()


def test_a_folder_with_room_evicts_nothing(tmp_path: Path) -> None:
    folder, other = Folder(tmp_path, num_blocks=1000), others(24)
    for name in other:
        assert put_one(folder.tier, name)
    folder.tier.sweep({digest_of(OTHER): 0.001})
    folder.tier.close()
    assert all(map(folder.has, other))


@pytest.mark.redis
@pytest.mark.parametrize("is_full", [True, False])
def test_redis_is_held_to_shares_where_little_room_is_left(redis: RedisProcess, is_full: bool) -> None:
    tier = RedisTier(redis.url, LAYOUT, MAC_KEY, WAIT_S, FakeClock())
    own, other = names_of(4 * 10), others(100)
    for name in [*own, *other]:
        assert put_one(tier, name)
    with redis.client() as client:
        used = client.info("memory")["used_memory"]
        client.config_set("maxmemory", int(used * (1.05 if is_full else 2)))
        share = 20.5 * FRAME_BYTES / client.info("memory")["maxmemory"]
    tier.sweep({digest_of(OTHER): share})
    assert sum(tier.exists([name.key for name in other])) == (20 if is_full else 100)
    assert all(tier.exists([name.key for name in own]))
    assert tier.status().evicted == (80 if is_full else 0)
    tier.close()


@pytest.mark.redis
def test_a_sweep_of_a_server_that_is_away_is_an_error_that_harms_no_writer(redis: RedisProcess) -> None:
    tier, directory = RedisTier(redis.url, LAYOUT, MAC_KEY, WAIT_S), Directory(4)
    redis.kill()
    with pytest.raises(StoreError):
        tier.sweep({digest_of(OTHER): 0.5})
    directory.records.set_shares({(digest_of(OTHER),): 0.5})
    writer = ColdWriter(LAYOUT, Arena.anonymous(LAYOUT.block_bytes, 4), directory, tier, interval_s=0.01)
    writer.start()
    wait_until(lambda: directory.records.status().cold)
    writer.stop()
    tier.close()


def test_a_writer_holds_its_tier_to_the_shares_of_the_arena(tmp_path: Path) -> None:
    folder, other = Folder(tmp_path, num_blocks=20), others(20)
    for name in other:
        assert put_one(folder.tier, name)
    directory = Directory(4, writes={folder.tier.tier: Write.ALL})
    directory.records.set_shares({(digest_of(OTHER),): 0.25})
    writer = ColdWriter(LAYOUT, Arena.anonymous(LAYOUT.block_bytes, 4), directory, folder.tier)
    writer.start()
    wait_until(lambda: sum(map(folder.has, other)) < 20)
    writer.stop()
    folder.tier.close()
