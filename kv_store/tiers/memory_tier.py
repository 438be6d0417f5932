"""The cold tier's twin: frames in this process's memory."""

import threading
from collections import Counter, OrderedDict
from collections.abc import Sequence

from kv_store.tiers.cold_tier import ColdStatus
from wire.errors import WireError
from wire.frame import seal, unseal
from wire.ids import BlockKey
from wire.keys import BlockName
from wire.layout import KVLayout


class MemoryTier:
    """A ColdTier that keeps the `max_blocks` most recently used blocks in `frames`. Thread-safe."""

    def __init__(self, layout: KVLayout, max_blocks: int = 1024) -> None:
        self.frames: OrderedDict[BlockKey, bytes] = OrderedDict()
        self._layout = layout
        self._max_blocks = max_blocks
        self._counted = Counter[str]()
        self._lock = threading.Lock()

    def exists(self, keys: Sequence[BlockKey]) -> list[bool]:
        with self._lock:
            return [key in self.frames for key in keys]

    def get(self, name: BlockName, into: memoryview) -> bytes | None:
        with self._lock:
            frame = self.frames.get(name.key)
            if frame is None:
                self._counted["misses"] += 1
                return None
            try:
                checksum = unseal(frame, name, self._layout, into)
            except WireError:
                del self.frames[name.key]
                self._counted["corrupt"] += 1
                return None
            self.frames.move_to_end(name.key)
            self._counted["hits"] += 1
            return checksum

    def put(self, name: BlockName, payload: memoryview, checksum: bytes) -> bool:
        frame = seal(name, self._layout, payload, checksum)
        with self._lock:
            self.frames[name.key] = frame
            self.frames.move_to_end(name.key)
            while len(self.frames) > self._max_blocks:
                self.frames.popitem(last=False)
            self._counted["written"] += 1
        return True

    def delete(self, keys: Sequence[BlockKey]) -> None:
        with self._lock:
            for key in keys:
                self.frames.pop(key, None)

    def status(self) -> ColdStatus:
        with self._lock:
            return ColdStatus("up", **self._counted)

    def close(self) -> None:
        with self._lock:
            self.frames.clear()
