"""The cold tier's twin: frames in this process's memory."""

from collections import OrderedDict
from collections.abc import Sequence

from kv_store.tiers.cold_tier import FramedTier
from wire.ids import BlockKey
from wire.layout import KVLayout


class MemoryTier(FramedTier):
    """A ColdTier that keeps the `max_blocks` most recently used blocks in `frames`."""

    def __init__(self, layout: KVLayout, max_blocks: int = 1024) -> None:
        super().__init__(layout)
        self.frames: OrderedDict[BlockKey, bytes] = OrderedDict()
        self._max_blocks = max_blocks

    def exists(self, keys: Sequence[BlockKey]) -> list[bool]:
        with self._lock:
            return [key in self.frames for key in keys]

    def delete(self, keys: Sequence[BlockKey]) -> None:
        with self._lock:
            for key in keys:
                self.frames.pop(key, None)

    def close(self) -> None:
        with self._lock:
            self.frames.clear()

    def _read(self, key: BlockKey, max_bytes: int) -> bytes:
        with self._lock:
            if key in self.frames:
                self.frames.move_to_end(key)
            return self.frames.get(key, b"")[:max_bytes]

    def _write(self, key: BlockKey, frame: bytes) -> bool:
        with self._lock:
            self.frames[key] = frame
            self.frames.move_to_end(key)
            while len(self.frames) > self._max_blocks:
                self.frames.popitem(last=False)
        return True
