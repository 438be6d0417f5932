"""Host memory as a tier of a library."""

import pytest

from kv_store.tiers.arena_tier import ArenaTier
from tests.harness.fake_clock import FakeClock
from tests.kv_store.names import LAYOUT, got_one, names_of, payload_of, put_one
from wire.errors import ConfigError
from wire.ids import AttemptId

PIN = AttemptId("pin")


def tier_of(num_blocks: int, clock: FakeClock | None = None) -> ArenaTier:
    return ArenaTier(LAYOUT, num_blocks * LAYOUT.block_bytes, clock or FakeClock())


def test_blocks_come_up_to_the_first_that_is_missing() -> None:
    tier, names = tier_of(8), names_of(4 * 5)
    for name in (*names[:3], names[4]):
        assert put_one(tier, name)
    assert tier.exists([name.key for name in names]) == [True, True, True, False, True]
    into = [memoryview(bytearray(LAYOUT.payload_bytes)) for _ in names]
    assert len(list(tier.get(names, into))) == 3
    assert [bytes(one) for one in into[:3]] == [payload_of(name) for name in names[:3]]
    status = tier.status()
    assert (status.hits, status.misses, status.written, status.refused) == (3, 1, 4, 0)


def test_a_second_write_and_a_given_up_read_keep_no_slot() -> None:
    tier, names = tier_of(2), names_of(4 * 2)
    for _ in range(5):
        assert all(put_one(tier, name) for name in names)
        next(blocks := tier.get(names, [memoryview(bytearray(LAYOUT.payload_bytes))] * 2))
        blocks.close()
    tier.delete([name.key for name in names])
    others = names_of(4 * 2, first=50)
    assert all(put_one(tier, name) for name in others)
    assert all(got_one(tier, name) for name in others)
    assert tier.status().written == 4


def test_a_hold_ends_with_its_time() -> None:
    clock = FakeClock()
    tier, [held], [other] = tier_of(1, clock), names_of(4), names_of(4, first=50)
    assert tier.hold(PIN, held, memoryview(payload_of(held)), ttl_s=60.0)
    assert not put_one(tier, other)
    assert tier.status().refused == 1
    clock.now += 59.0
    assert not put_one(tier, other)
    clock.now += 2.0
    assert put_one(tier, other)
    tier.release(PIN)
    assert got_one(tier, other)


def test_memory_for_no_block_is_refused() -> None:
    with pytest.raises(ConfigError, match=f"takes {LAYOUT.block_bytes} bytes"):
        ArenaTier(LAYOUT, LAYOUT.block_bytes - 1)
