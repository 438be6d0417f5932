"""Blocks between a device's pages and the node's pinned arena, against one long copy of pinned memory each way.

A publish copies pages out and takes their checksums, a fetch copies pages in and verifies them there.

    python3 -m benchmarks.gpu_store      both as shares of the copy; ends in 30 s
"""

import random
import sys
import time
from collections.abc import Callable, Iterator
from statistics import median

import torch

from benchmarks.gpu_timing import Row
from kv_store.device_pool import DevicePool
from kv_store.node.arena import Arena
from kv_store.node.directory import Directory
from kv_store.node_store import NodeStore
from wire.block_names import NameChain
from wire.ids import NamespaceRoot, PageId
from wire.layout import KVLayout

DEVICE = torch.device("cuda")
LAYOUTS = {
    "8B": KVLayout(32, 8, 128, 16, "bfloat16", "none"),
    "135M": KVLayout(30, 3, 64, 16, "bfloat16", "none"),
}
NUM_BLOCKS = 256
NUM_ROUNDS = 7


def measure() -> Iterator[Row]:
    """Rows of a publish and a fetch of 256 blocks, by wall time; first neighbours, then pages in a drawn order."""
    for name, layout in LAYOUTS.items():
        yield from _measure(name, layout, [*range(NUM_BLOCKS)])
        yield from _measure(f"{name}, scattered", layout, random.Random(0).sample(range(NUM_BLOCKS), NUM_BLOCKS))


def _measure(name: str, layout: KVLayout, order: list[int]) -> Iterator[Row]:
    arena, directory = Arena.anonymous(layout.block_bytes, NUM_BLOCKS), Directory(NUM_BLOCKS)
    pool = DevicePool(layout, 2 * NUM_BLOCKS, DEVICE)
    store = NodeStore(layout, arena, directory, [], pool)
    num_tokens = NUM_BLOCKS * layout.block_size
    chain = NameChain(NamespaceRoot(bytes(32)), layout.block_size)
    chain.extend(range(num_tokens))
    names = chain.full(num_tokens)
    pages = [PageId(page) for page in order]
    targets = [PageId(NUM_BLOCKS + page) for page in order]
    for page in pages:
        pool.page_bytes(page).random_(0, 256)
    host = torch.empty(NUM_BLOCKS * layout.payload_bytes, dtype=torch.uint8, pin_memory=True)
    device = torch.empty_like(host, device=DEVICE)

    def publish() -> None:
        if store.write_through(names, pages, None) < NUM_BLOCKS:
            raise RuntimeError("not all blocks are in the arena")

    def fetch() -> None:
        if len(store.fetch(names, targets).tiers) < NUM_BLOCKS:
            raise RuntimeError("not all blocks were found")

    def checksums() -> None:
        for start in range(0, NUM_BLOCKS, pool.num_copied_at_once):
            pool.begin_checksums(pages[start : start + pool.num_copied_at_once])()

    rounds = []
    for _ in range(NUM_ROUNDS):
        directory.reject(directory.state.blocks())
        rounds.append(
            {
                "out": _time(lambda: host.copy_(device, non_blocking=True)),
                "publish": _time(publish),
                "in": _time(lambda: device.copy_(host, non_blocking=True)),
                "fetch": _time(fetch),
                "checksums": _time(checksums),
            }
        )
    seconds = {key: median(one[key] for one in rounds) for key in rounds[0]}
    if not all(torch.equal(pool.page_bytes(a), pool.page_bytes(b)) for a, b in zip(pages, targets, strict=True)):
        raise RuntimeError("a fetched page differs from the published one")
    of_sums = seconds["checksums"]
    shape = f"{NUM_BLOCKS} of {layout.payload_bytes // 1024} KiB"
    yield Row(f"publish {name}", shape, seconds["publish"], seconds["out"], "pinned copy", "its checksums", of_sums)
    yield Row(f"fetch {name}", shape, seconds["fetch"], seconds["in"], "pinned copy", "its checksums", of_sums)


def _time(work: Callable[[], object]) -> float:
    torch.cuda.synchronize()
    start = time.perf_counter()
    work()
    torch.cuda.synchronize()
    return time.perf_counter() - start


if __name__ == "__main__":
    sys.stdout.write(f"{torch.cuda.get_device_name()}, torch {torch.__version__}\n")
    for row in measure():
        words = f"{row.name}, {row.shape}: {1e3 * row.seconds:.2f} ms, {row.ceiling} {1e3 * row.floor_s:.2f}"
        sys.stdout.write(f"{words}: {row.of_ceiling:.2f} of it; {row.peer} {1e3 * row.peer_s:.2f}\n")
