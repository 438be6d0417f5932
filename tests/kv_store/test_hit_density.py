import random

from kv_store.eviction.ghosts import Ghosts
from kv_store.eviction.hit_density import HitDensity
from kv_store.eviction.order import Priority
from kv_store.eviction.policy import LeastRecentlyUsed
from kv_store.ledger import Ledger
from wire.ids import BlockKey, PageId


def key(number: int) -> BlockKey:
    return BlockKey(random.Random(number).randbytes(32))


def read(ledger: Ledger[PageId], block: int) -> bool:
    """Reads a block as a request does: a hit is acquired and freed, a miss computed and published."""
    page = ledger.find(key(block))
    if page is None:
        [new] = ledger.allocate(1)
        ledger.index(new, key(block))
        ledger.free(new)
        return False
    ledger.acquire(page)
    ledger.free(page)
    return True


def hits(ledger: Ledger[PageId], num_reads: int) -> int:
    """Half of the reads are of 40 blocks in turn, half of blocks that come once; counts hits of the second half."""
    reads = [read(ledger, index % 80 if index % 4 < 2 else 1_000 + index) for index in range(num_reads)]
    assert ledger.check() == []
    return sum(reads[num_reads // 2 :])


def test_blocks_that_never_come_back_do_not_push_out_blocks_that_do() -> None:
    assert hits(Ledger[PageId](50, policy=LeastRecentlyUsed), 8_000) == 0
    assert hits(Ledger[PageId](50, policy=HitDensity), 8_000) > 1_500


def test_traffic_that_changes_is_followed() -> None:
    ledger = Ledger[PageId](50, policy=HitDensity)
    for index in range(20_000):
        read(ledger, index % 40)
    other = [read(ledger, 10_000 + index % 40) for index in range(4_000)]
    assert sum(other[2_000:]) > 1_900


def test_an_order_that_knows_nothing_yet_is_by_last_use() -> None:
    ledger = Ledger[PageId](4, policy=HitDensity)
    for block in (1, 2, 3, 4, 1, 5):
        read(ledger, block)
    assert [ledger.find(key(block)) is not None for block in (1, 2, 3, 4, 5)] == [True, False, True, True, True]


def test_ghosts_return_a_number_once_and_give_way_to_newer_ones() -> None:
    ghosts = Ghosts(1)
    assert ghosts.remember(key(1), 7) is None
    assert ghosts.take(key(2)) is None
    assert ghosts.remember(key(2), 8) == 7
    assert [ghosts.take(key(1)), ghosts.take(key(2)), ghosts.take(key(2))] == [None, 8, None]


def test_queues_stay_as_long_as_the_pool_while_other_pages_are_evicted() -> None:
    """Pages that change their class and leave unevicted, beside tails that are evicted before all of them."""
    ledger, rng = Ledger[PageId](64, policy=HitDensity), random.Random(3)
    for number, page in enumerate(ledger.allocate(64)):
        ledger.index(page, key(number), Priority.COPIED if number < 32 else Priority.LEAST)
        ledger.free(page)
    for number in range(64, 2_000):
        [page] = ledger.allocate(1)
        ledger.index(page, key(number))
        ledger.free(page)
        for _ in range(rng.choice((0, 2, 5, 12))):
            ledger.order.touch(page)
        ledger.unindex(page)
        [tail] = ledger.allocate(1)
        ledger.index(tail, key(number + 10_000), Priority.LEAST)
        ledger.free(tail)
    assert ledger.check() == []
