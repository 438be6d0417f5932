import pytest

from kv_store.ledger import PrefixIndex
from wire.ids import BlockKey, PageId

A, B, C, D = (BlockKey(letter) for letter in (b"a", b"b", b"c", b"d"))


def test_the_longest_prefix_ends_at_the_first_hole() -> None:
    index = PrefixIndex()
    for key, page in ((A, 4), (B, 2), (D, 7)):
        index.add(key, PageId(page))
    assert index.longest([A, B, C, D]) == [4, 2]
    assert index.longest([C, A]) == []
    assert index.longest([]) == []


def test_a_key_and_a_page_are_tied_once() -> None:
    index = PrefixIndex()
    index.add(A, PageId(1))
    for key, page in ((A, 1), (A, 2), (B, 1)):
        with pytest.raises(ValueError, match="indexed already"):
            index.add(key, PageId(page))
    assert (index.find(A), index.key_of(PageId(1)), len(index), A in index) == (1, A, 1, True)
    index.remove(PageId(1))
    assert (index.find(A), index.key_of(PageId(1)), len(index), A in index) == (None, None, 0, False)
    with pytest.raises(KeyError):
        index.remove(PageId(1))
