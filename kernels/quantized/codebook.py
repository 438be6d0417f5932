"""Tables of sixteen numbers that codes of 4 bits stand for."""

from enum import Enum


class Codebook(Enum):
    """A table of int8 numbers, by code.

    E2M1: twice the numbers of FP4, so its scales are halved. IQ4_NL: llama.cpp's steps, wider at the ends.
    """

    E2M1 = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)
    IQ4_NL = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)

    @property
    def largest(self) -> int:
        """The largest magnitude of its numbers."""
        return max(map(abs, self.value))

    @property
    def halves(self) -> tuple[int, int]:
        """The bytes of the first and the last eight numbers, the first byte lowest, as int64."""
        data = bytes(one & 255 for one in self.value)
        low, high = (int.from_bytes(half, "little", signed=True) for half in (data[:8], data[8:]))
        return low, high
