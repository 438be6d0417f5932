from router.placement import PrefixMap
from wire.ids import BlockKey, WorkerId

A, B, C, D = (BlockKey(bytes([number]) * 32) for number in range(4))
P0, P1 = WorkerId("p0"), WorkerId("p1")


def test_a_match_is_the_longest_beginning_that_went_to_a_worker() -> None:
    prefixes = PrefixMap(100)
    prefixes.record([A, B, C], P0)
    prefixes.record([A, D], P1)
    assert prefixes.match([A, B, C, D]) == {P0: 3, P1: 1}
    assert prefixes.match([A, D, C]) == {P1: 2, P0: 1}


def test_blocks_after_a_hole_do_not_count() -> None:
    prefixes = PrefixMap(100)
    prefixes.record([B, C], P0)
    assert prefixes.match([A, B, C]) == {}
    prefixes.record([A], P1)
    assert prefixes.match([A, B, C]) == {P1: 1}


def test_what_was_not_sent_for_longest_is_forgotten() -> None:
    prefixes = PrefixMap(2)
    prefixes.record([A], P0)
    prefixes.record([B], P0)
    prefixes.record([A], P1)
    prefixes.record([C], P0)
    assert len(prefixes) == 2
    assert prefixes.match([B]) == {}
    assert prefixes.match([A]) == {P0: 1, P1: 1}


def test_a_prompt_longer_than_the_map_leaves_it_bounded() -> None:
    prefixes = PrefixMap(2)
    prefixes.record([A, B, C, D], P0)
    assert len(prefixes) == 2
    assert prefixes.match([A, B, C, D]) == {P0: 2}, "the beginning is what is kept"
