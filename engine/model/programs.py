"""Decode steps that were recorded once: Python between kernels is slower than some kernels.

On a CPU a recorder notes the operations; on a GPU a graph captures their launches. Either has input tensors with a
fixed number of rows, and a step's rows are copied there.
"""

from collections.abc import Callable, Sequence
from itertools import cycle
from typing import Protocol

import numpy as np
import torch

from engine.model.angles import FarAngles
from engine.model.batch import Batch
from kernels.accelerator import accelerator_of
from kernels.backend import Angles, Recorder

MIN_ROWS = 8
MIN_BLOCKS = 64
LOGIT_BYTES = 8
"""A float32, and the product before it in as much at most."""
GRAPH_BYTES = 4 << 20
"""Memory of a graph's launches, at a guess: no device has told."""
_COLUMNS = ("token_ids", "positions", "slot_mapping", "context_lens", "cu_query_lens")
Forward = Callable[[Batch, Angles], torch.Tensor]
"""Runs a batch with the angles of its rows; returns logits."""


class StepProgram(Protocol):
    """A decode step for batches whose rows are all sampled."""

    def run(self, batch: Batch) -> torch.Tensor:
        """Runs a batch of at most as many rows and blocks; returns logits that the next run overwrites."""


class RecordedProgram:
    """A forward pass that a recorder has noted, for a CPU; rows may be guesses."""

    def __init__(
        self,
        recorder: Recorder,
        forward: Forward,
        all_angles: Angles | FarAngles,
        num_columns: int,
        num_rows: int,
        num_blocks: int,
        block_size: int,
    ) -> None:
        """all_angles: finds the angles of any position. num_columns: numbers in a row of angles."""
        ids, lens = torch.zeros(3, num_rows, dtype=torch.int64), torch.zeros(num_rows, dtype=torch.int32)
        tables = torch.zeros(num_rows, num_blocks, dtype=torch.int32)
        starts = torch.arange(num_rows + 1, dtype=torch.int32)
        batch = Batch(
            token_ids=ids[0],
            positions=ids[1],
            slot_mapping=ids[2],
            block_tables=tables,
            context_lens=lens,
            cu_query_lens=starts,
            num_decodes=num_rows,
            sample_rows=ids[0],
        )
        turns = Angles(*torch.empty(2, num_rows, num_columns)) if isinstance(all_angles, FarAngles) else None
        angles = Angles(torch.empty(num_rows, num_columns), torch.empty(num_rows, num_columns), turns)
        if isinstance(all_angles, Angles):
            recorder.pick(all_angles.cosines, batch.positions, angles.cosines)
            recorder.pick(all_angles.sines, batch.positions, angles.sines)
        self._logits = forward(batch, angles)
        self._program = recorder.finish()
        recorder.advance(self._logits, block_size, batch)
        self._ahead = recorder.finish()
        self._columns = [getattr(batch, name).numpy() for name in _COLUMNS]
        self._tables = tables.numpy()
        self._far_angles, self._angles = all_angles if isinstance(all_angles, FarAngles) else None, angles
        self._kept = forward, all_angles

    def run(self, batch: Batch) -> torch.Tensor:
        self._take(batch)
        if self._far_angles is not None:
            self._far_angles.write(batch.positions, self._angles)
        self._program.run(len(batch.token_ids), len(batch.context_lens), batch.num_decodes)
        return self._logits[: len(batch.token_ids)]

    def decode_greedily(self, batch: Batch, num_runs: int) -> torch.Tensor:
        """Runs a batch, whose rows are all sampled, as `DraftModel.decode_greedily` does."""
        self._take(batch)
        num_sequences, token_ids = len(batch.context_lens), self._columns[0]
        numbers = (len(batch.token_ids), num_sequences, batch.num_decodes)
        drawn = np.empty((num_runs, num_sequences), dtype=np.int64)
        for after_run in drawn:
            self._ahead.run(*numbers)
            after_run[:] = token_ids[:num_sequences]
            numbers = (num_sequences,) * 3
        return torch.from_numpy(drawn)

    def _take(self, batch: Batch) -> None:
        """Copies a batch into the recording's inputs; numpy's small copies take half the time of torch's."""
        for name, own in zip(_COLUMNS, self._columns, strict=True):
            column = getattr(batch, name).numpy()
            own[: len(column)] = column
        tables = batch.block_tables.numpy()
        self._tables[: len(tables), : tables.shape[1]] = tables


class PinnedColumns:
    """Host memory for the columns of a step, whose copy to the device may be under way."""

    def __init__(self, num_words: int, num_rows: int, device: torch.device) -> None:
        self._words = torch.zeros(num_words, dtype=torch.int64, pin_memory=True)
        self._columns = [column.numpy() for column in _views(self._words, num_rows)]
        self._copied = torch.Event(device)

    def copy_to(self, on_device: torch.Tensor, batch: Batch) -> None:
        """Begins to copy a batch, once the last copy has ended; token ids on the device stay there."""
        num_rows, width = batch.block_tables.shape
        token_ids, positions, slots, lens, tables = self._columns
        self._copied.synchronize()
        if batch.token_ids.is_cpu:
            token_ids[:num_rows] = batch.token_ids.numpy()
        positions[:num_rows] = batch.positions.numpy()
        slots[:num_rows], slots[num_rows:] = batch.slot_mapping.numpy(), -1
        lens[:num_rows], lens[num_rows:] = batch.context_lens.numpy(), 0
        tables[:num_rows, :width] = batch.block_tables.numpy()
        on_device.copy_(self._words, non_blocking=True)
        self._copied.record(torch.accelerator.current_stream(on_device.device))


class CapturedProgram:
    """A forward pass captured as the accelerator's graph, one row for each sequence.

    A step's columns go to the device in one copy from pinned memory, except token ids that are there already; the next
    step's columns may be written meanwhile. Rows beyond the batch have no context and no slot, and write nothing.
    """

    def __init__(
        self, forward: Forward, all_angles: Angles, num_rows: int, num_blocks: int, device: torch.device
    ) -> None:
        num_words = 3 * num_rows + -(-num_rows * (num_blocks + 1) // 2)
        self._inputs = cycle([PinnedColumns(num_words, num_rows, device) for _ in range(2)])
        self._on_device = torch.zeros(num_words, dtype=torch.int64, device=device)
        ids, positions, slots, lens, tables = _views(self._on_device, num_rows)
        slots.fill_(-1)
        starts = torch.arange(num_rows + 1, dtype=torch.int32, device=device)
        batch = Batch(
            token_ids=ids,
            positions=positions,
            slot_mapping=slots,
            block_tables=tables,
            context_lens=lens,
            cu_query_lens=starts,
            num_decodes=num_rows,
            sample_rows=ids,
        )
        self._ids, self._kept = ids, (forward, all_angles)
        side = torch.Stream(device)
        side.wait_stream(torch.accelerator.current_stream(device))
        try:
            with side:  # compiles kernels, and makes the workspaces of products
                forward(batch, all_angles.at(positions))
        finally:  # what it has launched reads these tensors, whose memory is free once it has failed
            torch.accelerator.current_stream(device).wait_stream(side)
        self._graph = accelerator_of(device).graph(device)
        logits: list[torch.Tensor] = []
        self._graph.capture(lambda: logits.append(forward(batch, all_angles.at(positions))))
        (self._logits,) = logits

    def run(self, batch: Batch) -> torch.Tensor:
        num_rows = len(batch.context_lens)
        next(self._inputs).copy_to(self._on_device, batch)
        if not batch.token_ids.is_cpu:
            self._ids[:num_rows].copy_(batch.token_ids)
        self._graph.replay()
        return self._logits[:num_rows]


def _views(words: torch.Tensor, num_rows: int) -> tuple[torch.Tensor, ...]:
    """Views int64 words as token ids, positions and slots, and int32 context lengths and block tables."""
    wide, narrow = words[: 3 * num_rows].view(3, num_rows), words[3 * num_rows :].view(torch.int32)
    num_blocks = len(narrow) // num_rows - 1
    tables = narrow[num_rows : num_rows * (num_blocks + 1)].view(num_rows, num_blocks)
    return (*wide, narrow[:num_rows], tables)


def padded(number: int, least: int, factor: int = 2) -> int:
    """Rounds up to the next of least, least * factor, least * factor ** 2 and so on."""
    while least < number:
        least *= factor
    return least


def program_sizes(max_rows: int, max_blocks: int) -> Sequence[tuple[int, int]]:
    """Lists the padded numbers of rows and blocks of programs, the largest first."""
    rows = _up_to(padded(max_rows, MIN_ROWS), MIN_ROWS, 2)
    blocks = _up_to(padded(max_blocks, MIN_BLOCKS, 4), MIN_BLOCKS, 4)
    return [(num_rows, num_blocks) for num_rows in reversed(rows) for num_blocks in reversed(blocks)]


def graph_bytes(sizes: Sequence[tuple[int, int]], vocab_size: int, row_bytes: int) -> int:
    """Sums the memory of graphs, which share all but their launches: the rest is the largest graph's.

    row_bytes: memory of one row beside its logits.
    """
    most_rows = max(num_rows for num_rows, _ in sizes)
    return most_rows * (vocab_size * LOGIT_BYTES + row_bytes) + len(sizes) * GRAPH_BYTES


def _up_to(most: int, least: int, factor: int) -> list[int]:
    """Lists least, least * factor and so on, up to `most`."""
    return [least] if most <= least else [*_up_to(most // factor, least, factor), most]
