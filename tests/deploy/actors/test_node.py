import asyncio
import json
import mmap
import os
import shutil
import socket
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from deploy.actors import node as node_module
from deploy.actors.node import NodeActor
from deploy.plan.cluster_plan import NodeConfig
from kv_store.node.arena import Arena
from kv_store.node.directory_client import DirectoryClient
from kv_store.node.messages import Hold
from kv_store.node_store import NodeStore
from kv_store.peers.block_reader import BlockReader
from kv_store.tiers.cold_tiers import open_tiers
from tests.harness.served import served_model
from tests.kv_store.names import LAYOUT, committed, got_one, names_of
from tests.kv_store.pools import filled_pool, pages_from
from wire.block_names import BlockName, cover
from wire.errors import ConfigError, Unavailable
from wire.ids import AttemptId, NamespaceRoot
from wire.pools import Shares
from wire.tier import ColdSettings, Tier, Write
from wire.typed_reader import to_json
from worker.config import StoreSettings

NO_SHARES = to_json(Shares({}))
NUM_SLOTS = 16
WAIT_S = 20.0


@pytest.fixture
def config(tmp_path: Path) -> Iterator[NodeConfig]:
    arena = Path(f"/dev/shm/baton-test-node-{os.getpid()}")
    socket = str(tmp_path / "directory.sock")
    yield NodeConfig(
        store=StoreSettings(socket, "00" * 32),
        arena_path=str(arena),
        model=served_model(LAYOUT, folder="/"),
        num_slots=NUM_SLOTS,
    )
    arena.unlink(missing_ok=True)


def test_a_node_serves_its_arena_and_takes_it_away(config: NodeConfig) -> None:
    node = NodeActor(to_json(config))
    assert not any(json.loads(asyncio.run(node.start())).values())
    client = DirectoryClient(config.store.directory_path)
    assert client.attach().arena_path == config.arena_path
    client.close()
    asyncio.run(node.stop())
    assert not os.path.exists(config.arena_path)
    assert not os.path.exists(config.store.directory_path)


async def test_a_node_at_work_keeps_its_files_young(config: NodeConfig) -> None:
    """Cleaners of /tmp go by these times."""
    folder = Path(config.store.directory_path).parent
    node = NodeActor(to_json(config))
    await node.start()
    paths = folder, Path(config.store.directory_path), Path(config.arena_path)
    for path in paths:
        os.utime(path, (0, 0))
    async with asyncio.timeout(WAIT_S):
        while not all(os.stat(path).st_mtime for path in paths):  # noqa: ASYNC110
            await asyncio.sleep(0.05)
    await node.stop()


def test_a_node_of_several_lets_others_read_its_arena_and_takes_its_folder_away(config: NodeConfig) -> None:
    socket_path = Path(config.store.directory_path).parent / "own" / "d.sock"
    store = replace(config.store, directory_path=str(socket_path))
    node = NodeActor(to_json(replace(config, store=store, block_address="127.0.0.1:0", token="t")))
    address = json.loads(asyncio.run(node.start()))["public"]
    reader = BlockReader(address, LAYOUT.payload_bytes, b"t", timeout_s=5.0)
    assert reader.exists([names_of(12)[0].key]) == [False]
    assert reader.status().errors == 0
    reader.close()
    asyncio.run(node.stop())
    assert not socket_path.parent.exists()
    assert reader.exists([names_of(12)[0].key]) == [False]
    assert reader.status().errors == 1, "nothing listens"


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"model": served_model(LAYOUT, folder="/nowhere")}, "has no model folder /nowhere"),
        ({"block_address": "192.0.2.9:0"}, "block port"),
    ],
)
def test_a_node_that_cannot_host_workers_says_why_and_leaves_no_arena(
    config: NodeConfig, changes: dict[str, Any], reason: str
) -> None:
    with pytest.raises(ConfigError, match=reason):
        asyncio.run(NodeActor(to_json(replace(config, **changes))).start())
    assert not os.path.exists(config.arena_path)


def plant_link(folder: Path) -> None:
    (folder.parent / "elsewhere").mkdir(mode=0o700)
    folder.symlink_to(folder.parent / "elsewhere")


def plant_open_folder(folder: Path) -> None:
    folder.mkdir()
    folder.chmod(0o777)


@pytest.mark.parametrize("plant", [plant_link, plant_open_folder])
def test_a_folder_that_others_can_get_into_is_refused(config: NodeConfig, plant: Callable[[Path], None]) -> None:
    folder = Path(config.store.directory_path).parent / "planted"
    plant(folder)
    store = replace(config.store, directory_path=str(folder / "directory.sock"))
    with pytest.raises(ConfigError, match="a link, or open to other users: remove it"):
        asyncio.run(NodeActor(to_json(replace(config, store=store))).start())
    assert not os.path.exists(config.arena_path)


def test_a_later_node_gets_the_memory_of_a_dead_one_that_workers_still_map(config: NodeConfig) -> None:
    Arena.create(config.arena_path, LAYOUT.block_bytes, NUM_SLOTS).close()
    mapped = Arena.open(config.arena_path)
    node = NodeActor(to_json(config))
    with open(config.arena_path, "rb") as file:
        asyncio.run(node.start())
        assert os.fstat(file.fileno()).st_blocks == 0
    asyncio.run(node.stop())
    mapped.close()


def test_a_node_that_cannot_serve_leaves_no_arena(config: NodeConfig) -> None:
    Path(config.store.directory_path).mkdir()
    node = NodeActor(to_json(config))
    with pytest.raises(ConfigError):
        asyncio.run(node.start())
    assert not os.path.exists(config.arena_path)


def overwrite_last_page(config: NodeConfig) -> None:
    with open(config.arena_path, "r+b") as file:
        file.seek(-mmap.PAGESIZE + 3, os.SEEK_END)
        file.write(b"?")


def cut_and_grow(config: NodeConfig) -> None:
    size = os.stat(config.arena_path).st_size
    os.truncate(config.arena_path, 0)
    os.truncate(config.arena_path, size)


def replace_by_copy(config: NodeConfig) -> None:
    copy = f"{config.arena_path}-copy"
    shutil.copyfile(config.arena_path, copy)
    os.rename(copy, config.arena_path)


def replace_by_pipe(config: NodeConfig) -> None:
    os.unlink(config.arena_path)
    os.mkfifo(config.arena_path)


def replace_socket(config: NodeConfig) -> None:
    os.unlink(config.store.directory_path)
    with socket.socket(socket.AF_UNIX) as other:
        other.bind(config.store.directory_path)


DAMAGE: dict[str, Callable[[NodeConfig], None]] = {
    "a byte of the last page": overwrite_last_page,
    "cut by a page": lambda config: os.truncate(config.arena_path, os.stat(config.arena_path).st_size - mmap.PAGESIZE),
    "emptied": lambda config: os.truncate(config.arena_path, 0),
    "emptied and as long as before": cut_and_grow,
    "longer": lambda config: os.truncate(config.arena_path, os.stat(config.arena_path).st_size + mmap.PAGESIZE),
    "removed": lambda config: os.unlink(config.arena_path),
    "a copy in its place": replace_by_copy,
    "a pipe in its place": replace_by_pipe,
    "no socket": lambda config: os.unlink(config.store.directory_path),
    "another socket": replace_socket,
}


def publish(store: NodeStore, names: list[BlockName]) -> int:
    return store.write_through(names, pages_from(0, len(names)), None)


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
async def test_a_node_whose_files_are_damaged_ends_and_the_next_one_has_new_ones(
    config: NodeConfig, monkeypatch: pytest.MonkeyPatch, damage: Callable[[NodeConfig], None]
) -> None:
    """A store that maps the old arena reads nothing from it and goes on with the new one; the old memory is free."""
    ended = asyncio.Event()
    monkeypatch.setattr(os, "_exit", lambda code: ended.set())
    monkeypatch.setattr(node_module, "LOOK_EVERY_S", 0.01)
    names = names_of(12)
    first, second = NodeActor(to_json(config)), NodeActor(to_json(config))
    await first.start()
    client = DirectoryClient(config.store.directory_path)
    store = NodeStore(LAYOUT, Arena.open(config.arena_path), client, [], filled_pool(names))
    assert publish(store, names) == 3
    old = os.open(config.arena_path, os.O_RDONLY)
    damage(config)
    async with asyncio.timeout(WAIT_S):
        await ended.wait()
    assert os.fstat(old).st_blocks == 0
    os.close(old)
    await second.start()
    assert store.fetch(names, pages_from(40, 3)).tiers == []
    assert store.fetch(names, pages_from(40, 3)).tiers == []
    assert publish(store, names) == 3
    assert store.fetch(names, pages_from(40, 3)).tiers == [Tier.HOST] * 3
    assert Arena.open(config.arena_path).num_slots == NUM_SLOTS
    client.close()
    await second.stop()
    assert Arena.identity(config.arena_path) is None


async def test_a_node_at_work_does_not_take_its_own_files_for_damaged(
    config: NodeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "_exit", lambda code: pytest.fail("the node has ended itself"))
    monkeypatch.setattr(node_module, "LOOK_EVERY_S", 0.001)
    node = NodeActor(to_json(config))
    await node.start()
    client = DirectoryClient(config.store.directory_path)
    store = NodeStore(LAYOUT, Arena.open(config.arena_path), client, [], filled_pool([]))
    for number in range(20):
        assert publish(store, names_of(NUM_SLOTS * LAYOUT.block_size, first=1000 * number)) == NUM_SLOTS
        await asyncio.sleep(0.001)
    client.close()
    await node.stop()
    await asyncio.sleep(0.01)


async def test_what_a_node_had_is_found_in_files_by_the_next_one(config: NodeConfig, tmp_path: Path) -> None:
    """A stop writes the blocks that were not yet written."""
    files = ColdSettings(
        tier=Tier.FILES, place=str(tmp_path / "kv"), write=Write.ALL, timeout_s=WAIT_S, max_bytes=64 << 20
    )
    config = replace(config, store=replace(config.store, cold=(files,)))
    names = names_of(NUM_SLOTS * LAYOUT.block_size)
    for expected in ([], [Tier.FILES] * NUM_SLOTS):
        node = NodeActor(to_json(config))
        await node.start()
        client = DirectoryClient(config.store.directory_path, timeout_s=WAIT_S)
        cold = open_tiers(config.store.cold, LAYOUT, config.store.mac_key)
        store = NodeStore(LAYOUT, Arena.open(config.arena_path), client, cold, filled_pool(names))
        reading = await asyncio.to_thread(store.fetch, names, pages_from(NUM_SLOTS, NUM_SLOTS))
        assert reading.tiers == expected
        assert await asyncio.to_thread(publish, store, names) == NUM_SLOTS
        await node.stop()
        client.close()
        for tier in cold:
            tier.close()
    other = open_tiers(config.store.cold, LAYOUT, b"o" * 32)[0]
    assert not got_one(other, names[0]), "under another secret it is a forgery"
    other.close()


def test_a_node_whose_folder_takes_no_files_says_so(config: NodeConfig, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    files = ColdSettings(
        tier=Tier.FILES, place=str(tmp_path / "file"), write=Write.ALL, timeout_s=WAIT_S, max_bytes=64 << 20
    )
    node = NodeActor(to_json(replace(config, store=replace(config.store, cold=(files,)))))
    with pytest.raises(ConfigError, match=r"files\.folder"):
        asyncio.run(node.start())
    assert not os.path.exists(config.arena_path)


def test_a_node_whose_port_is_taken_takes_another_one(config: NodeConfig) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        taken = "{}:{}".format(*other.getsockname())
        node = NodeActor(to_json(replace(config, block_address=taken, token="t")))
        address = json.loads(asyncio.run(node.start()))["public"]
        assert address.startswith("127.0.0.1:")
        assert address != taken
        reader = BlockReader(address, LAYOUT.payload_bytes, b"t", timeout_s=5.0)
        assert reader.exists([names_of(12)[0].key]) == [False]
        assert reader.status().errors == 0
        reader.close()
        asyncio.run(node.stop())


async def test_a_node_that_drains_waits_for_its_holds(config: NodeConfig) -> None:
    node = NodeActor(to_json(config))
    with pytest.raises(Unavailable):
        await node.drain(1)
    await node.start()
    client = DirectoryClient(config.store.directory_path)
    names = names_of(12)
    hold = Hold(AttemptId("r"), 60.0)
    client.commit("w", committed(client.reserve("w", names, hold).slots, names), hold)
    assert json.loads(await node.drain(0)) == {"unfinished": 0, "unfetched": 1, "unwritten": 0}
    draining = asyncio.create_task(node.drain(20))
    client.release_holds([AttemptId("r")])
    assert json.loads(await draining) == {"unfinished": 0, "unfetched": 0, "unwritten": 0}
    client.close()
    await node.stop()


async def test_a_node_that_drains_has_copies_made_of_what_only_it_has(config: NodeConfig, tmp_path: Path) -> None:
    cold = ColdSettings(
        tier=Tier.FILES, place=str(tmp_path / "files"), write=Write.REUSED, timeout_s=5.0, max_bytes=1 << 30
    )
    config = replace(config, store=replace(config.store, cold=(cold,)))
    node = NodeActor(to_json(config))
    await node.start()
    client = DirectoryClient(config.store.directory_path)
    names = names_of(NUM_SLOTS * LAYOUT.block_size)
    assert publish(NodeStore(LAYOUT, Arena.open(config.arena_path), client, [], filled_pool(names)), names) == NUM_SLOTS
    assert json.loads(await node.drain(20)) == {"unfinished": 0, "unfetched": 0, "unwritten": 0}
    [files] = open_tiers(config.store.cold, LAYOUT, config.store.mac_key)
    assert files.exists([name.key for name in names]) == [True] * NUM_SLOTS
    files.close()
    client.close()
    await node.stop()


async def test_shares_of_its_arena_are_set_at_the_start_and_later(config: NodeConfig) -> None:
    root = names_of(4)[0].root_digest
    node = NodeActor(to_json(replace(config, shares={root.hex(): 0.25})))
    with pytest.raises(Unavailable):
        await node.set_shares(NO_SHARES)
    await node.start()
    client = DirectoryClient(config.store.directory_path)
    assert num_kept(client) == 8, "beyond a quarter of 16 slots its own go first"
    await node.set_shares(NO_SHARES)
    assert num_kept(client, first=5000) == 4, "without a share the oldest of all go"
    client.close()
    await node.stop()


def num_kept(client: DirectoryClient, first: int = 1000) -> int:
    """Publishes 8 blocks of another namespace, then 12 of this one; counts the other's that are found afterwards."""
    other, own = cover(NamespaceRoot(b"o" * 32), range(first, first + 32), 4), names_of(48, first)
    for names in (other, own[:8], own[8:]):
        client.commit("w", committed(client.reserve("w", names, None).slots, names), None)
    assert client.records.check() == []
    return sum(client.records.exists([name.key for name in other]))
