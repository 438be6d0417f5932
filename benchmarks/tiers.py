"""Blocks through the tiers, each rate over a ceiling of the same run: a copy in memory, a plain GET, a plain read.

    python benchmarks/tiers.py

Blocks of 1 MiB: published to the arena and fetched from it, verified, over a copy between as many places; fetched from
another process's block port, verified, over a TCP socket that brings as many bytes into the same places, and both of
them with TLS; fetched from Redis into the arena with checksum and MAC, over redis-py's GET of the same values with
hiredis; from files, over plain reads into one place; and the MAC of a frame over a copy. All take turns; a ratio is of
medians.

A lookup is of 500 keys: as many as there are blocks are in the arena, the rest by turns in Redis and in files. It goes
as a store's does, from the directory to another node, Redis and files, each asked for what the nearer ones have not;
over one call of the directory for all keys and a PING. The directory itself is measured full, one of a million
blocks and one of a thousand in turns: each reserves, commits, leases and releases 64 blocks, or one at the end of a
long context.
"""

import argparse
import hashlib
import multiprocessing
import os
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from itertools import compress
from mmap import mmap
from multiprocessing.connection import Connection
from operator import not_
from pathlib import Path
from typing import Protocol

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import psutil
import redis
import torch

from benchmarks.result_file import write_result
from deploy.local import redis_server
from deploy.plan.authority import Authority
from deploy.processes.process import end_session
from kv_store.device_pool import DevicePool
from kv_store.frame import FRONT_BYTES, FrameSeal, checksum_of
from kv_store.node.arena import Arena
from kv_store.node.directory import Directory
from kv_store.node.directory_client import DirectoryClient
from kv_store.node.directory_server import DirectoryServer
from kv_store.node.messages import Block
from kv_store.node_store import NodeStore
from kv_store.peers.block_reader import BlockReader
from kv_store.peers.block_server import BlockServer
from kv_store.tiers.cold_tier import BlockSource, ColdTier
from kv_store.tiers.files_tier import FilesTier
from kv_store.tiers.redis_tier import RedisTier
from wire.block_names import BlockName, cover
from wire.ids import BlockKey, NamespaceRoot, PageId, SlotId
from wire.layout import KVLayout
from wire.trust.identity import Identity

LAYOUT = KVLayout(num_layers=16, num_kv_heads=8, head_dim=128, block_size=16, dtype="float16")
MAC_KEY = bytes(32)
TOKEN = b"token"
TIMEOUT_S = 10.0
NUM_LOOKED_UP = 500
NUM_IN_TURN = 64
NUM_IN_CONTEXT = 1000
LONG_CONTEXT = 10_000
LOOKUP, BARE_LOOKUP = "lookup", "call of the directory and a PING"
SLOW_LOOKUP = "lookup, p99"
Work = Callable[[], object]


@dataclass(frozen=True)
class Blocks:
    """Named blocks, their payloads, and places of an arena to fetch them to."""

    names: list[BlockName]
    payloads: list[memoryview]
    slots: list[memoryview]

    @classmethod
    def make(cls, num_blocks: int) -> "Blocks":
        names = cover(NamespaceRoot(bytes(32)), range(num_blocks * LAYOUT.block_size), LAYOUT.block_size)
        arena = Arena.anonymous(LAYOUT.block_bytes, num_blocks)
        slots = [arena.slot(SlotId(number)) for number in range(num_blocks)]
        return cls(names, [memoryview(os.urandom(LAYOUT.payload_bytes)) for _ in names], slots)

    @property
    def num_bytes(self) -> int:
        return len(self.names) * LAYOUT.payload_bytes

    def copy(self) -> None:
        for slot, payload in zip(self.slots, self.payloads, strict=True):
            slot[:] = payload

    def fetch(self, tier: BlockSource) -> None:
        if len(list(tier.get(self.names, self.slots))) < len(self.names):
            raise RuntimeError(f"tier {tier.tier} has lost blocks")

    def put(self, tier: ColdTier) -> None:
        for name, payload in zip(self.names, self.payloads, strict=True):
            if not tier.put(name, payload, checksum_of(payload)):
                raise RuntimeError(f"tier {tier.tier} takes no blocks")

    def prove(self, seal: FrameSeal) -> None:
        for name, payload in zip(self.names, self.payloads, strict=True):
            seal.seal(name, payload, bytes(16))


class ArenaTurns:
    """A store over an arena. Each publish is of blocks that are not there, each fetch of blocks that are."""

    def __init__(self, blocks: Blocks) -> None:
        num_blocks = len(blocks.names)
        self._names = blocks.names
        self._arena = Arena.anonymous(LAYOUT.block_bytes, num_blocks)
        self._directory = Directory(num_blocks)
        pool = DevicePool(LAYOUT, 2 * num_blocks, torch.device("cpu"))
        self._pages = [PageId(page) for page in range(num_blocks)]
        self._targets = [PageId(num_blocks + page) for page in range(num_blocks)]
        for page, payload in zip(self._pages, blocks.payloads, strict=True):
            pool.write_pages(page, payload)
        self._store = NodeStore(LAYOUT, self._arena, self._directory, [], pool)

    def empty(self) -> None:
        self._directory.reject(self._directory.state.blocks())

    def publish(self) -> None:
        if self._store.write_through(self._names, self._pages, None) < len(self._names):
            raise RuntimeError("not all blocks are in the arena")

    def fetch(self) -> None:
        if len(self._store.fetch(self._names, self._targets).tiers) < len(self._names):
            raise RuntimeError("not all blocks came from the arena")


class FullDirectory:
    """A directory without a free slot, whose blocks are contexts of `NUM_IN_CONTEXT`."""

    def __init__(self, num_slots: int) -> None:
        self._num_names = 0
        self._root = self._parent = hashlib.sha256(b"root").digest()
        before = psutil.Process().memory_info().rss
        self._directory = Directory(num_slots)
        while self._directory.records.status().counts.free:
            self.begin_context()
            self.grow(NUM_IN_CONTEXT)
        self.bytes_per_block = (psutil.Process().memory_info().rss - before) / num_slots

    def begin_context(self) -> None:
        self._parent = self._root

    def grow(self, num_blocks: int) -> None:
        """Adds blocks to the context."""
        for _ in range(0, num_blocks, NUM_IN_TURN):
            self.take_turn(min(NUM_IN_TURN, num_blocks))

    def take_turn(self, num_blocks: int) -> float:
        """Adds blocks to the context and reads them; returns the seconds of the directory's calls."""
        names = [self._next_name() for _ in range(num_blocks)]
        began_s = time.perf_counter()
        slots = self._directory.reserve("writer", names, None).slots
        blocks = [Block(slot, name, bytes(16)) for slot, name in zip(slots, names, strict=True) if slot is not None]
        self._directory.commit("writer", blocks, None)
        lease = self._directory.lease("reader", [name.key for name in names], TIMEOUT_S)
        self._directory.release(lease.lease_id)
        return time.perf_counter() - began_s

    def _next_name(self) -> BlockName:
        self._num_names += 1
        key = hashlib.sha256(self._parent + self._num_names.to_bytes(8, "little")).digest()
        name = BlockName(BlockKey(key), bytes(bytearray(self._parent)), hashlib.sha256(key).digest(), self._root)
        self._parent = key
        return name


def measure_directory(num_blocks: int, num_turns: int) -> tuple[dict[str, float], list[list[float]]]:
    """Returns figures of a directory of so many blocks, and the seconds of the turns of it and of one of a thousand."""
    full, small = FullDirectory(num_blocks), FullDirectory(1000)
    seconds: list[list[float]] = [[], [], [], []]
    for _ in range(num_turns):
        for one, of_one in zip((full, small), seconds, strict=False):
            one.begin_context()
            of_one.append(one.take_turn(NUM_IN_TURN))
    for num_before, of_context in zip((min(LONG_CONTEXT, num_blocks // 2), 1), seconds[2:], strict=True):
        full.begin_context()
        full.grow(num_before)
        of_context += [full.take_turn(1) for _ in range(num_turns)]
    medians = [statistics.median(each) for each in seconds]
    return {
        "directory: p99 of 64 blocks reserved, committed and leased, ms": sorted(seconds[0])[num_turns * 99 // 100]
        * 1e3,
        "directory: a turn of 64 blocks over the same in one of 1,000 blocks": medians[0] / medians[1],
        "directory: a block after a long context over one after a short one": medians[2] / medians[3],
        "directory: bytes a block": full.bytes_per_block,
    }, seconds


@contextmanager
def other_node(
    blocks: Blocks, socket_path: Path, authority: Authority | None = None
) -> Iterator[tuple[str, socket.socket]]:
    """Has the blocks in the arena of another process, which serves its directory, too.

    Yields its block port, and a socket that answers bytes in bulk.
    For each byte that the socket gets, it sends all payloads. authority: has all of it go over TLS.
    """
    identity = authority.issue("node", "127.0.0.1") if authority else None
    ours, theirs = multiprocessing.Pipe()
    context = multiprocessing.get_context("fork")
    process = context.Process(target=_serve_blocks, args=[blocks, str(socket_path), theirs, identity], daemon=True)
    process.start()
    try:
        address, bulk = ours.recv()
        plain = socket.create_connection(bulk)
        tls = identity.client_context() if identity else None
        with tls.wrap_socket(plain, server_hostname="127.0.0.1") if tls else plain as connection:
            yield address, connection
    finally:
        process.terminate()
        process.join(TIMEOUT_S)


def _serve_blocks(blocks: Blocks, socket_path: str, line: Connection, identity: Identity | None) -> None:
    num_blocks = len(blocks.names)
    directory, arena = Directory(num_blocks), Arena.anonymous(LAYOUT.block_bytes, num_blocks)
    slots = directory.reserve("writer", blocks.names, None).slots
    for slot, name, payload in zip(slots, blocks.names, blocks.payloads, strict=True):
        assert slot is not None
        arena.slot(slot)[:] = payload
        directory.commit("writer", [Block(slot, name, checksum_of(payload))], None)
    listener = socket.create_server(("127.0.0.1", 0))
    DirectoryServer(directory, socket_path).start()
    server = BlockServer(directory, arena, LAYOUT.payload_bytes, TOKEN, identity)
    line.send((server.start("127.0.0.1"), listener.getsockname()))
    connection, _ = listener.accept()
    connection = identity.server_context().wrap_socket(connection, server_side=True) if identity else connection
    while connection.recv(1):
        for slot in slots:
            assert slot is not None
            connection.sendall(arena.slot(slot))


def receive_plainly(connection: socket.socket, slots: Sequence[memoryview]) -> None:
    connection.sendall(b"1")
    for slot in slots:
        connection.recv_into(slot, flags=socket.MSG_WAITALL)


def receive_over_tls(connection: socket.socket, slots: Sequence[memoryview]) -> None:
    connection.sendall(b"1")
    for slot in slots:
        rest = slot
        while rest:
            rest = rest[connection.recv_into(rest) :]


@contextmanager
def own_redis(folder: Path) -> Iterator[str]:
    server = redis_server.start(redis_server.find_program(), folder, 1 << 30)
    try:
        yield server.url
    finally:
        end_session(server.process, grace_s=2.0)


def read_plainly(paths: Sequence[Path], into: memoryview) -> None:
    for path in paths:
        with open(path, "rb", buffering=0) as file:
            file.readinto(into)


def take_turns(works: dict[str, Work], before: dict[str, Work], num_turns: int) -> dict[str, list[float]]:
    """Returns the seconds of each work, turn by turn. before: calls that prepare one, and are not timed."""
    seconds: dict[str, list[float]] = {name: [] for name in works}
    for _ in range(num_turns):
        for name, work in works.items():
            before.get(name, lambda: None)()
            began_s = time.perf_counter()
            work()
            seconds[name].append(time.perf_counter() - began_s)
    return {name: each[1:] for name, each in seconds.items()}  # the first one warms up


def medians(seconds: dict[str, list[float]]) -> dict[str, float]:
    return {name: statistics.median(each) for name, each in seconds.items()}


def of_lookups(seconds: dict[str, list[float]]) -> dict[str, float]:
    slowest_first = sorted(seconds[LOOKUP], reverse=True)
    return medians(seconds) | {SLOW_LOOKUP: slowest_first[len(slowest_first) // 100]}


def measure(num_blocks: int, num_turns: int, folder: Path) -> dict[str, float]:
    """Returns the median seconds of each way of all blocks."""
    blocks, seal = Blocks.make(num_blocks), FrameSeal(LAYOUT, MAC_KEY)
    arena = ArenaTurns(blocks)
    with ExitStack() as stack:
        address, bulk = stack.enter_context(other_node(blocks, folder / "directory"))
        peer = stack.enter_context(closing(BlockReader(address, LAYOUT.payload_bytes, TOKEN, TIMEOUT_S)))
        authority = Authority.make()
        tls_address, tls_bulk = stack.enter_context(other_node(blocks, folder / "directory-tls", authority))
        reader = authority.issue("worker", "127.0.0.1")
        tls_peer = BlockReader(tls_address, LAYOUT.payload_bytes, TOKEN, TIMEOUT_S, identity=reader)
        stack.callback(tls_peer.close)
        url = stack.enter_context(own_redis(folder))
        client = stack.enter_context(redis.Redis.from_url(url, socket_read_size=256 << 10))
        in_redis = RedisTier(url, LAYOUT, MAC_KEY, TIMEOUT_S)
        in_files = FilesTier(str(folder / "kv"), LAYOUT, MAC_KEY, TIMEOUT_S, 1 << 40)
        for tier in (in_redis, in_files):
            stack.callback(tier.close)
            blocks.put(tier)
        directory = stack.enter_context(closing(DirectoryClient(str(folder / "directory"), TIMEOUT_S)))
        keys = [b"baton:kv:" + name.key for name in blocks.names]
        paths = [path for path in (folder / "kv").rglob("*") if path.is_file()]
        asked = [name.key for name in blocks.names]
        asked += spread(NUM_LOOKED_UP - len(asked), client, folder / "kv")
        frame = memoryview(mmap(-1, FRONT_BYTES + LAYOUT.payload_bytes))
        works: dict[str, Work] = {
            "copy": blocks.copy,
            "publish to the arena": arena.publish,
            "fetch from the arena": arena.fetch,
            "MAC": lambda: blocks.prove(seal),
            "plain TCP": lambda: receive_plainly(bulk, blocks.slots),
            "fetch from another node": lambda: blocks.fetch(peer),
            "plain TLS": lambda: receive_over_tls(tls_bulk, blocks.slots),
            "fetch from another node over TLS": lambda: blocks.fetch(tls_peer),
            "plain GET": lambda: [client.get(key) for key in keys],
            "fetch from Redis": lambda: blocks.fetch(in_redis),
            "plain read": lambda: read_plainly(paths, frame),
            "fetch from files": lambda: blocks.fetch(in_files),
            "put to Redis": lambda: blocks.put(in_redis),
            "put to files": lambda: blocks.put(in_files),
        }
        lookups: dict[str, Work] = {
            LOOKUP: lambda: look_up(asked, (directory.records, peer, in_redis, in_files)),
            BARE_LOOKUP: lambda: [directory.records.exists(asked), client.ping()],
        }
        return medians(take_turns(works, {"publish to the arena": arena.empty}, num_turns)) | of_lookups(
            take_turns(lookups, {}, 10 * num_turns)
        )


class Lookup(Protocol):
    def exists(self, keys: Sequence[BlockKey], /) -> list[bool]: ...


def look_up(keys: Sequence[BlockKey], sources: Sequence[Lookup]) -> None:
    """Asks each source for the keys that no nearer one has."""
    for source in sources:
        keys = list(compress(keys, map(not_, source.exists(keys))))
    if keys:
        raise RuntimeError(f"{len(keys)} keys are nowhere")


def spread(num_keys: int, client: redis.Redis, folder: Path) -> list[BlockKey]:
    """Puts values under keys, by turns in Redis and in files, and returns the keys."""
    keys = [BlockKey(hashlib.sha256(b"%d" % number).digest()) for number in range(num_keys)]
    for key in keys[::2]:
        client.set(b"baton:kv:" + key, b"there")
    for path in [folder / key.hex()[:2] / key.hex() for key in keys[1::2]]:
        path.parent.mkdir(exist_ok=True)
        path.touch()
    return keys


RATIOS = {
    "publish to the arena over a copy": ("publish to the arena", "copy"),
    "verified fetch from the arena over a copy": ("fetch from the arena", "copy"),
    "verified fetch from another node over a TCP socket": ("fetch from another node", "plain TCP"),
    "verified fetch over TLS over a TLS socket": ("fetch from another node over TLS", "plain TLS"),
    "fetch from Redis with MAC over redis-py's GET": ("fetch from Redis", "plain GET"),
    "fetch from files with MAC over plain reads": ("fetch from files", "plain read"),
    "MAC of a frame over a copy": ("MAC", "copy"),
    "a call of the directory and a PING over a lookup of 500 keys in all tiers": (LOOKUP, BARE_LOOKUP),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=64)
    parser.add_argument("--turns", type=int, default=31)
    parser.add_argument("--directory-blocks", type=int, default=1_000_000)
    parser.add_argument("--directory-turns", type=int, default=1000)
    parser.add_argument("--out", default="tiers", help="name of the result in benchmarks/results")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        seconds = measure(options.blocks, options.turns, Path(folder))
    num_bytes = options.blocks * LAYOUT.payload_bytes
    figures = {name: seconds[peer] / seconds[own] for name, (own, peer) in RATIOS.items()}
    of_directory, turns = measure_directory(options.directory_blocks, options.directory_turns)
    lookups = [(name, seconds.pop(name) * 1e3, "ms") for name in (LOOKUP, SLOW_LOOKUP, BARE_LOOKUP)]
    rates = [(name, num_bytes / each / 1e9, "GB/s") for name, each in seconds.items()]
    details = {"seconds": seconds, "lookups_ms": lookups, "block_bytes": LAYOUT.block_bytes, "directory_turns": turns}
    write_result(options.out, figures | of_directory, details, [("way", "", ""), *rates, *lookups])


if __name__ == "__main__":
    main()
