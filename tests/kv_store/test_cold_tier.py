"""The contract of a cold tier: of the twin in memory, of Redis, and of files."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import redis

from kv_store.frame import FrameSeal, checksum_of
from kv_store.tiers.cold_tier import ColdTier
from kv_store.tiers.contents import Selection, clear, find
from kv_store.tiers.files_tier import FilesTier
from kv_store.tiers.memory_tier import MemoryTier
from kv_store.tiers.redis_tier import RedisTier
from tests.kv_store.names import LAYOUT, MAC_KEY, got_one, names_of, payload_of, put_one
from wire.block_names import BlockName, cover, digest_of
from wire.ids import NamespaceRoot
from worker.store_control import Tally


@dataclass
class Cold:
    """A tier, and the means to see and change what is stored in it."""

    tier: ColdTier
    stored: Callable[[BlockName], bytes | None]
    tamper: Callable[[BlockName, bytes], object]

    def put(self, name: BlockName) -> None:
        assert put_one(self.tier, name)

    def get(self, name: BlockName) -> bytes | None:
        return payload_of(name) if got_one(self.tier, name) else None


def in_memory() -> Iterator[Cold]:
    tier = MemoryTier(LAYOUT)
    yield Cold(tier, lambda name: tier.frames.get(name.key), lambda name, value: tier.frames.update({name.key: value}))
    tier.close()


def in_redis(url: str) -> Iterator[Cold]:
    tier = RedisTier(url, LAYOUT, MAC_KEY, timeout_s=10.0)
    with redis.Redis.from_url(url) as client:
        client.flushdb()
        yield Cold(
            tier,
            lambda name: client.get(b"baton:kv:" + name.key),
            lambda name, value: client.set(b"baton:kv:" + name.key, value),
        )
    tier.close()


def in_files(folder: Path) -> Iterator[Cold]:
    tier = FilesTier(str(folder), LAYOUT, MAC_KEY, timeout_s=10.0, max_bytes=64 << 20)

    def path_of(name: BlockName) -> Path:
        return folder / name.key.hex()[:2] / name.key.hex()

    def tamper(name: BlockName, value: bytes) -> None:
        path_of(name).parent.mkdir(exist_ok=True)
        path_of(name).write_bytes(value)

    yield Cold(tier, lambda name: path_of(name).read_bytes() if path_of(name).exists() else None, tamper)
    tier.close()


@pytest.fixture(params=["memory", pytest.param("redis", marks=pytest.mark.redis), "files"])
def cold(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Cold]:
    makers: dict[str, Callable[[], Iterator[Cold]]] = {
        "memory": in_memory,
        "redis": lambda: in_redis(request.getfixturevalue("redis_url") + "?db=5"),
        "files": lambda: in_files(tmp_path),
    }
    yield from makers[request.param]()


def test_a_block_comes_back(cold: Cold) -> None:
    names = names_of(12)
    for name in names[:2]:
        cold.put(name)
    assert cold.tier.exists([name.key for name in names]) == [True, True, False]
    assert [cold.get(name) for name in names] == [payload_of(names[0]), payload_of(names[1]), None]
    status = cold.tier.status()
    assert (status.state, status.hits, status.misses, status.errors, status.corrupt, status.written) == (
        "up", 2, 1, 0, 0, 2,
    )  # fmt: skip


def test_nothing_is_asked_for_nothing(cold: Cold) -> None:
    assert cold.tier.exists([]) == []
    cold.tier.delete([])


def test_what_is_deleted_is_gone(cold: Cold) -> None:
    names = names_of(12)
    for name in names:
        cold.put(name)
    cold.tier.delete([names[0].key, names[1].key, names_of(4, first=99)[0].key])
    assert [cold.get(name) for name in names] == [None, None, payload_of(names[2])]
    assert cold.tier.status().errors == 0


def test_many_are_looked_up_at_once(cold: Cold) -> None:
    names = names_of(4 * 3000)
    for name in (names[0], names[1500], names[-1]):
        cold.put(name)
    found = cold.tier.exists([name.key for name in names])
    assert [index for index, there in enumerate(found) if there] == [0, 1500, 2999]


def test_a_second_write_of_a_block_changes_nothing(cold: Cold) -> None:
    [name] = names_of(4)
    cold.put(name)
    cold.put(name)
    assert cold.get(name) == payload_of(name)


def flipped(frame: bytes) -> bytes:
    return frame[:-1] + bytes([frame[-1] ^ 1])


@pytest.mark.parametrize(
    "damage",
    [
        flipped,
        lambda frame: frame[:-1],
        lambda frame: frame[:10],
        lambda frame: frame + b"\x00",
        lambda frame: frame * 50,
        lambda frame: b"not a frame at all",
        lambda frame: b"\x00" * len(frame),
    ],
    ids=["flipped", "cut", "header only", "one more", "much more", "text", "zeros"],
)
def test_what_cannot_be_the_block_is_a_counted_miss_and_gone(cold: Cold, damage: Callable[[bytes], bytes]) -> None:
    [name] = names_of(4)
    cold.put(name)
    frame = cold.stored(name)
    assert frame is not None
    cold.tamper(name, damage(frame))
    assert cold.get(name) is None
    assert cold.tier.status().corrupt == 1
    assert cold.stored(name) is None
    cold.put(name)
    assert cold.get(name) == payload_of(name)


def test_a_good_frame_under_anothers_key_is_a_counted_miss(cold: Cold) -> None:
    one, other = names_of(8)
    cold.put(other)
    frame = cold.stored(other)
    assert frame is not None
    cold.tamper(one, frame)
    assert cold.get(one) is None
    assert cold.tier.status().corrupt == 1
    assert cold.get(other) == payload_of(other)


def test_a_forged_block_is_a_counted_miss_and_gone(cold: Cold, caplog: pytest.LogCaptureFixture) -> None:
    [name] = names_of(4)
    payload = memoryview(bytes(LAYOUT.payload_bytes))
    cold.tamper(name, FrameSeal(LAYOUT, b"another key" + bytes(21)).seal(name, payload, checksum_of(payload)) + payload)
    assert cold.get(name) is None
    assert (cold.tier.status().forged, cold.tier.status().corrupt, cold.tier.status().misses) == (1, 0, 0)
    assert [record.levelname for record in caplog.records] == ["CRITICAL"]
    assert cold.stored(name) is None


def test_blocks_come_up_to_the_first_that_is_missing_wrong_or_unwanted(cold: Cold) -> None:
    names = names_of(4 * 40)
    for name in names:
        cold.put(name)
    for num_good, damage in ((40, 40), (31, 31), (7, 7), (0, 0)):
        if damage < 40:
            cold.tier.delete([names[damage].key])
        into = [memoryview(bytearray(LAYOUT.payload_bytes)) for _ in names]
        checksums = list(cold.tier.get(names, into))
        assert len(checksums) == num_good
        assert [bytes(payload) for payload in into[:num_good]] == [payload_of(name) for name in names[:num_good]]
    assert cold.tier.status().misses == 3
    assert cold.tier.status().errors == 0


def test_a_get_may_be_given_up_and_its_memory_used_again(cold: Cold) -> None:
    """Of a payload nothing is written after the answer to it, nor before it was asked for."""
    names = names_of(4 * 9)
    for name in names:
        cold.put(name)
    payload = memoryview(bytearray(LAYOUT.payload_bytes))
    for num_read in (0, 1, 5):
        blocks = cold.tier.get(names, [payload] * len(names))
        for name in names[:num_read]:
            assert next(blocks) == checksum_of(memoryview(payload_of(name)))
            assert payload == payload_of(name)
        blocks.close()
        payload[:] = bytes(len(payload))
        assert cold.get(names[3]) == payload_of(names[3])
        assert not any(payload)
    assert cold.tier.status().errors == 0


def test_a_block_written_under_another_namespace_or_tokens_is_a_miss(cold: Cold) -> None:
    [name] = names_of(4)
    cold.put(name._replace(root_digest=bytes(32)))
    assert cold.get(name) is None
    cold.put(name._replace(tokens_digest=bytes(32)))
    assert cold.get(name) is None
    assert cold.tier.status().corrupt == 2


def test_the_twin_is_bounded_and_keeps_what_is_used() -> None:
    tier = MemoryTier(LAYOUT, max_blocks=2)
    one, two, three = names_of(12)
    cold = Cold(tier, lambda name: None, lambda name, value: None)
    cold.put(one)
    cold.put(two)
    cold.get(one)
    cold.put(three)
    assert tier.exists([one.key, two.key, three.key]) == [True, False, True]


def test_what_is_there_is_listed_with_its_namespace_and_cleared(cold: Cold) -> None:
    names, other = names_of(4 * 300), cover(NamespaceRoot(b"O" * 32), range(8), LAYOUT.block_size)
    for name in (*names, *other):
        cold.put(name)
    whole = sum(map(len, filter(None, map(cold.stored, (*names, *other)))))
    listed = [one for page in find(cold.tier, Selection()) for one in page]
    assert {one.key for one in listed} == {name.key for name in (*names, *other)}
    assert sum(one.num_bytes for one in listed) == whole
    assert all(0 <= one.idle_s < 60 for one in listed)
    theirs = Selection(namespaces=frozenset([digest_of(NamespaceRoot(b"O" * 32))]))
    tally = Tally(theirs)
    for page in clear(cold.tier, theirs):
        tally.add(cold.tier.tier, page)
    [holding] = tally.holdings.holdings
    assert (holding.blocks, holding.namespace, [*holding.places]) == (2, other[0].root_digest, [])
    assert [cold.get(name) for name in other] == [None, None]
    assert cold.get(names[7]) == payload_of(names[7])


def test_named_blocks_are_found_by_their_places_and_cleared_alone(cold: Cold) -> None:
    names = names_of(16)
    for name in names[1:3]:
        cold.put(name)
    named = Selection(tuple(name.key for name in names[:3]))
    tally = Tally(named)
    for page in find(cold.tier, named):
        tally.add(cold.tier.tier, page)
    assert [one.places for one in tally.holdings.holdings] == [[1, 2]]
    assert [len(page) for page in clear(cold.tier, Selection((names[1].key,)))] == [1]
    assert cold.tier.exists([name.key for name in names]) == [False, False, True, False]


@pytest.mark.parametrize("value", [b"", b"BTKV", b"x" * 5000, b"BTKV" + b"\xff" * 5000])
def test_a_value_that_is_no_frame_is_cleared_with_all_and_has_no_tenant(cold: Cold, value: bytes) -> None:
    [name] = names_of(4)
    cold.tamper(name, value)
    mine = Selection(namespaces=frozenset([name.root_digest]))
    assert [one for page in clear(cold.tier, mine) for one in page] == []
    listed = [one for page in clear(cold.tier, Selection()) for one in page]
    assert [one.key for one in listed] == [name.key] or not value
    assert all(one.namespace != name.root_digest for one in listed)
