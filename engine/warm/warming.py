"""The warming of a model before it serves: its programs, and the kernels of all steps beside them.

    record      the kernels that steps launch are noted, not run         (a GPU with Triton's kernels)
    compile     children compile them, or find them compiled             (likewise)
    capture     a program for each padded size, the largest first        (a CPU records, which takes milliseconds)
    run         each step that needed a kernel runs once

What may be launched later is the union over a few steps, since no kernel is specialized by a number of a step. Layers
of one kind launch the same kernels, so that one of each is recorded.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from engine.model.batch import Batch, CausalModel
from engine.model.decoder import Decoder
from engine.model.programs import (
    MIN_CHUNK_TOKENS,
    MIN_ROWS,
    RECORDED_CHUNKS,
    ProgramSize,
    captured_tokens,
    padded,
    program_sizes,
)
from engine.model.sampler import PLAIN, choose, likeliest
from kernels.backend import TRITON, TRITON_EXACT, Backend, KVPages
from kernels.cpu.library import NoKernels
from wire.errors import ConfigError
from wire.layout import Window

if TYPE_CHECKING:
    from engine.warm.compiling import Compilations, Launches

COMPILED_LATE = (TRITON, TRITON_EXACT)
"""The names of the backends whose kernels are compiled when they are first launched."""
ROWS = (1, 17, 65, 129, 257, 513)
"""Rows of steps beside the largest one, a row beyond each tile of products and each way to add splits."""
Report = Callable[[str, int, int], None]
"""Called with the part that is warmed, and how much of it is done, of how much."""


def ignore_progress(part: str, num_done: int, num_all: int) -> None:
    """Ignores progress."""


@dataclass(frozen=True)
class StepBounds:
    """Bounds of the steps of an engine: decoding rows, tokens of prompts beside them, and blocks of a sequence."""

    max_rows: int
    max_chunk_tokens: int
    max_blocks: int

    @property
    def steps(self) -> list["WarmStep"]:
        """The steps that together launch the kernels of all steps and programs, the largest first."""
        most = padded(self.max_rows, MIN_ROWS) + padded(self.max_chunk_tokens, MIN_CHUNK_TOKENS)
        found = [
            WarmStep(num_decodes, num_rows - num_decodes, num_blocks, samples_all)
            for num_rows in ROWS
            for num_decodes in (0, 1, num_rows)
            for num_blocks in (1, self.max_blocks)
            for samples_all in (False, True)
            if num_decodes <= self.max_rows and num_rows - num_decodes <= most
        ]
        largest = WarmStep(0, self.max_chunk_tokens, self.max_blocks, samples_all=False)
        return [largest, *sorted(dict.fromkeys(found), key=lambda one: -one.num_rows)]


@dataclass(frozen=True)
class WarmStep:
    """A step of decoding rows, then one chunk of a prompt. samples_all: all logits are computed, not the last ones."""

    num_decodes: int
    chunk_tokens: int
    num_blocks: int
    samples_all: bool

    @property
    def num_rows(self) -> int:
        return self.num_decodes + self.chunk_tokens

    def __str__(self) -> str:
        return f"a step of {self.num_decodes} rows and {self.chunk_tokens} prompt tokens over {self.num_blocks} blocks"

    def batch(self, block_size: int) -> Batch:
        """Makes a batch that reads the first page and writes none."""
        num_blocks = max(self.num_blocks, -(-self.chunk_tokens // block_size))
        lengths = [1] * self.num_decodes + [self.chunk_tokens] * bool(self.chunk_tokens)
        starts = torch.tensor([0, *lengths]).cumsum(0)
        positions = torch.zeros(self.num_rows, dtype=torch.int64)  # a step may have more tokens than a context
        return Batch(
            token_ids=torch.zeros_like(positions),
            positions=positions,
            slot_mapping=torch.full_like(positions, -1),
            block_tables=torch.zeros(len(lengths), num_blocks, dtype=torch.int32),
            context_lens=torch.tensor(lengths, dtype=torch.int32),
            cu_query_lens=starts.int(),
            num_decodes=self.num_decodes,
            sample_rows=torch.arange(self.num_rows) if self.samples_all else starts[1:] - 1,
        )


class Warmth:
    """A warm model, and what its requests have waited for nevertheless."""

    def __init__(self, model: CausalModel, backend: Backend, without_program: Sequence[ProgramSize]) -> None:
        """without_program: sizes of steps that run kernel by kernel."""
        self.without_program = without_program
        self._model = model
        self._num_programs = _num_programs(model)
        self._compilations = _watch_compilations() if backend.name in COMPILED_LATE else None

    @property
    def num_late(self) -> int:
        """Counts kernels compiled, and programs of a GPU made, since the model was warm."""
        on_gpu = self._model.device.type != "cpu"
        num_kernels = self._compilations.num if self._compilations else 0
        return num_kernels + (_num_programs(self._model) - self._num_programs) * on_gpu


def warm(
    model: CausalModel, backend: Backend, kv: KVPages, limits: StepBounds, report: Report = ignore_progress
) -> Warmth:
    """Makes a model's programs on a pool without sequences, and compiles and runs its other kernels. Blocks.

    A size of steps that cannot be captured is served without a program. Raises ConfigError, naming the kernel or step,
    where a compiler fails or hangs, its cache cannot be written, or the device has no memory or fails.
    """
    steps = compile_kernels(model, backend, kv, limits, report)
    without = make_programs(model, kv, limits, report)
    run_steps(model, kv, steps)
    return Warmth(model, backend, without)


def compile_kernels(
    model: CausalModel, backend: Backend, kv: KVPages, limits: StepBounds, report: Report = ignore_progress
) -> Sequence[WarmStep]:
    """Compiles the kernels of all steps in child processes; returns steps that together launch each of them.

    Blocks. Raises ConfigError as `warm` does. Does nothing for a CPU, whose kernels are compiled when they are loaded.
    """
    if backend.name not in COMPILED_LATE:
        return limits.steps if model.device.type != "cpu" else ()
    # Imported here so that a machine without Triton serves on its CPU.
    from engine.warm.compiling import Compilers, Launches

    launches = Launches()
    steps = note_kernels(model, kv, limits, launches)
    signatures = [*launches.signatures]
    try:
        Compilers().compile(signatures, lambda num_done: report("kernels", num_done, len(signatures)))
    except NoKernels as error:
        raise ConfigError(f"the kernels of {model.device}: {error}") from error
    return steps


def run_steps(model: CausalModel, kv: KVPages, steps: Sequence[WarmStep]) -> None:
    """Runs steps, and the choice of their tokens, one by one. Blocks. Raises ConfigError as `warm` does."""
    for step in steps:
        with _naming(step, model.device), torch.inference_mode():
            logits = model.forward(step.batch(model.layout.block_size).to(model.device), kv)
            likeliest(logits)
            choose(logits, [PLAIN] * len(logits))


def _num_programs(model: CausalModel) -> int:
    return model.num_programs if isinstance(model, Decoder) else 0


def _watch_compilations() -> "Compilations":
    from engine.warm.compiling import Compilations

    return Compilations()


def limits_of(model: CausalModel, kv: KVPages, max_rows: int, max_chunk_tokens: int) -> StepBounds:
    """Returns the limits of an engine on a pool, from its batcher's bounds."""
    num_positions = Window(model.layout).max_len(len(kv.data), model.max_context_len)
    return StepBounds(max_rows, max_chunk_tokens, model.layout.num_blocks(num_positions))


def make_programs(
    model: CausalModel, kv: KVPages, limits: StepBounds, report: Report = ignore_progress
) -> list[ProgramSize]:
    """Records or captures all sizes of a model that has programs; returns sizes for which the device had no memory."""
    without: list[ProgramSize] = []
    if not isinstance(model, Decoder):
        return without
    is_captured = model.device.type != "cpu"
    chunk_tokens = min(limits.max_chunk_tokens, captured_tokens(model.config)) * is_captured
    sizes = program_sizes(limits.max_rows, limits.max_blocks, chunk_tokens)
    sizes = sizes if is_captured else [RECORDED_CHUNKS, *sizes]
    for num_done, size in enumerate(sizes):
        report("graphs", num_done, len(sizes))
        with _naming(f"a graph of {size}", model.device):
            if not model.prepare(size, kv):
                without.append(size)
    report("graphs", len(sizes), len(sizes))
    return without


def note_kernels(model: CausalModel, kv: KVPages, limits: StepBounds, launches: "Launches") -> list[WarmStep]:
    """Notes the kernels of all steps, without running them; returns the steps that needed one more kernel."""
    needed, model = [], model.of_each_kind() if isinstance(model, Decoder) else model
    for step in limits.steps:
        num_noted = len(launches.signatures)
        with _naming(step, model.device), launches.noting():
            likeliest(model.forward(step.batch(model.layout.block_size).to(model.device), kv))
        if len(launches.signatures) > num_noted:
            needed.append(step)
    return needed


@contextmanager
def _naming(what: object, device: torch.device) -> Iterator[None]:
    """Waits for the device, and turns its failures into ConfigError, naming a step."""
    try:
        yield
        if device.type != "cpu":
            torch.accelerator.synchronize(device)
    except torch.OutOfMemoryError as error:
        told = ". ".join(str(error).split(". ")[1:3])  # what it tried to allocate, and what was free
        advice = "lower worker.pool_bytes" + (f" ({told})" if told else "")
        raise ConfigError(f"{what} does not fit into the memory of {device}: {advice}") from error
    except RuntimeError as error:
        raise ConfigError(f"{device} failed at {what}: {error}") from error
