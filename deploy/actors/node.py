"""The node's service: owns the arena, keeps its directory for the node's processes, writes blocks to cold tiers."""

import asyncio
import logging
import os
from contextlib import ExitStack

from deploy.plan.cluster_plan import NodeConfig
from kv_store.node.arena import Arena
from kv_store.node.cold_writer import ColdWriter
from kv_store.node.directory import Directory
from kv_store.node.directory_server import DirectoryServer
from kv_store.tiers.cold_tiers import open_tiers
from wire.settings import from_json

LOOK_EVERY_S = 1.0
FINISH_S = 3.0
"""For blocks that are not yet written to a cold tier when the service stops."""

log = logging.getLogger(__name__)


class NodeActor:
    """The service of a node, started once. It removes the arena of an earlier, dead service, and the arena's memory.

    It ends its process once the arena's file or the directory's socket is not the one that it made: no worker could
    start any more. The controller makes another service, with new files and a new epoch.
    """

    def __init__(self, config_json: str) -> None:
        """Raises ConfigError."""
        self._config = from_json(NodeConfig, config_json, "node")
        self._parts = ExitStack()
        self._watch: asyncio.Task[None] | None = None

    async def start(self) -> str:
        """Makes the arena, which takes seconds where it is large, and serves. Returns `{}`. Raises ConfigError."""
        self._parts = await asyncio.to_thread(_make, self._config)
        self._watch = asyncio.create_task(self._end_unless_found(_files(self._config)))
        return "{}"

    async def stop(self) -> str:
        """Removes the arena's file and frees its memory; processes that map it read zeros. Returns `{}`."""
        if self._watch is not None:
            self._watch.cancel()
        await asyncio.to_thread(self._parts.close)
        return "{}"

    async def _end_unless_found(self, made: object) -> None:
        while _files(self._config) == made:  # noqa: ASYNC110
            await asyncio.sleep(LOOK_EVERY_S)
        log.critical("the arena's file or the directory's socket is damaged: the node's service ends, for a new one")
        try:
            await asyncio.to_thread(self._parts.close)
        finally:
            os._exit(1)


def _files(config: NodeConfig) -> tuple[object, int | None]:
    """Identifies the files by which other processes find this service."""
    socket = config.store.directory_path
    return Arena.identity(config.arena_path), os.stat(socket).st_ino if os.path.exists(socket) else None


def _make(config: NodeConfig) -> ExitStack:
    layout, store = config.layout, config.store
    Arena.discard(config.arena_path)
    with ExitStack() as parts:
        arena = Arena.create(config.arena_path, layout.block_bytes, config.num_slots)
        parts.callback(arena.close)
        parts.callback(arena.unlink)
        writes = {one.tier: one.write for one in store.cold}
        directory = Directory(
            config.num_slots, arena_path=config.arena_path, block_bytes=layout.block_bytes, writes=writes
        )
        server = DirectoryServer(directory, store.directory_path)
        server.start()
        parts.callback(server.stop)
        writers = []
        for cold in open_tiers(store.cold, layout, store.mac_key):
            parts.callback(cold.close)
            writers.append(ColdWriter(layout, arena, directory, cold))
            writers[-1].start()
            parts.callback(writers[-1].stop)
        for writer in writers:  # called before all stops, so that they finish side by side
            parts.callback(writer.finish, FINISH_S)
        return parts.pop_all()
