"""Steps that were recorded once: Python between kernels is slower than some kernels.

On a CPU a recorder notes the operations of steps; on a GPU a graph captures their launches. Steps are decoding rows, or
these and chunks of prompts. Either has input tensors with fixed numbers of rows, and a step's rows are copied there.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import cycle
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from engine.checkpoint.config import ModelConfig
from engine.model.angles import FarAngles
from engine.model.batch import Batch
from kernels.accelerator import accelerator_of
from kernels.backend import Angles, Recorder

MIN_ROWS = 8
MIN_BLOCKS = 64
MIN_CHUNK_TOKENS = 64
MAX_CHUNKS = 8
"""Chunks of prompts in a captured step; a step with more runs kernel by kernel."""
WEIGHTS_TIMES_TOKENS = 1 << 37
"""Weights of a layer times tokens of chunks that a step with a graph has at most.

512 tokens of an 8B model take an H200 0.36 ms a layer, and its host over half a millisecond to launch kernel by kernel,
however few they are: a step of more tokens hides its launches, and padding to twice the tokens makes no step longer.
"""
LOGIT_BYTES = 8
"""A float32, and the product before it in as much at most."""
GRAPH_BYTES = 4 << 20
"""Memory of a graph's launches, at a guess: no device has told."""
_COLUMNS = ("token_ids", "positions", "slot_mapping", "sample_rows", "context_lens", "cu_query_lens")
Forward = Callable[[Batch, Angles], torch.Tensor]
"""Runs a batch with the angles of its rows; returns logits, or the states before them."""
Head = Callable[[torch.Tensor], torch.Tensor]
"""Runs sampled rows of states; returns logits."""


@dataclass(frozen=True)
class ProgramSize:
    """The numbers that a program's steps are padded to: decoding rows, blocks of a sequence, tokens of chunks.

    Tokens that pad chunks belong to no sequence, so that attention passes over them, and have no slot.
    """

    num_rows: int
    num_blocks: int
    chunk_tokens: int = 0

    def __str__(self) -> str:
        chunks = f", {self.chunk_tokens} prompt tokens" if self.chunk_tokens else ""
        return f"{self.num_rows} rows{chunks} and {self.num_blocks} blocks"

    @property
    def num_tokens(self) -> int:
        return self.num_rows + self.chunk_tokens

    @property
    def num_sequences(self) -> int:
        """Sequences of a step, of which each has one row of logits at most."""
        return self.num_rows + MAX_CHUNKS * bool(self.chunk_tokens)

    def fits(self, batch: Batch) -> bool:
        """Whether the program has room for a batch."""
        num_decodes, (num_sequences, num_blocks) = batch.num_decodes, batch.block_tables.shape
        return (
            num_decodes <= self.num_rows
            and num_blocks <= self.num_blocks
            and len(batch.token_ids) - num_decodes <= self.chunk_tokens
            and num_sequences - num_decodes <= self.num_sequences - self.num_rows
            and len(batch.sample_rows) <= self.num_sequences
        )


RECORDED_CHUNKS = ProgramSize(56, 0, 456)
"""Steps with chunks of prompts that a CPU runs as a program, up to 512 tokens and 64 rows of logits.

Longer steps are not recorded: Python is at most 2 % of one of 2,000 tokens. A program keeps its logits: 512 rows of
150,000 would take 300 MB.
"""


class StepProgram(Protocol):
    """A step that was recorded once."""

    def run(self, batch: Batch) -> torch.Tensor:
        """Runs a batch that fits; returns logits of its `sample_rows` that the next run overwrites."""


class RecordedProgram:
    """A forward pass that a recorder has noted, for a CPU; rows may be guesses, or of chunks."""

    def __init__(
        self,
        recorder: Recorder,
        layers: Forward,
        head: Head,
        all_angles: Angles | FarAngles,
        num_columns: int,
        size: ProgramSize,
        num_blocks: int,
        block_size: int,
    ) -> None:
        """all_angles: finds the angles of any position. num_columns: numbers in a row of angles."""
        num_rows = size.num_tokens
        ids, lens = torch.zeros(4, num_rows, dtype=torch.int64), torch.zeros(num_rows, dtype=torch.int32)
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
            sample_rows=ids[3],
        )
        turns = Angles(*torch.empty(2, num_rows, num_columns)) if isinstance(all_angles, FarAngles) else None
        angles = Angles(torch.empty(num_rows, num_columns), torch.empty(num_rows, num_columns), turns)
        if isinstance(all_angles, Angles):
            recorder.pick(all_angles.cosines, batch.positions, angles.cosines)
            recorder.pick(all_angles.sines, batch.positions, angles.sines)
        states = layers(batch, angles)
        sampled = torch.empty_like(states[: size.num_sequences])
        recorder.sample(states, batch.sample_rows, sampled)
        self._logits = head(sampled)
        self._program = recorder.finish()
        recorder.advance(self._logits, block_size, batch)
        self._ahead = recorder.finish()
        self._columns = [getattr(batch, name).numpy() for name in _COLUMNS]
        self._tables = tables.numpy()
        self._far_angles, self._angles = all_angles if isinstance(all_angles, FarAngles) else None, angles
        self._kept = layers, sampled, all_angles

    def run(self, batch: Batch) -> torch.Tensor:
        self._take(batch)
        if self._far_angles is not None:
            self._far_angles.write(batch.positions, self._angles)
        num_samples = len(batch.sample_rows)
        self._program.run(len(batch.token_ids), len(batch.context_lens), batch.num_decodes, num_samples)
        return self._logits[:num_samples]

    def decode_greedily(self, batch: Batch, num_runs: int) -> torch.Tensor:
        """Runs a batch, whose rows are all sampled, as `DraftModel.decode_greedily` does."""
        self._take(batch)
        num_sequences, token_ids = len(batch.context_lens), self._columns[0]
        numbers = (len(batch.token_ids), num_sequences, batch.num_decodes, len(batch.sample_rows))
        drawn = np.empty((num_runs, num_sequences), dtype=np.int64)
        for after_run in drawn:
            self._ahead.run(*numbers)
            after_run[:] = token_ids[:num_sequences]
            numbers = (num_sequences,) * 4
        return torch.from_numpy(drawn)

    def _take(self, batch: Batch) -> None:
        """Copies a batch into the recording's inputs; numpy's small copies take half the time of torch's."""
        for name, own in zip(_COLUMNS, self._columns, strict=True):
            column = getattr(batch, name).numpy()
            own[: len(column)] = column
        tables = batch.block_tables.numpy()
        self._tables[: len(tables), : tables.shape[1]] = tables


class PinnedColumns:
    """Host memory for the columns of a step, whose copy to the device may be under way.

    Decoding rows come first, up to the padded number, then rows of chunks.
    """

    def __init__(self, size: ProgramSize, device: torch.device) -> None:
        self._size = size
        self._words = torch.zeros(_num_words(size), dtype=torch.int64, pin_memory=True)
        self._columns = [column.numpy() for column in _views(self._words, size)]
        self._columns[-1][:] = np.minimum(np.arange(size.num_sequences + 1), size.num_rows)
        self._copied = torch.Event(device)

    def copy_to(self, on_device: torch.Tensor, batch: Batch) -> None:
        """Begins to copy a batch, once the last copy has ended; token ids on the device stay there."""
        num_rows, num_decodes = self._size.num_rows, batch.num_decodes
        token_ids, positions, slots, samples, lens, tables, starts = self._columns
        num_sequences, width = batch.block_tables.shape
        num_before = num_rows - num_decodes  # of padding, before the rows of chunks

        def put(column: npt.NDArray[np.integer], values: torch.Tensor, padding: int) -> None:
            numbers, end = values.numpy(), num_before + len(values)
            column[:num_decodes], column[num_rows:end] = numbers[:num_decodes], numbers[num_decodes:]
            column[num_decodes:num_rows], column[end:] = padding, padding

        self._copied.synchronize()
        if batch.token_ids.is_cpu:
            put(token_ids, batch.token_ids, 0)
        put(positions, batch.positions, 0)
        put(slots, batch.slot_mapping, -1)
        put(lens, batch.context_lens, 0)
        blocks = batch.block_tables.numpy()
        tables[:num_decodes, :width] = blocks[:num_decodes]
        if self._size.chunk_tokens:
            end, sampled = num_before + num_sequences, batch.sample_rows.numpy()
            tables[num_rows:end, :width] = blocks[num_decodes:]
            starts[num_rows:end] = batch.cu_query_lens[num_decodes:-1].numpy() + num_before
            starts[end:] = num_before + len(batch.token_ids)
            samples[: len(sampled)] = sampled + (sampled >= num_decodes) * num_before
        on_device.copy_(self._words, non_blocking=True)
        self._copied.record(torch.accelerator.current_stream(on_device.device))


class CapturedProgram:
    """A forward pass captured as the accelerator's graph, of decoding rows and then chunks of prompts.

    A step's columns go to the device in one copy from pinned memory, except token ids that are there already; the next
    step's columns may be written meanwhile. Rows that pad a step have no context and no slot, and write nothing.
    """

    def __init__(self, forward: Forward, all_angles: Angles, size: ProgramSize, device: torch.device) -> None:
        self._inputs = cycle([PinnedColumns(size, device) for _ in range(2)])
        self._on_device = torch.zeros(_num_words(size), dtype=torch.int64, device=device)
        ids, positions, slots, samples, lens, tables, starts = _views(self._on_device, size)
        slots.fill_(-1)
        batch = Batch(
            token_ids=ids,
            positions=positions,
            slot_mapping=slots,
            block_tables=tables,
            context_lens=lens,
            cu_query_lens=starts,
            num_decodes=size.num_rows,
            sample_rows=samples,
        )
        self._ids, self._kept = ids, (forward, all_angles)
        side = _warm_up_stream(device)
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
        self._graph.replay()  # the first one uploads the graph; no row has a slot or a context yet

    def run(self, batch: Batch) -> torch.Tensor:
        next(self._inputs).copy_to(self._on_device, batch)
        if not batch.token_ids.is_cpu:
            self._ids[: len(batch.token_ids)].copy_(batch.token_ids)
        self._graph.replay()
        return self._logits[: len(batch.sample_rows)]


@cache
def _warm_up_stream(device: torch.device) -> torch.Stream:
    """Returns the stream of all warm-ups of a device: torch keeps memory, and a workspace of products, for each."""
    return torch.Stream(device)


def _num_words(size: ProgramSize) -> int:
    """Counts the words of int64 that `_views` divides."""
    num_wide = 3 * size.num_tokens + size.num_sequences
    return num_wide + size.num_sequences * (size.num_blocks + 2) // 2 + 1


def _views(words: torch.Tensor, size: ProgramSize) -> tuple[torch.Tensor, ...]:
    """Views int64 words as token ids, positions, slots and sampled rows; context lengths, block tables and starts.

    The last three are int32. Numbers of rows are multiples of 8: kernels want addresses at multiples of 16 bytes.
    """
    num_tokens, num = size.num_tokens, size.num_sequences
    wide, narrow = words[: 3 * num_tokens], words[3 * num_tokens + num :].view(torch.int32)
    lens, tables, starts = narrow[: num * (size.num_blocks + 2) + 1].split([num, num * size.num_blocks, num + 1])
    samples = words[3 * num_tokens : 3 * num_tokens + num]
    return (*wide.view(3, num_tokens), samples, lens, tables.view(num, size.num_blocks), starts)


def padded(number: int, least: int, factor: int = 2) -> int:
    """Rounds up to the next of least, least * factor, least * factor ** 2 and so on."""
    while least < number:
        least *= factor
    return least


def program_sizes(max_rows: int, max_blocks: int, chunk_tokens: int = 0) -> list[ProgramSize]:
    """Lists the padded sizes of programs, the largest first.

    chunk_tokens: the most tokens of chunks in a captured step; 0 for none. Beside chunks are no rows, a few, or as many
    as there can be, over tables of all blocks: their attention ends early where a table is longer than its sequence.
    """
    rows = _up_to(padded(max_rows, MIN_ROWS), MIN_ROWS, 2)
    blocks = _up_to(padded(max_blocks, MIN_BLOCKS, 4), MIN_BLOCKS, 4)
    tokens = _up_to(padded(chunk_tokens, MIN_CHUNK_TOKENS), MIN_CHUNK_TOKENS, 2) if chunk_tokens else []
    sizes = [ProgramSize(num_rows, num_blocks) for num_rows in rows for num_blocks in blocks]
    sizes += [ProgramSize(num_rows, max_blocks, one) for num_rows in {0, rows[0], rows[-1]} for one in tokens]
    return sorted(sizes, key=lambda one: (one.num_tokens, one.num_blocks), reverse=True)


def captured_tokens(config: ModelConfig) -> int:
    """Returns the most tokens of chunks in a captured step, by the weights of a layer that multiply each of them."""
    attention, mixture = config.attention, config.mixture
    width = 2 * (attention.num_heads + attention.num_kv_heads) * attention.head_dim
    mlp = config.intermediate_size if mixture is None else mixture.num_chosen * mixture.intermediate_size
    most = max(MIN_CHUNK_TOKENS, WEIGHTS_TIMES_TOKENS // (config.hidden_size * (width + 3 * mlp)))
    return 1 << most.bit_length() - 1


def graph_bytes(sizes: Sequence[ProgramSize], vocab_size: int, row_bytes: int) -> int:
    """Sums the memory of graphs, which share all but their launches: the rest is the largest graph's.

    row_bytes: memory of one row beside its logits.
    """
    num_tokens, num_logits = max(one.num_tokens for one in sizes), max(one.num_sequences for one in sizes)
    return num_tokens * row_bytes + num_logits * vocab_size * LOGIT_BYTES + len(sizes) * GRAPH_BYTES


def _up_to(most: int, least: int, factor: int) -> list[int]:
    """Lists least, least * factor and so on, up to `most`."""
    return [least] if most <= least else [*_up_to(most // factor, least, factor), most]
