"""A node of the simulated cluster: its arena and directory, and the calls to them over a socket that may fail."""

import asyncio
import mmap
from collections.abc import Sequence, Set
from math import inf
from typing import Any, Protocol

from kv_store.eviction.hit_density import HitDensity
from kv_store.eviction.order import EvictionOrder, StartFirst
from kv_store.eviction.policy import LeastRecentlyUsed
from kv_store.node.arena import Arena
from kv_store.node.directory import Directory
from kv_store.node.directory_client import DirectoryClient, _Channel
from kv_store.node.directory_port import carry_out
from kv_store.node.messages import Block, DirectoryInfo, Hold, Lease, Reservation
from kv_store.node.service import LENGTH, ClientName, RefusedCall, ServiceCodec
from kv_store.tiers.cold_tier import ColdTier
from kv_store.tiers.cold_writer import ColdWriter
from tests.simulator.invariants import Watch
from tests.simulator.virtual_time import Process
from wire.errors import StoreError
from wire.ids import AttemptId, BlockKey
from wire.layout import KVLayout

WRITE_EVERY_S = 0.1
NUM_EVENTS = 16
"""So few that the router's index falls out of the ring now and then."""
_ENDED = {"commit": "committed", "reserve": "reserved", "lease": "leased", "release": "released"}


class Caller(Protocol):
    """A process of the node, as the node sees it."""

    process: Process
    has_lost_lease: bool
    num_lost_calls: int
    num_lost_answers: int

    def clock(self) -> float: ...

    def step(self, step: str) -> None:
        """Comes to a step of the hand-off. Raises Died."""

    def interleave(self) -> None:
        """Lets a transfer of another process run in the midst of this one's."""


class SharedArena(Arena):
    """A process's mapping of an arena in this process's memory."""

    def close(self) -> None:
        pass


class Node:
    """An arena and its directory, of one epoch after another. `ahead_s`: by how much claims have run out early.

    port_away_until_s, port_slow_until_s: of its block port, which other nodes read. written: keys that the cold tier
    has had.
    """

    def __init__(
        self, name: str, layout: KVLayout, num_slots: int, cold: ColdTier, watch: Watch, written: Set[BlockKey]
    ) -> None:
        self.name = name
        self.ahead_s = 0.0
        self.is_gone = self.is_leaving = False
        self.away_until_s = self.port_away_until_s = self.port_slow_until_s = 0.0
        self._layout = layout
        self._num_slots = num_slots
        self._cold = cold
        self._written = written
        self._watch = watch
        self._loop = asyncio.get_running_loop()
        self._num_epochs = 0
        self._memory: mmap.mmap | None = None
        self.restart()

    def restart(self) -> None:
        """Loses the directory and all of its arena; other processes that map that read zeros."""
        if self._memory is not None:
            self._memory[:] = bytes(len(self._memory))
        block_bytes = self._layout.block_bytes
        self._held: dict[AttemptId, tuple[set[BlockKey], float]] = {}
        self._num_epochs += 1
        self._memory = mmap.mmap(-1, block_bytes * self._num_slots)
        self.path = f"{self.name}/{self._num_epochs}"
        self.directory = Directory(
            self._num_slots,
            self.clock,
            arena_path=self.path,
            block_bytes=block_bytes,
            order=EvictionOrder if self._layout.window is None else StartFirst,
            policy=HitDensity if self._layout.window is None else LeastRecentlyUsed,
            num_events=NUM_EVENTS,
        )
        self.arena = self.map(self.path)
        self.writer = ColdWriter(self._layout, self.arena, self.directory, self._cold)

    def clock(self) -> float:
        return self._loop.time() + self.ahead_s

    def evict(self) -> None:
        """Loses all blocks, held ones too."""
        self.directory.reject(self.directory.state.blocks())
        self._held.clear()

    def map(self, path: str) -> Arena:
        """Maps the arena of the directory. Raises StoreError if that is another one by now."""
        if path != self.path or self._memory is None:
            raise StoreError("the arena cannot be mapped")
        return SharedArena(self._memory, self._layout.block_bytes, self._num_slots, None)

    def lose(self) -> None:
        """Loses the node with its memory, for good."""
        self.is_gone = True
        self.restart()
        self.away_until_s = self.port_away_until_s = inf

    async def write_cold(self) -> None:
        """Writes blocks to the cold tier while the node is there."""
        while not self.is_gone:
            if not self.writer.write_some():
                await asyncio.sleep(WRITE_EVERY_S)
            await asyncio.sleep(0)

    def forget(self, caller: "Caller", names: set[str]) -> None:
        """Learns that a process with these writers is dead."""
        self._watch.end_all_of(caller.process.name)
        for name in sorted(names):
            self.directory.writer_died(name)

    def call(self, caller: Caller, directory: Directory, method: str, arguments: Sequence[Any]) -> Any:
        """Carries out a call, and sees to what it says of slots in use."""
        watch, process = self._watch, caller.process.name
        if method == "release_holds":
            for attempt_id in arguments[0]:
                self._held.pop(attempt_id, None)
        if method in ("reserve", "abandon"):
            watch.end(("writer", arguments[0]))
        if method == "release":
            caller.has_lost_lease |= watch.is_over(("lease", f"{process}:{arguments[0]}", directory))
            watch.end(("lease", f"{process}:{arguments[0]}", directory))
        with watch.at(directory):
            answer = carry_out(directory, method, arguments)
        match method, answer:
            case "lease", Lease(lease_id, entries):
                slots = {entry.slot for entry in entries if entry is not None}
                end_s = self.clock() + arguments[2]
                watch.use(("lease", f"{process}:{lease_id}", directory), directory, slots, self.clock, end_s)
            case "reserve", Reservation(slots=given):
                slots = {slot for slot in given if slot is not None}
                watch.use(("writer", arguments[0]), directory, slots, self.clock, inf)
            case "commit", _:
                watch.end(("writer", arguments[0]), {block.slot for block in arguments[1]})
                self._check_commit(arguments[1])
            case "reject", _:
                for keys, _ in self._held.values():
                    keys.difference_update(block.name.key for block in arguments[0])
            case "delete", _:  # another attempt may publish them again, in slots that no hold keeps
                for keys, _ in self._held.values():
                    keys.difference_update(arguments[0])
            case "renew", ended:
                self._check_renewed(arguments[0], ended, arguments[1])
        if method in ("reserve", "commit") and arguments[2] is not None:
            names = [getattr(one, "name", one) for one in arguments[1]]
            self._note_hold(arguments[2], [name.key for name in names if not name.is_tail])
        return answer

    def _note_hold(self, hold: Hold, keys: Sequence[BlockKey]) -> None:
        found = {key for key, is_there in zip(keys, self.directory.records.exists(keys), strict=True) if is_there}
        self._held[hold.attempt_id] = (
            self._held.get(hold.attempt_id, (set(), 0))[0] | found,
            self.clock() + hold.ttl_s,
        )

    def _check_renewed(self, asked: Sequence[AttemptId], ended: Sequence[AttemptId], ttl_s: float) -> None:
        """I11: when a hold ends before its time, the cold tier has had all blocks of it that are still found."""
        for attempt_id in filter(self._held.__contains__, asked):
            keys, end_s = self._held[attempt_id]
            there = {key for key in keys if self.directory.records.exists([key]) == [True]}
            if attempt_id not in ended:
                self._held[attempt_id] = (keys, max(end_s, self.clock() + ttl_s))
            elif self.clock() < end_s and not there <= self._written:
                self._watch.violated("I11", f"the hold of {attempt_id} has ended, and its blocks have no copy")

    def _check_commit(self, blocks: Sequence[Block]) -> None:
        """I3: what can be found from now on is there, and is what it should be."""
        found = {block.slot: block for block in self.directory.state.blocks()}
        for block in blocks:
            if found.get(block.slot) == block:
                self._watch.expect_whole(self.arena.slot(block.slot)[: self._layout.payload_bytes], block)


class DirectorySocket(_Channel):
    """A connection of a process to its node's directory."""

    def __init__(self, caller: Caller, node: Node, names: set[str]) -> None:
        super().__init__("", caller.clock)
        self._caller = caller
        self._node = node
        self._names = names
        self._peer: Directory | None = None

    def connect(self, deadline: float) -> DirectoryInfo:
        self._require_there()
        if self._peer is None:
            self._peer = self._node.directory
        return self._peer.attach()

    def exchange(self, codec: ServiceCodec, method: str, arguments: tuple[Any, ...], deadline: float) -> Any:
        caller = self._caller
        if method in ("events", "wait_for_events"):  # no step of a hand-off
            return self._tell(codec, method, arguments)
        caller.interleave()
        caller.step(method)
        peer = self._require_connected()
        if caller.num_lost_calls:
            caller.num_lost_calls -= 1
            raise TimeoutError("the call was lost")
        call = codec.decode_call(codec.encode_call(method, arguments)[LENGTH.size :])
        own = [
            self._own(value) if hint == ClientName else value
            for value, hint in zip(call.arguments, call.hints, strict=True)
        ]
        try:
            answer = self._node.call(caller, peer, method, own)
        except StoreError as error:
            answer = RefusedCall(error.message)
        if method in _ENDED:
            caller.step(_ENDED[method])
        if caller.num_lost_answers:
            caller.num_lost_answers -= 1
            raise TimeoutError("the answer was lost")
        return codec.decode_answer(method, codec.encode_answer(answer)[LENGTH.size :])

    def close(self) -> None:
        self._peer = None

    def _own(self, name: str) -> str:
        own = f"{self._caller.process.name}:{name}"
        self._names.add(own)
        return own

    def _tell(self, codec: ServiceCodec, method: str, arguments: tuple[Any, ...]) -> Any:
        """Carries out a call about events; a wait ends at once, for it would hold up virtual time."""
        call = codec.decode_call(codec.encode_call(method, arguments)[LENGTH.size :])
        given = [call.arguments[0], 0.0] if method == "wait_for_events" else call.arguments
        answer = carry_out(self._require_connected(), method, given)
        return codec.decode_answer(method, codec.encode_answer(answer)[LENGTH.size :])

    def _require_there(self) -> None:
        self._caller.process.require_alive()
        if self._caller.clock() < self._node.away_until_s:
            raise ConnectionError("the directory does not answer")

    def _require_connected(self) -> Directory:
        """Returns the directory. Raises ConnectionError where it is away, or another one than was connected to."""
        self._require_there()
        if self._peer is not self._node.directory:
            raise ConnectionError("the directory has hung up")
        return self._node.directory


class SimDirectoryClient(DirectoryClient):
    """The real client on a simulated socket. `names`: those that the process gave its writers and readers."""

    def __init__(self, caller: Caller, node: Node) -> None:
        super().__init__("", clock=caller.clock)
        self.names: set[str] = set()
        self._channel = DirectorySocket(caller, node, self.names)
        self._event_channel = DirectorySocket(caller, node, self.names)
