"""Hints of requests in a directory of eight slots: kept blocks, superseded ones, and the limits of both."""

import math
import random
from collections.abc import Sequence

import pytest

from kv_store.eviction.hit_density import HitDensity
from kv_store.eviction.order import EvictionOrder, Priority, StartFirst
from kv_store.eviction.policy import LeastRecentlyUsed
from kv_store.ledger import Ledger
from kv_store.node.directory import Directory
from kv_store.node.directory_port import CALLS
from kv_store.node.messages import KeepHint
from kv_store.node.sessions import KeepLimits
from tests.harness.fake_clock import FakeClock
from tests.kv_store.names import committed
from wire.block_names import BlockName, cover, digest_of, session_of
from wire.errors import WireError
from wire.ids import BlockKey, NamespaceRoot, PageId
from wire.tier import Tier, Write

ROOT, OTHER_ROOT = NamespaceRoot(b"a" * 32), NamespaceRoot(b"b" * 32)
PREFIX = tuple(range(100, 108))


def names_of(tokens: Sequence[int], root: NamespaceRoot = ROOT) -> list[BlockName]:
    return cover(root, tokens, 4)


def prompt(first: int, num_blocks: int) -> list[BlockName]:
    return names_of(range(first, first + 4 * num_blocks))


def hint(session: str = "s", keep_s: float | None = None, root: NamespaceRoot = ROOT) -> KeepHint:
    return KeepHint(digest_of(root), session_of(root, session) if session else b"", keep_s)


class Arena:
    """A directory whose books are checked after each call."""

    def __init__(self, num_slots: int = 8, limits: KeepLimits | None = None, **parts: object) -> None:
        self.clock = FakeClock()
        self.directory = Directory(num_slots, self.clock, keeps=limits or KeepLimits(share=1.0), **parts)  # type: ignore[arg-type]

    def publish(self, names: list[BlockName]) -> None:
        blocks = committed(self.directory.reserve("w", names, None).slots, names)
        self.directory.commit("w", blocks, None)
        assert self.directory.records.check() == []

    def end(self, names: list[BlockName], ended: KeepHint) -> int:
        """Publishes the blocks of a request, and passes on its hint."""
        self.publish(names)
        num_kept = self.directory.records.keep([name.key for name in names], ended)
        assert self.directory.records.check() == []
        assert self.directory.records.status().num_kept >= num_kept
        return num_kept

    def num_of(self, names: list[BlockName]) -> int:
        return sum(self.directory.records.exists([name.key for name in names]))


@pytest.mark.parametrize("policy", [LeastRecentlyUsed, HitDensity])
@pytest.mark.parametrize("order", [EvictionOrder, StartFirst])
def test_kept_blocks_outlive_later_ones_for_their_time(order: type, policy: type) -> None:
    arena = Arena(order=order, policy=policy)
    kept = prompt(0, 3)
    assert arena.end(kept, hint(keep_s=10.0)) == 3
    for first in range(1000, 5000, 1000):
        arena.publish(prompt(first, 4))
    assert arena.num_of(kept) == 3
    arena.clock.now += 10.0
    arena.publish(prompt(6000, 4))
    arena.publish(prompt(7000, 4))
    assert (arena.num_of(kept), arena.directory.records.status().num_kept) == (0, 0)


def test_a_request_without_a_session_is_kept_too() -> None:
    arena = Arena()
    kept = prompt(0, 3)
    assert arena.end(kept, hint("", keep_s=10.0)) == 3
    arena.publish(prompt(1000, 4))
    arena.publish(prompt(2000, 4))
    assert arena.num_of(kept) == 3


def test_kept_blocks_with_the_latest_end_go_first_and_all_before_an_error() -> None:
    arena = Arena()
    late, soon = prompt(0, 4), prompt(1000, 4)
    arena.end(late, hint("late", 500.0))
    arena.end(soon, hint("soon", 5.0))
    arena.publish(prompt(2000, 2))
    assert (arena.num_of(late), arena.num_of(late[:2]), arena.num_of(soon)) == (2, 2, 4)
    arena.publish(prompt(3000, 8))
    assert arena.num_of(soon) == 0, "a hint is no hold"


def test_the_latest_end_of_all_tenants_goes_first() -> None:
    arena = Arena()
    arena.directory.records.set_shares({(digest_of(ROOT),): 0.5, (digest_of(OTHER_ROOT),): 0.5})
    soon, late = prompt(0, 4), names_of(range(16), OTHER_ROOT)
    arena.end(soon, hint(keep_s=5.0))
    arena.end(late, hint(keep_s=500.0, root=OTHER_ROOT))
    arena.publish(names_of(range(8), NamespaceRoot(b"c" * 32)))
    assert (arena.num_of(soon), arena.num_of(late)) == (4, 2)


def test_a_page_that_is_kept_for_longer_takes_its_new_place() -> None:
    ledger = Ledger[PageId](3)
    pages = ledger.allocate(3)
    for number, page in enumerate(pages):
        ledger.index(page, BlockKey(bytes([number]) * 32))
        ledger.free(page)
        ledger.order.keep(page, 10.0 * number)
    assert ledger.order.first() == pages[2]
    ledger.order.keep(pages[0], 500.0)
    assert (ledger.order.first(), ledger.check()) == (pages[0], [])
    ledger.order.keep(pages[0], 1.0)
    assert ledger.order.first() == pages[2]


def test_the_next_request_of_a_session_renews_and_supersedes() -> None:
    arena = Arena()
    first, fork = names_of((*PREFIX, *range(12))), names_of((*PREFIX, *range(500, 508)))
    arena.end(first, hint(keep_s=10.0))
    assert arena.end(fork, hint(keep_s=10.0)) == 4
    assert arena.directory.records.status().num_kept == 4, "what the fork has left is kept no more"
    arena.publish(prompt(2000, 4))
    assert (arena.num_of(first[2:]), arena.num_of(fork)) == (0, 4)


def test_superseded_blocks_go_before_older_ones() -> None:
    arena = Arena()
    old = prompt(3000, 2)
    arena.publish(old)
    first, fork = names_of((*PREFIX, *range(8))), names_of((*PREFIX, *range(500, 508)))
    arena.end(first, hint())
    arena.end(fork, hint())
    arena.publish(prompt(2000, 2))
    assert (arena.num_of(first[2:]), arena.num_of(old), arena.num_of(fork)) == (0, 2, 4)


def test_a_superseded_block_that_is_read_is_one_like_any_other() -> None:
    arena = Arena()
    first, fork = names_of((*PREFIX, *range(8))), names_of((*PREFIX, *range(500, 508)))
    arena.end(first, hint())
    arena.end(fork, hint())
    arena.directory.release(arena.directory.lease("r", [name.key for name in first], 5.0).lease_id)
    arena.publish(prompt(2000, 4))
    assert arena.num_of(first) == 4


def test_a_session_that_ends_gives_way() -> None:
    arena = Arena()
    old, ended = prompt(3000, 2), prompt(0, 4)
    arena.publish(old)
    arena.end(ended, hint(keep_s=100.0))
    assert arena.end(ended, hint(keep_s=0.0)) == 0
    arena.publish(prompt(2000, 4))
    assert (arena.num_of(ended), arena.num_of(old)) == (2, 2)


def test_without_a_session_nothing_is_superseded() -> None:
    arena = Arena()
    old, ended = prompt(3000, 2), prompt(0, 4)
    arena.publish(old)
    assert arena.end(ended, hint("", keep_s=0.0)) == 0
    arena.publish(prompt(2000, 4))
    assert (arena.num_of(ended), arena.num_of(old)) == (4, 0)


def test_what_another_session_has_used_is_not_superseded() -> None:
    arena = Arena()
    shared = names_of(PREFIX)
    arena.end(names_of((*PREFIX, *range(4))), hint("a"))
    arena.end(names_of((*PREFIX, *range(500, 504))), hint("b"))
    arena.end(prompt(3000, 1), hint("b"))
    arena.end(prompt(4000, 1), hint("a"))
    arena.directory.records.keep([], hint("a", 0.0))
    arena.publish(prompt(2000, 5))
    assert arena.num_of(shared) == 2, "there were two free slots, and three superseded blocks"


def test_hints_touch_no_block_of_another_tenant() -> None:
    arena = Arena()
    theirs = names_of(range(16), OTHER_ROOT)
    arena.publish(theirs)
    assert session_of(ROOT, "s") != session_of(OTHER_ROOT, "s")
    arena.end(theirs, hint(root=OTHER_ROOT))
    assert arena.end(theirs, hint(keep_s=100.0)) == 0, "no block is under the root of the hint"
    arena.end(prompt(0, 2), hint(keep_s=0.0))
    arena.publish(prompt(2000, 4))
    assert arena.num_of(theirs) == 4, "the session of one name is another one"


def test_years_count_as_the_longest_time() -> None:
    arena = Arena(limits=KeepLimits(max_keep_s=60.0, share=1.0))
    kept = prompt(0, 3)
    arena.end(kept, hint(keep_s=1e300))
    arena.clock.now += 60.0
    assert (arena.directory.records.status().num_kept, arena.directory.records.check()) == (0, [])


@pytest.mark.parametrize("share", [0.0, 0.25, 1.0])
def test_a_tenant_keeps_its_share_however_many_sessions_it_has(share: float) -> None:
    arena = Arena(limits=KeepLimits(share=share))
    for nth in range(5):
        arena.end(prompt(1000 * nth, 3), hint(f"session {nth}", 100.0))
        assert arena.directory.records.status().num_kept == min(3 * nth + 3, 8 * share, 8)
    theirs = names_of(range(8), OTHER_ROOT)
    assert arena.end(theirs, hint(keep_s=5.0, root=OTHER_ROOT)) == (2 if share else 0), "each has its own share"


def test_beyond_the_share_the_longest_hints_count_for_nothing() -> None:
    arena = Arena(limits=KeepLimits(share=0.5))
    honest, liar = prompt(0, 3), prompt(1000, 3)
    assert arena.end(liar, hint("liar", 1e9)) == 3
    assert arena.end(honest, hint("honest", 20.0)) == 3
    assert arena.directory.records.status().num_kept == 4
    assert arena.end(liar, hint("liar", 1e9)) == 1
    arena.publish(prompt(2000, 4))
    assert (arena.num_of(honest), arena.num_of(liar), arena.num_of(liar[:1])) == (3, 1, 1)


def test_of_a_tenant_with_a_share_of_the_arena_it_is_a_share_of_that() -> None:
    arena = Arena(limits=KeepLimits(share=0.5))
    arena.directory.records.set_shares({(digest_of(ROOT),): 0.5})
    assert arena.end(prompt(0, 4), hint(keep_s=5.0)) == 2


def test_kept_blocks_beyond_a_share_go_before_blocks_of_others() -> None:
    arena = Arena()
    arena.directory.records.set_shares({(digest_of(ROOT),): 0.25})
    kept, theirs = prompt(0, 4), names_of(range(16), OTHER_ROOT)
    arena.end(kept, hint(keep_s=100.0))
    arena.publish(theirs)
    arena.publish(names_of(range(2000, 2008), OTHER_ROOT))
    assert (arena.num_of(kept), arena.num_of(theirs)) == (2, 4)


def test_superseded_blocks_are_not_demoted_and_kept_ones_may_be() -> None:
    arena = Arena(high_water=0.0, writes={Tier.REDIS: Write.DEMOTED})
    first, fork = names_of((*PREFIX, *range(8))), names_of((*PREFIX, *range(500, 508)))
    arena.end(first, hint(keep_s=100.0))
    arena.end(fork, hint(keep_s=100.0))
    batch = arena.directory.lease_cold(Tier.REDIS, 8, 5.0)
    assert {block.name.key for block in batch.blocks} == {name.key for name in fork}
    arena.directory.release(batch.lease_id)
    arena.directory.records.mark_cold(Tier.REDIS, [name.key for name in (*first, *fork)], [])
    arena.publish(prompt(2000, 2))
    assert (arena.num_of(first[2:]), arena.num_of(fork)) == (2, 4), "two slots were free"
    arena.publish(prompt(3000, 2))
    assert (arena.num_of(first[2:]), arena.num_of(fork)) == (0, 4), "with a copy or without, superseded ones go first"


@pytest.mark.parametrize("keep_s", [-1.0, math.nan, math.inf])
@pytest.mark.parametrize("session", [b"", b"s" * 32])
def test_times_that_are_none_cross_no_socket(keep_s: float, session: bytes) -> None:
    call = CALLS.encode_call("keep", ([], KeepHint(b"n" * 32, session, keep_s)))
    with pytest.raises(WireError):
        CALLS.decode_call(call[4:])


def test_sessions_that_are_no_digests_cross_no_socket() -> None:
    call = CALLS.encode_call("keep", ([], KeepHint(b"n" * 32, b"s", 1.0)))
    with pytest.raises(WireError):
        CALLS.decode_call(call[4:])


def test_many_hints_leave_no_more_than_the_slots() -> None:
    """Each of another session, or of none; the books stay as large as the arena."""
    arena, rng = Arena(), random.Random(1)
    for nth in range(3_000):
        names = prompt(4 * rng.randrange(6), rng.randint(1, 3))
        blocks = committed(arena.directory.reserve("w", names, None).slots, names)
        arena.directory.commit("w", blocks, None)
        session = "" if rng.random() < 0.3 else f"session {nth}"
        arena.directory.records.keep([name.key for name in names], hint(session, rng.choice([None, 0.0, 1.0, 1e9])))
    assert arena.directory.records.check() == []


def test_kept_pages_of_a_pool_go_last_and_the_books_hold() -> None:
    """Random calls; a kept page is evicted only where no other of its priority may be."""
    rng, ledger = random.Random(5), Ledger[PageId](32, policy=HitDensity)
    ends: dict[PageId, float] = {}
    num_kept_first = 0
    for number in range(4_000):
        [page] = ledger.allocate(1)
        ledger.index(page, BlockKey(number.to_bytes(32, "big")), rng.choice([*Priority]))
        ledger.free(page)
        chosen = PageId(rng.randrange(32))
        if ledger.key_of(chosen) is not None:
            ledger.order.end_keep(chosen)
            if rng.random() < 0.7:
                ends[chosen] = rng.random() * 1000
                ledger.order.keep(chosen, ends[chosen])
        victim = ledger.order.first()
        assert victim is not None
        rank = [one for one in ledger.pages if ledger.order.priority_of(one) is ledger.order.priority_of(victim)]
        if ledger.order.is_kept(victim):
            others = [one for one in rank if one in ledger.order]
            assert all(ledger.order.is_kept(one) and ends[one] <= ends[victim] + 0.001 for one in others)
            num_kept_first += 1
    assert num_kept_first > 50
    assert ledger.check() == []
