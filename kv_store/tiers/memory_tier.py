"""The cold tiers' twin: frames in this process's memory."""

import time
from collections import OrderedDict
from collections.abc import Generator, Sequence

from kv_store.frame import FRONT_BYTES, MAC_KEY_BYTES
from kv_store.tiers.cold_tier import FramedTier
from wire.ids import BlockKey
from wire.layout import KVLayout
from wire.tier import Tier


class MemoryTier(FramedTier):
    """A ColdTier that keeps the `max_blocks` most recently used blocks in `frames`, in the place of `tier`."""

    def __init__(
        self,
        layout: KVLayout,
        max_blocks: int = 1024,
        tier: Tier = Tier.REDIS,
        mac_key: bytes = bytes(MAC_KEY_BYTES),
    ) -> None:
        super().__init__(tier, layout, mac_key, time.monotonic)
        self.frames: OrderedDict[BlockKey, bytes] = OrderedDict()
        self._max_blocks = max_blocks

    def exists(self, keys: Sequence[BlockKey]) -> list[bool]:
        with self._lock:
            return self._note_found(keys, [key in self.frames for key in keys])

    def delete(self, keys: Sequence[BlockKey]) -> None:
        with self._lock:
            for key in keys:
                self.frames.pop(key, None)

    def close(self) -> None:
        with self._lock:
            self.frames.clear()

    def _read(self, keys: Sequence[BlockKey], into: Sequence[memoryview]) -> Generator[bytes, None, None]:
        for key, payload in zip(keys, into, strict=True):
            with self._lock:
                frame = self.frames.get(key)
                if frame is None:
                    return
                self.frames.move_to_end(key)
            if len(frame) == self._seal.frame_bytes:
                payload[:] = frame[FRONT_BYTES:]
                yield frame[:FRONT_BYTES]
            else:
                yield b""

    def _write(self, key: BlockKey, front: bytes, payload: memoryview) -> bool:
        with self._lock:
            self.frames[key] = front + payload
            self.frames.move_to_end(key)
            while len(self.frames) > self._max_blocks:
                self._lost.append(self.frames.popitem(last=False)[0])
        return True
