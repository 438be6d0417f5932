"""The node's service: owns the arena, keeps its directory for all processes of the node, writes cold blocks away."""

import asyncio
from contextlib import ExitStack

from deploy.plan.cluster_plan import NodeConfig
from kv_store.node.arena import Arena
from kv_store.node.cold_writer import ColdWriter
from kv_store.node.directory import Directory
from kv_store.node.directory_server import DirectoryServer
from kv_store.tiers.redis_tier import RedisTier
from wire.settings import from_json


class NodeActor:
    """The service of a node, started once. It removes the arena of an earlier, dead service, and the arena's memory."""

    def __init__(self, config_json: str) -> None:
        """Raises ConfigError."""
        self._config = from_json(NodeConfig, config_json, "node")
        self._parts = ExitStack()

    async def start(self) -> str:
        """Makes the arena, which takes seconds where it is large, and serves. Returns `{}`. Raises ConfigError."""
        self._parts = await asyncio.to_thread(_make, self._config)
        return "{}"

    async def stop(self) -> str:
        """Removes the arena's file; processes that have it mapped keep it until they end. Returns `{}`."""
        await asyncio.to_thread(self._parts.close)
        return "{}"


def _make(config: NodeConfig) -> ExitStack:
    layout, store = config.layout, config.store
    Arena.discard(config.arena_path)
    with ExitStack() as parts:
        arena = Arena.create(config.arena_path, layout.block_bytes, config.num_slots)
        parts.callback(arena.close)
        parts.callback(arena.unlink)
        directory = Directory(config.num_slots, arena_path=config.arena_path, block_bytes=layout.block_bytes)
        server = DirectoryServer(directory, store.directory_path)
        server.start()
        parts.callback(server.stop)
        if store.redis_url:
            cold = RedisTier(store.redis_url, layout, store.redis_timeout_s)
            parts.callback(cold.close)
            writer = ColdWriter(layout, arena, directory, cold)
            writer.start()
            parts.callback(writer.stop)
        return parts.pop_all()
