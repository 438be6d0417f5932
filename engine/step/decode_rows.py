"""The decoding sequences of an engine as rows of arrays; the decode part of a batch is a slice of them."""

from collections.abc import Sequence as Seq

import numpy as np
import numpy.typing as npt
import torch

from engine.model.batch import Batch, CausalModel
from engine.sequence import Sequence
from engine.step.work import Ints
from wire.ids import PageId
from wire.layout import Window

_FIRST_ROWS = 32
_DTYPES = {
    "token_ids": torch.int64,
    "positions": torch.int64,
    "slots": torch.int64,
    "context_lens": torch.int32,
    "room": torch.int32,
    "is_plain": torch.bool,
    "is_watched": torch.bool,
    "tables": torch.int32,
}


class DecodeRows:
    """A row for each decoding sequence, in any order; rows change as sequences join, gain a page or leave.

    A step runs the first rows, mostly all: one token each, or more with guesses. `advance` adds the gained tokens. R
    rows, N pages:

    token_ids: int64 [R], the last known token, which runs next. positions: int64 [R], its position. slots: int64 [R],
    the slot of its KV. context_lens: int32 [R], tokens with KV once that token has run; with dropped KV fewer than its
    position says. room: int32 [R], slots left in the last page. tables: int32 [R, N], the pages, then zeros. is_plain:
    bool [R], the next token is the likeliest, without log-probabilities. is_watched: bool [R], its attention weighs the
    tokens of its sequence.

    The arrays are pinned for copies to a GPU. A step reads its tokens back before `advance`, so no copy is under way
    then.
    """

    token_ids: Ints
    positions: Ints
    slots: Ints
    context_lens: Ints
    room: Ints
    is_plain: npt.NDArray[np.bool_]
    is_watched: npt.NDArray[np.bool_]
    tables: Ints

    def __init__(self, model: CausalModel, num_pages: int) -> None:
        self.sequences: list[Sequence] = []
        self._handle_to_row: dict[int, int] = {}
        self._block_size = model.layout.block_size
        self._max_blocks = model.layout.num_blocks(Window(model.layout).max_len(num_pages, model.max_context_len))
        self._is_pinned = model.device.type != "cpu"
        self.may_force = not model.keeps_phases
        """Whether guesses that a grammar forces gain time: they run in a chunk."""
        self._reserve(_FIRST_ROWS)

    def __len__(self) -> int:
        return len(self.sequences)

    def put(self, sequence: Sequence) -> None:
        """Adds a decoding sequence that has a page for its next token, or notes the page that it has gained."""
        row = self._handle_to_row.get(sequence.handle)
        if row is None:
            self._add(sequence)
        elif not self.room[row]:
            self.grow([row], sequence.kv.table[-1:])

    def remove(self, sequence: Sequence) -> None:
        """Takes a sequence's row out. Does nothing if it has none."""
        row = self._handle_to_row.pop(sequence.handle, None)
        if row is not None:
            self._swap(row, len(self.sequences) - 1)
            self.sequences.pop()

    def drop(self, sequence: Sequence) -> None:
        """Updates the row of a sequence that has dropped some of its full pages. Does nothing if it has no row."""
        row = self._handle_to_row.get(sequence.handle)
        if row is not None:
            self._place(row, sequence)

    def bring_first(self, sequences: Seq[Sequence]) -> None:
        """Reorders the rows so that these sequences come first."""
        for place, sequence in enumerate(sequences):
            self._swap(self._handle_to_row[sequence.handle], place)

    def full(self, num_rows: int, num_ahead: int = 0) -> list[int]:
        """Lists the rows, of the first ones, that have no slot for the token `num_ahead` tokens after their next."""
        full: list[int] = (self.room[:num_rows] == num_ahead).nonzero()[0].tolist()
        return full

    def grow(self, rows: Seq[int], pages: Seq[PageId]) -> None:
        """Gives a further page to each of these full rows."""
        self.tables[rows, (self.context_lens[rows] - 1) // self._block_size] = pages
        self.slots[rows] = np.multiply(pages, self._block_size)
        self.room[rows] = self._block_size

    def advance(self, token_ids: Ints, num_gained: Ints | int = 1) -> None:
        """Notes the newest tokens of the first rows, whose KV grew by `num_gained`; no row passes its last page."""
        num_rows = len(token_ids)
        self.token_ids[:num_rows] = token_ids
        self.positions[:num_rows] += num_gained
        self.slots[:num_rows] += num_gained
        self.context_lens[:num_rows] += num_gained
        self.room[:num_rows] -= num_gained

    def after(self, num_rows: int, token_ids: torch.Tensor, full: Seq[int], pages: Seq[PageId]) -> Batch:
        """Makes the batch of the first rows for the step after the next, with columns of its own.

        token_ids: int64 [num_rows], on the model's device. full: the rows whose token is the first of a further page.
        pages: these pages.
        """
        lens = self.context_lens[:num_rows] + np.int32(1)
        slots, width = self.slots[:num_rows] + 1, -(-int(lens.max()) // self._block_size)
        tables = self.tables[:num_rows, :width].copy()
        slots[full] = np.multiply(pages, self._block_size)
        tables[full, (lens[full] - 1) // self._block_size] = pages
        positions, starts = self.positions[:num_rows] + 1, np.arange(num_rows + 1, dtype=np.int32)
        return Batch(
            token_ids=token_ids,
            positions=torch.from_numpy(positions),
            slot_mapping=torch.from_numpy(slots),
            block_tables=torch.from_numpy(tables),
            context_lens=torch.from_numpy(lens),
            cu_query_lens=torch.from_numpy(starts),
            num_decodes=num_rows,
            sample_rows=torch.arange(num_rows),
        )

    def check(self, num_ahead: int = 0) -> list[str]:
        """Lists the rows that differ from their sequences. num_ahead: last pages that a row may have before its
        sequence.
        """
        return [
            f"row {row} is not its sequence's"
            for row, one in enumerate(self.sequences)
            if not any(self._fits(row, one, len(one.kv.table) - num_more) for num_more in range(num_ahead + 1))
        ]

    def _fits(self, row: int, sequence: Sequence, num_pages: int) -> bool:
        num_computed, num_stored = sequence.num_computed, sequence.num_stored
        size = self._block_size
        slots = sequence.kv.table.slots(num_computed, num_computed + 1, size) if self.room[row] else self.slots[row]
        expected = [sequence.output_ids[-1], num_computed, num_stored + 1, num_pages * size - num_stored, row]
        found = [self.token_ids[row], self.positions[row], self.context_lens[row], self.room[row]]
        pages = np.pad(sequence.kv.table.row[:num_pages], (0, self._max_blocks - num_pages))
        is_placed = [*found, self._handle_to_row[sequence.handle]] == expected and self.slots[row] == slots
        return bool(is_placed and (self.tables[row] == pages).all())

    def _add(self, sequence: Sequence) -> None:
        row, num_computed = len(self.sequences), sequence.num_computed
        if row == len(self.token_ids):
            self._reserve(2 * row)
        self.sequences.append(sequence)
        self._handle_to_row[sequence.handle] = row
        self.token_ids[row] = sequence.output_ids[-1]
        self.positions[row] = num_computed
        self.slots[row : row + 1] = sequence.kv.table.slots(num_computed, num_computed + 1, self._block_size)
        self.is_plain[row] = sequence.draw().is_plain
        self.is_watched[row] = sequence.kv.watch is not None
        self._place(row, sequence)

    def _place(self, row: int, sequence: Sequence) -> None:
        """Notes where a sequence has its KV."""
        num_stored, num_pages = sequence.num_stored, len(sequence.kv.table)
        self.context_lens[row] = num_stored + 1
        self.room[row] = num_pages * self._block_size - num_stored
        self.tables[row, :num_pages] = sequence.kv.table.row
        self.tables[row, num_pages:] = 0

    def _swap(self, row: int, other: int) -> None:
        if row == other:
            return
        for name in _DTYPES:
            column = getattr(self, name)
            column[[row, other]] = column[[other, row]]
        self.sequences[row], self.sequences[other] = self.sequences[other], self.sequences[row]
        for one in (row, other):
            if self.sequences[one].handle in self._handle_to_row:
                self._handle_to_row[self.sequences[one].handle] = one

    def _reserve(self, num_rows: int) -> None:
        """Moves the rows to arrays of `num_rows` rows."""
        num_used = len(self.sequences)
        for name, dtype in _DTYPES.items():
            shape = (num_rows, self._max_blocks) if name == "tables" else (num_rows,)
            column = torch.zeros(shape, dtype=dtype, pin_memory=self._is_pinned).numpy()
            if num_used:
                column[:num_used] = getattr(self, name)[:num_used]
            setattr(self, name, column)
