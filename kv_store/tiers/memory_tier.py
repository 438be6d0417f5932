"""The cold tiers' twin: frames in this process's memory."""

import time
from collections import OrderedDict
from collections.abc import Generator, Iterator, Mapping, Sequence

from kv_store.frame import FRONT_BYTES, HEAD_BYTES, MAC_KEY_BYTES, namespace_of
from kv_store.tiers.cold_tier import FramedTier
from wire.ids import BlockKey
from wire.layout import KVLayout
from wire.tier import StoredBlock, Tier


class MemoryTier(FramedTier):
    """A ColdTier that keeps the `max_blocks` most recently used blocks in `frames`, under the name of `tier`."""

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

    def key_pages(self) -> Iterator[Sequence[BlockKey]]:
        with self._lock:
            keys = [*self.frames]
        yield keys

    def describe(self, keys: Sequence[BlockKey]) -> list[StoredBlock]:
        with self._lock:
            found = {key: frame for key in keys if (frame := self.frames.get(key)) is not None}
        return [StoredBlock(key, namespace_of(one[:HEAD_BYTES]), len(one), 0.0) for key, one in found.items()]

    def sweep(self, shares: Mapping[bytes, float]) -> None:
        """Does nothing: the twin has neither TTLs nor shares."""

    def _remove(self, keys: Sequence[BlockKey]) -> bool:
        with self._lock:
            for key in keys:
                self.frames.pop(key, None)
        return True

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
