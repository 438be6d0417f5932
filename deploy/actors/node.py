"""The node's service: owns the arena, serves its directory to the node's processes, writes blocks to cold tiers."""

import asyncio
import logging
import os
import socket
import stat
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from pathlib import Path

from deploy.plan.cluster_plan import NodeConfig
from kv_store.eviction.hit_density import HitDensity
from kv_store.eviction.order import EvictionOrder, StartFirst
from kv_store.eviction.policy import LeastRecentlyUsed
from kv_store.node.arena import Arena
from kv_store.node.directory import Directory
from kv_store.node.directory_server import DirectoryServer
from kv_store.peers.block_server import BlockServer
from kv_store.tiers.cold_tiers import open_tiers
from kv_store.tiers.cold_writer import ColdWriter
from wire.errors import ConfigError, Unavailable
from wire.pools import Addresses, Drained, Shares
from wire.typed_reader import from_json, to_json

LOOK_EVERY_S = 1.0
DRAIN_EVERY_S = 0.1
FINISH_S = 3.0
"""Time for blocks that are not yet written to a cold tier when the service stops."""

log = logging.getLogger(__name__)


class NodeActor:
    """The service of a node, started once. It removes the arena of an earlier, dead service, with its memory.

    Ends its process once its arena's file or its directory's socket was replaced, for no worker could start any more.
    The controller then makes a new service, with new files and a new epoch.
    """

    def __init__(self, config_json: str) -> None:
        """Raises ConfigError."""
        self._config = from_json(NodeConfig, config_json, "node")
        self._parts = ExitStack()
        self._directory: Directory | None = None
        self._watch: asyncio.Task[None] | None = None

    async def start(self) -> str:
        """Makes the arena, which takes seconds if it is large, and serves. Returns its Addresses.

        The Addresses are empty if no other node reads the arena. Raises ConfigError.
        """
        self._parts, self._directory, address = await asyncio.to_thread(_make, self._config)
        self._watch = asyncio.create_task(self._end_unless_found(_files(self._config)))
        return to_json(Addresses(address))

    async def drain(self, grace_s: int) -> str:
        """Waits until no request holds blocks here, and each block has a copy in a cold tier, if there is such a tier.

        Returns Drained, at the end of the grace at the latest. Raises Unavailable before the start.
        """
        if self._directory is None:
            raise Unavailable("the node's service has not started")
        with suppress(TimeoutError):
            async with asyncio.timeout(grace_s):
                while self._left(self._directory) != Drained():  # noqa: ASYNC110
                    await asyncio.sleep(DRAIN_EVERY_S)
        return to_json(self._left(self._directory))

    async def set_shares(self, shares_json: str) -> None:
        """Bounds the slots of tenants by Shares."""
        if self._directory is None:
            raise Unavailable("the node's service has not started")
        shares = from_json(Shares, shares_json, "shares")
        await asyncio.to_thread(self._directory.records.set_shares, _by_digest(shares.by_digest))

    def _left(self, directory: Directory) -> Drained:
        return Drained(
            0, directory.records.status().num_holds, directory.records.leave() if self._config.store.cold else 0
        )

    async def stop(self) -> None:
        """Removes the arena's file and frees its memory; processes that map it read zeros."""
        if self._watch is not None:
            self._watch.cancel()
        await asyncio.to_thread(self._parts.close)

    async def _end_unless_found(self, made: object) -> None:
        while _files(self._config) == made:  # noqa: ASYNC110
            await asyncio.sleep(LOOK_EVERY_S)
        log.critical("the arena's file or the directory's socket is damaged: the node's service ends, for a new one")
        try:
            await asyncio.to_thread(self._parts.close)
        finally:
            os._exit(1)


def _files(config: NodeConfig) -> tuple[object, int | None]:
    """Identifies the files by which other processes find this service; renews their times for cleaners of /tmp."""
    path = config.store.directory_path
    for file in (os.path.dirname(path), path, config.arena_path):
        with suppress(OSError):
            os.utime(file)
    return Arena.identity(config.arena_path), os.stat(path).st_ino if os.path.exists(path) else None


def _require_own(folder: Path) -> None:
    """Raises ConfigError for a folder that other users can enter, or that is a link."""
    found = os.lstat(folder)
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o077:
        problem = f"the node's folder {folder} is a link, or open to other users"
        raise ConfigError(f"{problem}: remove it on {socket.gethostname()}")


def _make(config: NodeConfig) -> tuple[ExitStack, Directory, str]:
    """Makes the service's parts; returns the parts to close, the directory, and the block port's address."""
    layout, store = config.model.layout, config.store
    if not Path(config.model.folder).is_dir():
        raise ConfigError(f"the node at {socket.gethostname()} has no model folder {config.model.folder}")
    folder = Path(store.directory_path).parent
    folder.mkdir(mode=0o700, exist_ok=True)
    _require_own(folder)
    Arena.discard(config.arena_path)
    with ExitStack() as parts:
        parts.callback(_remove, folder)
        arena = Arena.create(config.arena_path, layout.block_bytes, config.num_slots)
        parts.callback(arena.close)
        parts.callback(arena.unlink)
        writes = {one.tier: one.write for one in store.cold}
        directory = Directory(
            config.num_slots,
            arena_path=config.arena_path,
            block_bytes=layout.block_bytes,
            order=EvictionOrder if layout.window is None else StartFirst,
            policy=HitDensity if layout.window is None else LeastRecentlyUsed,
            writes=writes,
            keeps=config.keeps,
        )
        directory.records.set_shares(_by_digest(config.shares))
        server = DirectoryServer(directory, store.directory_path)
        server.start()
        parts.callback(server.stop)
        writers = []
        for cold in open_tiers(store.cold, layout, store.mac_key):
            parts.callback(cold.close)
            writers.append(ColdWriter(layout, arena, directory, cold))
            writers[-1].start()
            parts.callback(writers[-1].stop)
        block_address = ""
        if config.block_address:
            blocks = BlockServer(directory, arena, layout.payload_bytes, config.token.encode(), config.identity)
            block_address = _listen(blocks, config.block_address)
            parts.callback(blocks.stop)
        parts.callback(Path(config.arena_path).unlink, missing_ok=True)  # early: a slow tier may outlast the patience
        for writer in writers:  # called before all stops, so that they finish side by side
            parts.callback(writer.finish, FINISH_S)
        return parts.pop_all(), directory, block_address


def _by_digest(shares: Mapping[str, float]) -> dict[tuple[bytes, ...], float]:
    return {tuple(map(bytes.fromhex, digests.split(","))): share for digests, share in shares.items()}


def _remove(folder: Path) -> None:
    """Removes the folder of the directory's socket, unless it holds other things."""
    with suppress(OSError):
        folder.rmdir()


def _listen(blocks: BlockServer, address: str) -> str:
    """Listens at an earlier service's address, or at a free port of its host if that port is taken by now."""
    host, _, port = address.rpartition(":")
    try:
        try:
            return blocks.start(host, int(port))
        except OSError as error:
            log.warning("the block port %s cannot be had (%s): any free one is taken", address, error.strerror)
            return blocks.start(host)
    except OSError as error:
        raise ConfigError(f"the block port {address} cannot be had: {error.strerror}") from error
