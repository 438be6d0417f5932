"""Blocks to test with: names of real tokens, and payloads that follow from the names, so that any mix-up shows."""

import hashlib
from collections.abc import Sequence

import torch

from kv_store.device_pool import DevicePool
from wire.directory import Block
from wire.ids import NamespaceRoot, PageId
from wire.keys import BlockName, cover
from wire.layout import KVLayout

LAYOUT = KVLayout(num_layers=2, num_kv_heads=1, head_dim=8, block_size=4, dtype="float32")
ROOT = NamespaceRoot(b"R" * 32)


class FakeClock:
    """Stands still until told."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def names_of(num_tokens: int, first: int = 0) -> list[BlockName]:
    """Names of the blocks of `num_tokens` tokens, the tail included; `first` tells one sequence from another."""
    return cover(ROOT, range(first, first + num_tokens), LAYOUT.block_size)


def payload_of(name: BlockName) -> bytes:
    return hashlib.shake_256(name.key).digest(LAYOUT.payload_bytes)


def filled_pool(names: Sequence[BlockName], num_pages: int = 64) -> DevicePool:
    """A pool with these blocks in its first pages."""
    pool = DevicePool(LAYOUT, num_pages, torch.device("cpu"))
    for page, name in enumerate(names):
        pool.write_page(PageId(page), memoryview(payload_of(name)))
    return pool


def pages_from(first: int, num_pages: int) -> list[PageId]:
    return [PageId(page) for page in range(first, first + num_pages)]


def page_of(pool: DevicePool, page: PageId) -> bytes:
    data = bytearray(LAYOUT.payload_bytes)
    pool.read_page(page, memoryview(data))
    return bytes(data)


def committed(slots: Sequence[PageId | None], names: Sequence[BlockName]) -> list[Block]:
    """What a writer commits for the slots it got."""
    return [Block(slot, name, name.key[:16]) for slot, name in zip(slots, names, strict=True) if slot is not None]
