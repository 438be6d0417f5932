"""The node's service: owns the arena, keeps its books for all processes of the node, writes cold blocks to Redis."""

import asyncio
import json
from dataclasses import dataclass

from deploy.node_config import NodeConfig
from kv_store.node.arena import Arena
from kv_store.node.cold_writer import ColdWriter
from kv_store.node.directory import Directory
from kv_store.node.directory_server import DirectoryServer
from kv_store.tiers.redis_tier import RedisTier
from wire.settings import from_json


@dataclass(frozen=True)
class _Parts:
    arena: Arena
    server: DirectoryServer
    cold: RedisTier | None
    writer: ColdWriter | None


class NodeActor:
    """Started once. An arena of that path is an earlier service's, which is dead: it goes, and its memory too."""

    def __init__(self, config_json: str) -> None:
        """Raises ConfigError."""
        self._config = from_json(NodeConfig, config_json, "node")
        self._parts: _Parts | None = None
        self._num_bytes_done = 0

    async def start(self) -> str:
        """Makes the arena, which takes seconds where it is large, and serves. Returns `{}`. Raises ConfigError."""
        self._parts = await asyncio.to_thread(self._make)
        return "{}"

    async def progress(self) -> str:
        """Returns `{"done_bytes"}`, of the arena."""
        return json.dumps({"done_bytes": self._num_bytes_done})

    async def stop(self) -> str:
        """Removes the arena's file; who has it mapped keeps it until it ends. Returns `{}`."""
        if self._parts is not None:
            await asyncio.to_thread(_unmake, self._parts)
        return "{}"

    def _make(self) -> _Parts:
        config, layout = self._config, self._config.layout
        Arena.discard(config.arena_path)
        cold = RedisTier(config.redis_url, layout, config.redis_timeout_s) if config.redis_url else None
        arena = Arena.create(config.arena_path, layout.block_bytes, config.num_slots, self._note_progress)
        directory = Directory(config.num_slots, arena_path=config.arena_path, block_bytes=layout.block_bytes)
        server = DirectoryServer(directory, config.directory_path)
        try:
            server.start()
        except BaseException:
            _remove(arena)
            raise
        writer = ColdWriter(layout, arena, directory, cold) if cold else None
        if writer is not None:
            writer.start()
        return _Parts(arena, server, cold, writer)

    def _note_progress(self, done_bytes: int, _total_bytes: int) -> None:
        self._num_bytes_done = done_bytes


def _unmake(parts: _Parts) -> None:
    if parts.writer is not None:
        parts.writer.stop()
    if parts.cold is not None:
        parts.cold.close()
    parts.server.stop()
    _remove(parts.arena)


def _remove(arena: Arena) -> None:
    arena.unlink()
    arena.close()
