"""Steps of decoding rows: without a plan, with drafts, and with the next forward pass launched ahead.

    step n      launch n      launch n + 1      read n, apply n
    step n + 1                                                    read n + 1, apply n + 1

A pass launched ahead takes its tokens from the device, so that the host chooses and applies while the model runs.
"""

from engine.pages.allocator import PageAllocator
from engine.speculation.speculator import Speculator
from engine.step.decode_rows import DecodeRows
from engine.step.work import Work
from wire.ids import PageId


class Decoding:
    """The work of the decoding rows, and the pages that it takes.

    num_active: the number of waiting or running sequences; all decode if there are as many rows.
    """

    def __init__(self, rows: DecodeRows, speculator: Speculator, allocator: PageAllocator) -> None:
        self._rows = rows
        self._speculator = speculator
        self._allocator = allocator

    def work(self, num_active: int, has_launched: bool) -> Work | None:
        """Plans a step of all rows, one token each, without the batcher.

        Returns None if some sequence does not decode, or pages are too few. has_launched: a pass was launched ahead and
        runs first, even if sequences wait by now.
        """
        rows = self._rows
        if not rows or not (has_launched or len(rows) == num_active):
            return None
        if full := rows.full(len(rows)):
            pages = self._allocator.extend([rows.sequences[row] for row in full])
            if pages is None:
                return None
            rows.grow(full, pages)
        return Work(slice(0, len(rows)))

    def with_drafts(self, work: Work) -> Work:
        """Adds guesses of the next tokens, if there are any."""
        drafts = self._speculator.draft(self._rows, work.num_rows, work.num_tokens)
        return Work(work.rows, work.chunks, drafts) if drafts else work

    def pages_ahead(self, work: Work, num_active: int) -> tuple[list[int], list[PageId]] | None:
        """Allocates pages for the next forward pass before this step is read; returns the rows in need, and the pages.

        Returns None unless all sequences decode one token in both steps, and pages suffice. A sequence that ends with
        this step's token runs once in vain; a page for that is freed with the others.
        """
        rows, num_rows = self._rows, work.num_rows
        if not num_rows == len(rows) == num_active or work.chunks or work.drafts:
            return None
        ends_all = all(len(one.output_ids) + 1 >= one.ending.max_output for one in rows.sequences)
        if ends_all or rows.is_watched[:num_rows].any() or self._speculator.may_draft(rows, num_rows, num_rows):
            return None
        full = rows.full(num_rows, 1)
        pages = self._allocator.extend([rows.sequences[row] for row in full], 1)
        return None if pages is None else (full, pages)
