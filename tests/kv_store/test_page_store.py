"""The store of an engine without a node, beside that of a worker."""

import random

import torch

from kv_store.device_pool import DevicePool
from kv_store.node.arena import Arena
from kv_store.node.directory import Directory
from kv_store.node_store import NodeStore
from kv_store.page_store import PageStore
from kv_store.prefix.plan import Needs
from kv_store.prefix.tier_list import TierList
from kv_store.tiers.arena_tier import ArenaTier
from kv_store.tiers.memory_tier import MemoryTier
from tests.kv_store.names import LAYOUT, names_of, payload_of, put_one
from tests.kv_store.pools import filled_pool, page_of, pages_from
from wire.ids import AttemptId, PageId
from wire.tier import Cause, Miss, Tier

NAMES = names_of(4 * 6 + 1)


def test_blocks_come_back_without_the_tail() -> None:
    pool = filled_pool(NAMES)
    tier = MemoryTier(LAYOUT)
    store = PageStore(TierList([tier]), pool)
    assert store.write_through(NAMES, pages_from(0, 7), None) == 6
    assert store.fetch(NAMES, pages_from(20, 7)).tiers == [Tier.REDIS] * 6
    assert [page_of(pool, page) for page in pages_from(20, 6)] == [payload_of(name) for name in NAMES[:6]]
    assert not any(page_of(pool, PageId(26)))
    assert (tier.status().hits, tier.status().misses) == (6, 0)


def test_a_fetch_ends_at_the_first_block_that_no_tier_has_and_fills_no_further_page() -> None:
    pool = filled_pool(NAMES)
    near, far = ArenaTier(LAYOUT, 64 * LAYOUT.block_bytes), MemoryTier(LAYOUT)
    assert all([put_one(near, NAMES[0]), put_one(far, NAMES[1]), put_one(near, NAMES[2]), put_one(far, NAMES[3])])
    store = PageStore(TierList([near, far]), pool)
    assert store.fetch(NAMES, pages_from(20, 7)).tiers == [Tier.HOST, Tier.REDIS, Tier.HOST, Tier.REDIS]
    assert store.fetch(NAMES[:2], pages_from(20, 1)).tiers == [Tier.HOST]
    assert store.fetch(NAMES, pages_from(20, 7)).tiers == [Tier.HOST] * 4
    assert not any(page_of(pool, PageId(24)))


def test_causes_are_a_partial_block_and_a_memory_that_reaches_back_to_nothing() -> None:
    store = PageStore(TierList([MemoryTier(LAYOUT)]), filled_pool(NAMES))
    blocks = store.fetch(NAMES[-2:], pages_from(0, 2)).blocks
    assert blocks == [Miss(Cause.NO_LONGER_KNOWN), Miss(Cause.PARTIAL)]


def test_purged_blocks_are_in_no_tier() -> None:
    tiers = TierList([ArenaTier(LAYOUT, 64 * LAYOUT.block_bytes), MemoryTier(LAYOUT)])
    store = PageStore(tiers, filled_pool(NAMES))
    store.write_through(NAMES[:3], pages_from(0, 3), None)
    store.purge(NAMES[1:])
    assert tiers.exists(NAMES[:3]) == [True, False, False]


def test_windows_find_the_same_blocks_as_in_the_store_of_a_node() -> None:
    draw = random.Random(0)
    for _ in range(300):
        names = NAMES[:6]
        starts = sorted(draw.randrange(place + 1) for place in range(6))
        starts = [min(start, place) for place, start in enumerate(starts)]
        here = [name for name in names if draw.random() < 0.6]
        tier = MemoryTier(LAYOUT)
        for name in here:
            put_one(tier, name)
        pool = DevicePool(LAYOUT, 8, torch.device("cpu"))
        arena = Arena.anonymous(LAYOUT.block_bytes, 8)
        node = NodeStore(LAYOUT, arena, Directory(8, block_bytes=LAYOUT.block_bytes), [tier], pool)
        found = [
            store.fetch(names, pages_from(0, 6), needs=Needs(starts))
            for store in (PageStore(TierList([tier]), pool), node)
        ]
        places = [[place for place, block in enumerate(one.blocks) if isinstance(block, Tier)] for one in found]
        assert places[0] == places[1]


def test_an_engine_alone_writes_whatever_the_hold() -> None:
    tiers = TierList([MemoryTier(LAYOUT)])
    PageStore(tiers, filled_pool(NAMES)).write_through(NAMES[:2], pages_from(0, 2), AttemptId("a/1"))
    assert [one.written for one in tiers.status()] == [2]
