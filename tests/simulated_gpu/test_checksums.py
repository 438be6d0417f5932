"""Checksums of pages on the simulated GPU: as a host computes them; a spoilt block is refused after its copy."""

import logging
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from kv_store.block_store import ReadResult
from kv_store.device_pool import DevicePool
from kv_store.frame import checksum_of
from kv_store.node import arena
from kv_store.transfers import Fetch, WriteThrough
from tests.harness.node import Node
from tests.kv_store.names import LAYOUT, names_of
from tests.simulated_gpu.device import SIM
from tests.simulated_gpu.triton_kernels import triton_kernels
from wire.ids import PageId
from wire.layout import KVLayout
from wire.tier import Cause, Miss, Tier

NUM_BLOCKS = 6
FILLS_SLOTS = replace(LAYOUT, block_size=64)
"""A layout whose payloads lie in slots without a gap, so that one copy takes several."""
NO_WORDS = KVLayout(1, 1, 1, 1, "bfloat16")
"""A layout whose payloads are no whole words, which the host sums."""
PAGES = [PageId(page) for page in (3, 4, 5, 0, 2, 1)]


@pytest.fixture(autouse=True, params=["torch", "triton"])
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(arena, "GPU_CONTROLS", (Path("/dev/null"),))
    with triton_kernels() if request.param == "triton" else nullcontext():
        yield


def drawn_pool(layout: KVLayout, device: torch.device) -> DevicePool:
    pool = DevicePool(layout, NUM_BLOCKS, device)
    with torch.accelerator.device_index(device.index):
        for page in PAGES:
            payload = torch.randint(0, 256, (layout.payload_bytes,), dtype=torch.uint8)
            pool.page_bytes(page).copy_(payload)
        pool.fence()
    return pool


@pytest.mark.parametrize("layout", [LAYOUT, FILLS_SLOTS, NO_WORDS], ids=["padded", "dense", "no words"])
def test_a_device_and_a_host_compute_one_checksum(layout: KVLayout) -> None:
    pool = drawn_pool(layout, SIM)
    into = memoryview(bytearray(layout.payload_bytes))
    for _ in range(2):
        for page, checksum in zip(PAGES, pool.begin_checksums(PAGES)(), strict=True):
            pool.read_pages(page, into)
            pool.wait()
            assert checksum == checksum_of(into)


@pytest.mark.parametrize("layout", [LAYOUT, FILLS_SLOTS, NO_WORDS], ids=["padded", "dense", "no words"])
def test_pages_come_from_one_device_to_another(layout: KVLayout) -> None:
    source, target = (drawn_pool(layout, torch.device("sim", index)) for index in range(2))
    read = hand_over(layout, source, target, Node(layout))
    assert read.blocks == [Tier.HOST] * NUM_BLOCKS
    for page, copied in zip(PAGES, reversed(PAGES), strict=True):
        assert torch.equal(source.page_bytes(page).cpu(), target.page_bytes(copied).cpu())


@pytest.mark.parametrize("layout", [LAYOUT, FILLS_SLOTS], ids=["padded", "dense"])
def test_a_slot_spoilt_after_its_publish_is_refused_on_the_device(
    layout: KVLayout, caplog: pytest.LogCaptureFixture
) -> None:
    """The block is a miss with its reason, named in the log, and in no index; the blocks before it are right."""
    source, target = (drawn_pool(layout, torch.device("sim", index)) for index in range(2))
    node, names = Node(layout), names_of(NUM_BLOCKS * LAYOUT.block_size)[:NUM_BLOCKS]

    def spoil() -> None:
        [entry] = node.directory.lease("test", [names[3].key], 1.0).entries
        assert entry is not None
        node.arena.slot(entry.slot)[layout.payload_bytes - 1] ^= 0x80

    with caplog.at_level(logging.WARNING):
        read = hand_over(layout, source, target, node, spoil)
    assert read.tiers == [Tier.HOST] * 3
    assert read.blocks[3:5] == [Miss(Cause.LOAD_FAILED, "its checksum in the arena was wrong"), Miss(Cause.BEHIND)]
    assert f"block {names[3].key.hex()[:16]} of tier host came to its page with a wrong checksum" in caplog.text
    assert node.directory.records.exists([name.key for name in names]) == [True] * 3 + [False, True, True]


def hand_over(
    layout: KVLayout, source: DevicePool, target: DevicePool, node: Node, between: Callable[[], None] = lambda: None
) -> ReadResult:
    """Publishes the pages of a pool, and fetches them into the pages of another in the opposite order."""
    names = names_of(NUM_BLOCKS * LAYOUT.block_size)[:NUM_BLOCKS]
    node.transfers(source).begin(WriteThrough(names, PAGES))
    between()
    fetching = node.transfers(target)
    with torch.accelerator.device_index(1):
        fetching.begin(Fetch(names, PAGES[::-1]))
    [done] = fetching.poll()
    return done.reading
