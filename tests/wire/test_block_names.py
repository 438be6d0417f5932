import hashlib
import struct
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from wire.block_names import NameChain, PublicPart, cover, key_of_last, namespace_root, token_bytes
from wire.ids import NamespaceRoot

ROOT = NamespaceRoot(bytes(range(32)))
OTHER = NamespaceRoot(bytes(32))
tokens = st.lists(st.integers(0, 2**32 - 1), max_size=40)


def sha(*parts: bytes) -> bytes:
    return hashlib.sha256(b"".join(parts)).digest()


def test_names_are_what_the_module_says() -> None:
    first, second, tail = cover(ROOT, [1, 2, 3, 4, 5], 2)
    one, two, three = struct.pack("<2I", 1, 2), struct.pack("<2I", 3, 4), struct.pack("<I", 5)
    assert first.key == sha(ROOT, one)
    assert second.key == sha(first.key, two)
    assert tail.key == sha(second.key, b"tail", struct.pack("<I", 1), three)
    assert [name.parent for name in (first, second, tail)] == [sha(ROOT), first.key, second.key]
    assert [name.tokens_digest for name in (first, second, tail)] == [sha(one), sha(two), sha(three)]
    assert [name.is_tail for name in (first, second, tail)] == [False, False, True]


def test_a_root_is_what_the_module_says() -> None:
    """Pinned: another value would make every stored block of every deployment a miss."""
    root = namespace_root(b"secret", "default", b"fingerprint", b"layout", "", "")
    assert root.hex() == "6a5be8ef03758759f1a960cfec7eb1f86410d7133ca54b2fa565e587f46d6476"


@given(tokens, tokens)
def test_growing_bit_by_bit_names_the_same(head: list[int], rest: list[int]) -> None:
    keys = NameChain(ROOT, 4)
    keys.extend(head)
    keys.extend(rest)
    assert keys.cover(len(head + rest)) == cover(ROOT, head + rest, 4)
    assert keys.cover(len(head)) == cover(ROOT, head, 4)


@given(tokens, tokens)
def test_names_are_equal_where_the_prefixes_are(one: list[int], other: list[int]) -> None:
    for index, (left, right) in enumerate(zip(cover(ROOT, one, 4), cover(ROOT, other, 4), strict=False)):
        assert (left == right) == (one[: 4 * index + 4] == other[: 4 * index + 4])


@given(tokens.filter(bool))
def test_no_name_is_shared_between_roots_or_shows_one(ids: list[int]) -> None:
    ours, theirs = cover(ROOT, ids, 4), cover(OTHER, ids, 4)
    assert {name.key for name in ours}.isdisjoint(name.key for name in theirs)
    assert all(ROOT not in (name.key, name.parent, name.root_digest) for name in ours)


@given(tokens.filter(bool), st.integers(1, 9))
def test_public_blocks_are_shared_and_no_other(ids: list[int], num_blocks: int) -> None:
    public = PublicPart(NamespaceRoot(b"p" * 32), num_blocks)
    ours, theirs = cover(ROOT, ids, 4, public), cover(OTHER, ids, 4, public)
    assert ours[:num_blocks] == theirs[:num_blocks] == cover(public.root, ids, 4)[:num_blocks]
    private = {name.key for name in ours[num_blocks:]}
    plain = [cover(root, ids, 4) for root in (ROOT, OTHER, public.root)]
    assert private.isdisjoint(name.key for names in (theirs, *plain) for name in names)
    assert all(name.root_digest == sha(ROOT) for name in ours[num_blocks:])
    assert all(name.parent == sha(ROOT) for name in ours[num_blocks : num_blocks + 1])


@given(tokens.filter(lambda ids: len(ids) >= 4), st.integers(0, 9))
def test_the_key_of_the_last_block_alone_is_the_one_that_its_name_has(ids: list[int], num_blocks: int) -> None:
    public, whole = PublicPart(NamespaceRoot(b"p" * 32), num_blocks), ids[: len(ids) // 4 * 4]
    assert key_of_last(ROOT, whole, 4, public) == cover(ROOT, whole, 4, public)[-1].key


def test_a_tail_is_no_full_block_and_no_tail_of_another_length() -> None:
    [full] = cover(ROOT, [7, 0, 0, 0], 4)
    tails = [cover(ROOT, [7, 0, 0, 0][:length], 4)[-1] for length in (1, 2, 3)]
    assert len({full.key, *(tail.key for tail in tails)}) == 4


@pytest.mark.parametrize("field", range(5))
def test_each_part_of_a_root_matters(field: int) -> None:
    parts: list[Any] = ["default", b"fingerprint", b"layout", "adapter", "policy"]
    changed = [*parts]
    changed[field] = parts[field][:-1]
    assert namespace_root(b"secret", *parts) != namespace_root(b"secret", *changed)
    assert namespace_root(b"secret", *parts) != namespace_root(b"secret2", *parts)


def test_parts_of_a_root_do_not_run_into_one_another() -> None:
    assert namespace_root(b"s", "ab", b"c", b"", "", "") != namespace_root(b"s", "a", b"bc", b"", "", "")
    assert namespace_root(b"s", "", b"", b"", "a", "b") != namespace_root(b"s", "", b"", b"", "", "ab")


@pytest.mark.parametrize("token", [-1, 2**32])
def test_an_id_that_is_no_u32_is_refused(token: int) -> None:
    with pytest.raises(OverflowError):
        token_bytes([token])
