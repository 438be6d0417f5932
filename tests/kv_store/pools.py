"""Pools whose pages hold known blocks."""

from collections.abc import Sequence

import torch

from kv_store.device_pool import DevicePool
from tests.kv_store.names import LAYOUT, payload_of
from wire.block_names import BlockName
from wire.ids import PageId


def filled_pool(names: Sequence[BlockName], num_pages: int = 64) -> DevicePool:
    """A pool with these blocks in its first pages."""
    pool = DevicePool(LAYOUT, num_pages, torch.device("cpu"))
    for page, name in enumerate(names):
        pool.write_pages(PageId(page), memoryview(payload_of(name)))
    return pool


def pages_from(first: int, num_pages: int) -> list[PageId]:
    return [PageId(page) for page in range(first, first + num_pages)]


def page_of(pool: DevicePool, page: PageId) -> bytes:
    data = bytearray(LAYOUT.payload_bytes)
    pool.read_pages(page, memoryview(data))
    return bytes(data)
