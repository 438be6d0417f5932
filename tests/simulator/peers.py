"""The way of a worker to another node's arena: the block port's twin, over a connection that may be slow or break."""

from collections.abc import Generator, Sequence
from contextlib import closing
from typing import Any, Protocol

from kv_store.connection import Breaker
from kv_store.node.directory_port import DirectoryPort
from kv_store.peers.block_reader import LocalBlocks
from tests.simulator.invariants import LAYOUT
from tests.simulator.node import Caller, Node
from tests.simulator.virtual_time import Process
from wire.block_names import BlockName
from wire.ids import BlockKey
from wire.tier import FarStatus, Tier

SLOW_BLOCK_S = 0.1


class Reader(Caller, Protocol):
    """A worker that reads from other nodes.

    lag_s: by how much its transfer is late. num_cut_blocks, num_blocks_twice: so many of the next blocks break off in
    the midst, and come twice.
    """

    lag_s: float
    num_cut_blocks: int
    num_blocks_twice: int

    def on_far_block(self) -> None:
        """Takes the time of a block from elsewhere."""


class SimPeer:
    """A BlockSource. Every fault counts for the breaker that BlockReader has."""

    tier = Tier.PEERS

    def __init__(self, reader: Reader, node: Node) -> None:
        self._reader = reader
        self._node = node
        self._breaker = Breaker(reader.clock)

    def exists(self, keys: Sequence[BlockKey]) -> list[bool]:
        if not self._reach():
            return [False] * len(keys)
        return self._blocks.exists(keys)

    def get(self, names: Sequence[BlockName], into: Sequence[memoryview]) -> Generator[bytes, None, None]:
        if not names or not self._reach():
            return
        with closing(self._blocks.get(names, into)) as checksums:
            for payload in into:
                if not self._comes(payload):
                    self._breaker.failed()
                    return
                if (checksum := next(checksums, None)) is None:
                    return
                yield checksum

    def delete(self, keys: Sequence[BlockKey]) -> None:
        if self._reach():
            self._blocks.delete(keys)

    def status(self) -> FarStatus:
        return FarStatus(tier=self.tier, state="broken" if self._breaker.is_open else "up")

    def close(self) -> None:
        """Keeps nothing open."""

    @property
    def _blocks(self) -> LocalBlocks:
        return LocalBlocks(_PortDirectory(self._reader, self._node), self._node.arena, LAYOUT.payload_bytes)

    def _reach(self) -> bool:
        """Asks the port, as far as the breaker lets it; whether it answers."""
        if not self._breaker.allows():
            return False
        self._reader.interleave()
        self._reader.step("peer")
        if self._is_away:
            self._breaker.failed()
            return False
        self._breaker.succeeded()
        return True

    def _comes(self, payload: memoryview) -> bool:
        """Waits for the next block; False, and some of its bytes spoilt, if the connection breaks meanwhile."""
        reader, node = self._reader, self._node
        reader.interleave()
        reader.step("peer block")
        reader.on_far_block()
        if reader.clock() < node.port_slow_until_s:
            reader.lag_s += SLOW_BLOCK_S
        if reader.num_blocks_twice:  # the connection broke behind it, and it was asked for again
            reader.num_blocks_twice -= 1
            payload[:] = bytes(len(payload))
        if reader.num_cut_blocks:
            reader.num_cut_blocks -= 1
            payload[: len(payload) // 2] = b"\1" * (len(payload) // 2)
            return False
        return not self._is_away

    @property
    def _is_away(self) -> bool:
        return self._node.is_gone or self._reader.clock() < self._node.port_away_until_s


class _PortDirectory(DirectoryPort):
    """A node's directory as its own block port calls it."""

    def __init__(self, reader: Reader, node: Node) -> None:
        self._port = _Port(reader, node)
        self._node = node
        self._directory = node.directory

    def _ask(self, method: str, arguments: tuple[Any, ...]) -> Any:
        return self._node.call(self._port, self._directory, method, arguments)


class _Port:
    """The block port as a caller of its node's directory, for one reader."""

    def __init__(self, reader: Reader, node: Node) -> None:
        self.process = Process(f"{node.name} port")
        self.has_lost_lease = False
        self.num_lost_calls = self.num_lost_answers = 0
        self.clock = reader.clock
        self.step = reader.step
        self.interleave = reader.interleave
