"""The router's index of blocks: memory a million, a lookup's time, and from an event in the arena to its placement.

    python benchmarks/block_index.py --blocks 1000000 --events 400 --rate 40

Memory is what the process grows by while pages of that many blocks are taken, without and with half of them replaced.
The way of an event is the product's: a directory behind its Unix socket, a worker's calls, its gRPC line, and the
router's index, all in one process. Blocks are committed at random times; an event ends when its block is found by the
index. `idle` is the processor time of directory, worker and router together that looking for events takes.
"""

import argparse
import asyncio
import hashlib
import os
import random
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from benchmarks.result_file import write_result
from engine.model.hash_model import HashModel
from kv_store.node.arena import Arena
from kv_store.node.directory import Directory
from kv_store.node.directory_client import DirectoryClient
from kv_store.node.directory_server import DirectoryServer
from router.block_index import BlockIndex
from router.workers.grpc_transport import GrpcTransport
from router.workers.line import Line
from router.workers.members import Member, Members
from router.workers.node_events import IndexFeed
from tests.harness.assembled_worker import FINGERPRINT, TOKEN, local_worker
from tests.kv_store.names import committed
from wire.block_names import cover
from wire.errors import Unavailable
from wire.ids import BlockKey, NamespaceRoot, WorkerId
from wire.layout import KVLayout
from wire.pb import worker_pb2
from wire.pools import Role, Worker, WorkerState
from worker.assembly import Tiers
from worker.config import ServerSettings
from worker.server import WorkerServer

LAYOUT = KVLayout(num_layers=1, num_kv_heads=1, head_dim=8, block_size=16, dtype="float32")
PAGE_BLOCKS = 1024
BLOCKS_AN_EVENT = 8
IDLE_S = 5.0
ROOT = NamespaceRoot(b"r" * 32)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--blocks", type=int, default=1_000_000, help="of the index")
    parser.add_argument("--events", type=int, default=400, help="commits of eight blocks")
    parser.add_argument("--rate", type=float, default=40.0, help="commits a second")
    options = parser.parse_args()
    torch.set_num_threads(1)
    index = BlockIndex(LAYOUT)
    figures = memory_of(index, options.blocks) | lookup_times(index, options.blocks)
    figures |= asyncio.run(way_of_events(options.events, options.rate))
    write_result("block_index", figures, {})


def memory_of(index: BlockIndex, num_blocks: int) -> dict[str, float]:
    """Fills the index with one node's blocks, and replaces half of them; MiB a million blocks, resident."""
    before = _resident_bytes()
    for start in range(0, num_blocks, PAGE_BLOCKS):
        _take(index, [("stored", _keys(start, start + PAGE_BLOCKS))])
    filled = _resident_bytes()
    for start in range(0, num_blocks // 2, PAGE_BLOCKS):
        there = num_blocks + start
        _take(index, [("removed", _keys(start, start + PAGE_BLOCKS)), ("stored", _keys(there, there + PAGE_BLOCKS))])
    churned = _resident_bytes()
    millions = num_blocks / 1e6
    return {
        "MiB a million blocks": (filled - before) / 2**20 / millions,
        "MiB a million blocks, half replaced": (churned - before) / 2**20 / millions,
    }


def lookup_times(index: BlockIndex, first: int) -> dict[str, float]:
    """Times the match of a prompt of 4,000 blocks that the node has, from `first` on, and of one that it has not."""
    num_blocks = 4000
    found, unknown = _keys(first, first + num_blocks), _keys(9 * first, 9 * first + num_blocks)
    assert index.match(found) == {"": num_blocks}
    assert index.match(unknown) == {"": 0}
    return {
        f"ms for {num_blocks} blocks, all there": _best_ms(index, found),
        f"ms for {num_blocks} blocks, none there": _best_ms(index, unknown),
    }


async def way_of_events(num_events: int, rate: float) -> dict[str, float]:
    """Commits blocks at a directory; times each until the index of a router has it."""
    model = HashModel(LAYOUT, vocab_size=300)
    num_slots = 4096
    directory = Directory(num_slots, block_bytes=LAYOUT.block_bytes)
    arrived: dict[BlockKey, float] = {}
    with tempfile.TemporaryDirectory() as folder:
        server = DirectoryServer(directory, f"{folder}/directory")
        server.start()
        tiers = Tiers(Arena.anonymous(LAYOUT.block_bytes, num_slots), DirectoryClient(f"{folder}/directory"))
        worker = local_worker(model, tiers, "p0", Role.PREFILL, 64)
        await worker.service.start()
        port = WorkerServer(worker.service, ServerSettings(TOKEN))
        line = Line(GrpcTransport(await port.start(), TOKEN))
        members = Members(FINGERPRINT, LAYOUT.encode())
        listed = Worker(WorkerId("p0"), Role.PREFILL, "", WorkerState.READY)
        members.add(Member(worker=listed, info=await line.questions.info(10.0), line=line))
        quiet_s = await _cpu_of_idling()
        feed = IndexFeed(members, TimedIndex(arrived))
        feed.start()
        await asyncio.sleep(1.0)
        watched_s = await _cpu_of_idling()
        draw, sent = random.Random(1), dict[BlockKey, float]()
        for number in range(num_events):
            await asyncio.sleep(draw.expovariate(rate))
            tokens = range(number << 12, (number << 12) + BLOCKS_AN_EVENT * LAYOUT.block_size)
            names = cover(ROOT, tokens, LAYOUT.block_size)
            blocks = committed(directory.reserve("w", names, None).slots, names)
            sent.update((name.key, time.perf_counter()) for name in names)
            directory.commit("w", blocks, None)
        await asyncio.sleep(1.0)
        await feed.stop()
        await line.close(Unavailable("the benchmark is over"))
        await worker.service.close()
        await port.stop()
        worker.close()
        server.stop()
    took_ms = sorted(1e3 * (arrived[key] - sent[key]) for key in sent)
    return {
        "ms from event to placement, p50": took_ms[len(took_ms) // 2],
        "ms from event to placement, p99": took_ms[len(took_ms) * 99 // 100],
        "ms from event to placement, longest": took_ms[-1],
        "share of a core, idle": (watched_s - quiet_s) / IDLE_S,
    }


class TimedIndex(BlockIndex):
    """An index that notes when it has a block."""

    def __init__(self, arrived: dict[BlockKey, float]) -> None:
        super().__init__(LAYOUT)
        self._arrived = arrived

    def take(self, page: worker_pb2.EventPage) -> None:
        super().take(page)
        now_s = time.perf_counter()
        for events in page.events:
            assert index_has(self, events)
            self._arrived.update((BlockKey(key), now_s) for key in events.keys)


def index_has(index: BlockIndex, events: worker_pb2.BlockEvents) -> bool:
    """Whether a request with these blocks would be placed by them."""
    return events.kind != "stored" or index.match([BlockKey(key) for key in events.keys]) == {"": len(events.keys)}


async def _cpu_of_idling() -> float:
    before_s = time.process_time()
    await asyncio.sleep(IDLE_S)
    return time.process_time() - before_s


def _take(index: BlockIndex, changes: list[tuple[str, list[BlockKey]]]) -> None:
    after = index.cursor("")
    page = worker_pb2.EventPage(after=after, cursor=worker_pb2.EventCursor(epoch="e", number=after.number + 1))
    for kind, keys in changes:
        page.events.add(kind=kind, tier="host", keys=keys)
    index.take(page)


def _keys(start: int, end: int) -> list[BlockKey]:
    """Makes keys of any bits, always the same ones of a number."""
    return [BlockKey(hashlib.sha256(number.to_bytes(8, "little")).digest()) for number in range(start, end)]


def _best_ms(index: BlockIndex, keys: list[BlockKey]) -> float:
    times_s = []
    for _ in range(20):
        began_s = time.perf_counter()
        index.match(keys)
        times_s.append(time.perf_counter() - began_s)
    return 1e3 * min(times_s)


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


if __name__ == "__main__":
    main()
