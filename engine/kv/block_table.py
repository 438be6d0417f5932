"""The pages of a sequence, block by block."""

from array import array
from collections.abc import Iterable
from typing import cast

import numpy as np

from wire.ids import PageId


class BlockTable:
    """The pages of a sequence, in order; kernels read `row`, int32.

    behind: blocks before the window, and after the sinks, which have no page; the row has other sequences' or 0 there,
    and nothing reads them. num_dropped: tokens whose KV was dropped; the pages have the others, without gaps.
    """

    def __init__(self, pages: Iterable[PageId] = (), behind: range = range(0), num_dropped: int = 0) -> None:
        self._pages = array("i", pages)
        self._pages[behind.start : behind.start] = array("i", [0] * len(behind))
        self.behind = behind
        self.num_dropped = num_dropped

    def __len__(self) -> int:
        return len(self._pages)

    def __getitem__(self, span: slice) -> list[PageId]:
        """Lists pages; ValueError for a block behind the window, whose page may be another sequence's by now."""
        start, stop, _ = span.indices(len(self._pages))
        if lost := range(max(start, self.behind.start), min(stop, self.behind.stop)):
            raise ValueError(f"block {lost.start} is behind the window")
        return cast(list[PageId], self._pages[span].tolist())

    def extend(self, pages: Iterable[PageId]) -> None:
        self._pages.extend(pages)

    @property
    def present(self) -> list[PageId]:
        """Lists the pages of blocks that are not behind the window, the latest blocks before the sinks."""
        return self[self.behind.stop :] + self[: self.behind.start]

    def leave_behind(self, behind: range) -> list[PageId]:
        """Leaves these blocks behind the window; returns the pages that this frees."""
        pages = self[max(behind.start, self.behind.stop) : behind.stop]
        self.behind = max(self.behind, behind, key=len)
        return pages

    @property
    def row(self) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
        """Views the pages; the view must be gone before the next change."""
        return np.frombuffer(self._pages, dtype=np.int32)

    def slots(self, start: int, stop: int, block_size: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        """Locates the KV of positions start to stop - 1: page * block_size + offset."""
        places = np.arange(start, stop) - self.num_dropped
        return self.row[places // block_size].astype(np.int64) * block_size + places % block_size

    def drop(self, places: Iterable[int], block_size: int) -> list[PageId]:
        """Takes full pages out; returns them."""
        pages = [PageId(self._pages.pop(place)) for place in sorted(places, reverse=True)]
        self.num_dropped += len(pages) * block_size
        return pages
