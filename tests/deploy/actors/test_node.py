import asyncio
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from deploy.actors.node import NodeActor
from deploy.plan.cluster_plan import NodeConfig
from kv_store.node.arena import Arena
from kv_store.node.directory_client import DirectoryClient
from tests.kv_store.names import LAYOUT
from wire.errors import ConfigError
from wire.settings import to_json
from worker.config import StoreSettings

NUM_SLOTS = 16


@pytest.fixture
def config(tmp_path: Path) -> Iterator[NodeConfig]:
    arena = Path(f"/dev/shm/baton-test-node-{os.getpid()}")
    socket = str(tmp_path / "directory.sock")
    yield NodeConfig(StoreSettings(socket, None, 0.1), str(arena), LAYOUT.encode().hex(), NUM_SLOTS)
    arena.unlink(missing_ok=True)


def test_a_node_serves_its_arena_and_takes_it_away(config: NodeConfig) -> None:
    node = NodeActor(to_json(config))
    assert asyncio.run(node.start()) == "{}"
    client = DirectoryClient(config.store.directory_path)
    assert client.info().arena_path == config.arena_path
    client.close()
    asyncio.run(node.stop())
    assert not os.path.exists(config.arena_path)
    assert not os.path.exists(config.store.directory_path)


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
