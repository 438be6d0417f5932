"""The block reader's twin: blocks of an arena and directory in this process."""

from collections import Counter
from collections.abc import Generator, Sequence

from kv_store.frame import checksum_of
from kv_store.node.arena import Arena
from kv_store.node.block_server import LEASE_TTL_S, READER
from kv_store.node.directory_port import DirectoryPort
from wire.ids import BlockKey
from wire.names import BlockName
from wire.tier import FarStatus, Tier


class LocalBlocks:
    """The reader's twin: the blocks of an arena and directory in this process."""

    tier = Tier.PEERS

    def __init__(self, directory: DirectoryPort, arena: Arena, payload_bytes: int) -> None:
        self._directory = directory
        self._arena = arena
        self._payload_bytes = payload_bytes
        self._counted = Counter[str]()

    def exists(self, keys: Sequence[BlockKey]) -> list[bool]:
        return self._directory.exists(keys)

    def delete(self, keys: Sequence[BlockKey]) -> None:
        self._directory.delete(keys)

    def get(self, names: Sequence[BlockName], into: Sequence[memoryview]) -> Generator[bytes, None, None]:
        lease = self._directory.lease(READER, [name.key for name in names], LEASE_TTL_S)
        try:
            for entry, payload in zip(lease.entries, into, strict=True):
                if entry is None:
                    self._counted["misses"] += 1
                    return
                payload[:] = self._arena.slot(entry.slot)[: self._payload_bytes]
                if checksum_of(payload) != entry.checksum:
                    self._counted["corrupt"] += 1
                    return
                self._counted["hits"] += 1
                yield entry.checksum
        finally:
            self._directory.release(lease.lease_id)

    def status(self) -> FarStatus:
        return FarStatus(self.tier, "up", **self._counted)

    def close(self) -> None:
        pass
