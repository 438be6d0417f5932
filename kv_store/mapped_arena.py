"""The arena of a node as one of its processes sees it, with the directory behind it."""

import logging
from collections.abc import Callable
from typing import TypeVar

from kv_store.node.arena import Arena
from kv_store.node.directory_port import Block, DirectoryPort, EpochChanged
from wire.errors import ConfigError, StoreError
from wire.ids import SlotId
from wire.layout import KVLayout

T = TypeVar("T")

log = logging.getLogger(__name__)


class MappedArena:
    """The mapping of a node's arena, replaced after a restart of its directory.

    num_failed: calls that failed, as the directory was out of reach or had restarted. num_corrupt: blocks rejected for
    a wrong checksum.
    """

    def __init__(self, layout: KVLayout, arena: Arena, directory: DirectoryPort) -> None:
        if arena.block_bytes != layout.block_bytes:
            raise ConfigError(f"an arena of {arena.block_bytes}-byte slots for blocks of {layout.block_bytes} bytes")
        self.directory = directory
        self.num_failed = self.num_corrupt = 0
        self._arena = arena
        self._is_stale = self._is_unreachable = False
        self._scratch = memoryview(bytearray(layout.payload_bytes))

    @property
    def block_bytes(self) -> int:
        return self._arena.block_bytes

    def attach(self) -> None:
        """Maps the new arena if the directory has restarted. Call it before any use of a slot. Raises StoreError."""
        if not self._is_stale:
            return
        arena = Arena.open(self.directory.attach().arena_path)
        if arena.block_bytes != self.block_bytes:
            arena.close()
            raise StoreError(f"the new arena has slots of {arena.block_bytes} bytes")
        self._arena.close()
        self._arena = arena
        self._is_stale = False

    def payload(self, slot: SlotId | None) -> memoryview:
        """Views the payload of a slot; of None, memory for one block at a time."""
        return self._scratch if slot is None else self._arena.slot(slot)[: len(self._scratch)]

    def reject(self, block: Block) -> None:
        """Takes a block out of the index whose bytes are not the ones that were written."""
        self.num_corrupt += 1
        log.warning("slot %d of the arena does not hold what was written there: its block is rejected", block.slot)
        self.directory.reject([block])

    def or_else(self, otherwise: T, action: Callable[[], T]) -> T:
        """Runs an action; returns `otherwise` and counts a failure if the directory is out of reach."""
        try:
            answer = action()
        except EpochChanged:
            log.warning("the arena's directory has restarted: what was in it is lost")
            self._is_stale = True
        except StoreError as error:
            if not self._is_unreachable:
                log.warning("the host tier is passed over: %s", error)
            self._is_unreachable = True
        else:
            self._is_unreachable = False
            return answer
        self.num_failed += 1
        return otherwise
