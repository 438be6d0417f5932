"""Evicted blocks that a policy remembers: a number each, in a table of fixed size."""

from array import array

from wire.ids import BlockKey

VALUE_BITS = 44
_VALUE_MASK = (1 << VALUE_BITS) - 1


class Ghosts:
    """Numbers of evicted blocks, by key. A block overwrites an older block whose key has the same place.

    A place has 20 bits of the key and 44 of the number; an empty place is 0. One look-up in a million mistakes a key
    for another, which costs at most a page evicted early.
    """

    def __init__(self, num_places: int) -> None:
        self._places = array("Q", bytes(8 * num_places))

    def remember(self, key: BlockKey, value: int) -> int | None:
        """Remembers a number from 0 to 2^44 - 1; returns the number that it overwrites."""
        place, mark = self._place(key)
        before = self._places[place]
        self._places[place] = mark << VALUE_BITS | value
        return before & _VALUE_MASK if before else None

    def take(self, key: BlockKey) -> int | None:
        """Returns the number of a key, and forgets it."""
        place, mark = self._place(key)
        found = self._places[place]
        if found >> VALUE_BITS != mark:
            return None
        self._places[place] = 0
        return found & _VALUE_MASK

    def _place(self, key: BlockKey) -> tuple[int, int]:
        number = int.from_bytes(key[:8], "little")
        return number % len(self._places), (number >> VALUE_BITS) | 1
