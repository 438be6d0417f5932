"""The writer of blocks from the arena to a cold tier, in the background of the node's service."""

import logging
import threading
import time
from collections.abc import Sequence
from contextlib import suppress

from kv_store.node.arena import Arena
from kv_store.node.directory import Directory
from kv_store.tiers.cold_tier import ColdTier
from wire.errors import StoreError
from wire.ids import BlockKey
from wire.layout import KVLayout

_LEASE_TTL_S = 10.0
_JOIN_TIMEOUT_S = 10.0
_SWEEP_EVERY_S = 60.0
_NO_BLOCK = BlockKey(bytes(32))

log = logging.getLogger(__name__)


class ColdWriter:
    """The writer's thread, between `start` and `stop`. It asks the directory for a few blocks at a time."""

    def __init__(
        self,
        layout: KVLayout,
        arena: Arena,
        directory: Directory,
        cold: ColdTier,
        max_blocks: int = 32,
        interval_s: float = 0.1,
    ) -> None:
        self._payload_bytes = layout.payload_bytes
        self._arena = arena
        self._directory = directory
        self._cold = cold
        self._max_blocks = max_blocks
        self._interval_s = interval_s
        self._is_stopping = threading.Event()
        self._end = 0.0
        self._next_sweep = 0.0
        self._thread = threading.Thread(target=self._run, name="cold-writer", daemon=True)

    @property
    def is_stopping(self) -> bool:
        return self._is_stopping.is_set()

    @property
    def _is_over(self) -> bool:
        return self.is_stopping and time.monotonic() >= self._end

    def start(self) -> None:
        self._thread.start()

    def finish(self, grace_s: float) -> None:
        """Ends the thread after the rest is written, or after `grace_s` seconds. Does not block."""
        self._end = time.monotonic() + grace_s
        self._is_stopping.set()

    def stop(self) -> None:
        """Stops the thread after the current block; after `finish`, at the end of that."""
        if not self.is_stopping:
            self.finish(0.0)
        if self._thread.is_alive():
            self._thread.join(_JOIN_TIMEOUT_S)

    def write_some(self) -> int:
        """Writes blocks that the directory offers, up to the first failure; reports to it and counts them.

        Without blocks it probes a broken tier, by a key that no block has.
        """
        self._directory.records.mark_cold(self._cold.tier, [], self._cold.take_lost())
        batch = self._directory.lease_cold(self._cold.tier, self._max_blocks, _LEASE_TTL_S)
        written: list[BlockKey] = []
        until = time.monotonic() + _LEASE_TTL_S / 2
        try:
            if not batch.blocks and self._cold.status().state == "broken":
                self._cold.exists([_NO_BLOCK])
            for block in batch.blocks:
                payload = self._arena.slot(block.slot)[: self._payload_bytes]
                if self._is_over or time.monotonic() > until or not self._cold.put(block.name, payload, block.checksum):
                    break
                written.append(block.name.key)
            self._take_back(written)
        finally:
            held = self._directory.release(batch.lease_id)
            self._directory.records.note_cold(self._cold.status())
        lost = self._cold.take_lost()
        stored = [key for key in written if key not in lost] if held else []
        return self._directory.records.mark_cold(self._cold.tier, stored, lost)

    def _take_back(self, written: Sequence[BlockKey]) -> None:
        """Deletes copies of leased blocks that were unindexed meanwhile: cleared, purged, or found corrupt."""
        here = self._directory.records.exists(written)
        if gone := [key for key, is_here in zip(written, here, strict=True) if not is_here]:
            self._cold.delete(gone)

    def _run(self) -> None:
        while not self.is_stopping:
            if not self._try_to_write():
                self._is_stopping.wait(self._interval_s)
        while not self._is_over and self._try_to_write():
            pass

    def _try_to_write(self) -> int:
        try:
            if time.monotonic() >= self._next_sweep:
                self._next_sweep = time.monotonic() + _SWEEP_EVERY_S
                with suppress(StoreError):  # the tier's state tells that it does not answer
                    self._cold.sweep(self._directory.records.shares)
            return self.write_some()
        except Exception:
            log.exception("writing to tier %s failed", self._cold.tier)
            return 0
