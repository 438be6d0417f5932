"""The native decoder, of the architectures in engine/checkpoint/families/table.py, which differ in data only.

Numerics follow transformers step by step (norms, angles and softmax in float32, the rest in the model's dtype), so that
greedy tokens in float32 are the same.
"""

import logging
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import fields, is_dataclass
from functools import cached_property, partial
from pathlib import Path

import torch

from engine.checkpoint.checkpoint import Checkpoint
from engine.checkpoint.config import DTYPES, ModelConfig, ServedConfig
from engine.model.angles import FarAngles, make_angles
from engine.model.batch import Batch, decode_greedily
from engine.model.buffers import NO_BUFFERS, Buffers
from engine.model.programs import (
    MIN_BLOCKS,
    MIN_ROWS,
    RECORDED_CHUNKS,
    CapturedProgram,
    ProgramSize,
    RecordedProgram,
    StepProgram,
    padded,
)
from engine.model.weights import DecoderWeights, LoadWeights, check_weights, load_private
from kernels.accelerator import accelerator_of
from kernels.backend import TRITON_EXACT, Angles, AttentionVariant, Backend, KVPages, Scores, Tables
from kernels.reference import weigh
from kernels.selection import select_backend
from wire.errors import ConfigError
from wire.kv_policy import parse_kv_policy
from wire.layout import KVLayout, Window

log = logging.getLogger(__name__)

ALIGNED_BYTES = 16
"""The alignment by which launches of a GPU's kernels are specialized."""
Output = Callable[[torch.Tensor | None, torch.Tensor | None], torch.Tensor]
"""Computes what a part of a layer adds to states; takes `residual` and `out`, which may be one tensor."""


class Decoder:
    """A `CausalModel` with weights. Its twin is `engine.model.hash_model.HashModel`."""

    def __init__(
        self,
        config: ModelConfig,
        weights: DecoderWeights,
        layout: KVLayout,
        backend: Backend,
    ) -> None:
        """Takes the device from the weights, which `backend` has packed."""
        self.config = config
        self.weights = weights
        self.layout = layout
        self.device = weights.norm.device
        self.vocab_size = config.vocab_size
        self.max_context_len = config.max_context_len
        self.eos_token_ids = config.eos_token_ids
        self.keeps_phases = backend.name == TRITON_EXACT
        self._backend = backend
        self._angles = make_angles(config.ropes, config.attention.head_dim, 1, self.device)
        scale = config.attention.scale
        cap, num_sinks = config.scalars.score_cap, layout.num_sinks
        self._variants = [
            AttentionVariant(scale, window, num_sinks, Scores(cap, layer.sinks))
            for window, layer in zip(config.attention.windows, weights.layers, strict=True)
        ]
        self._order: Sequence[int] = range(len(weights.layers))
        self._far_angles = self._make_far_angles() if num_sinks else None
        self._programs: dict[ProgramSize, StepProgram | None] = {}
        self._programs_kv = 0
        self._captured_logits = torch.empty(0, self.vocab_size, dtype=torch.float32, device=self.device)

    @classmethod
    def load(
        cls,
        folder: Path,
        dtype: str | None,
        device: torch.device,
        block_size: int,
        backend: Backend | None = None,
        kv_dtype: str = "auto",
        kv_policy: str = "full",
        load_weights: LoadWeights = load_private,
    ) -> "Decoder":
        """Loads a checkpoint folder. dtype: by default the checkpoint's own, if the backend is made for it.

        kv_dtype: a key of wire.layout.KV_DTYPES. kv_policy: a policy of wire.kv_policy. load_weights:
        `WeightCache.load`, or `load_private`. Raises ModelError for a folder that cannot be served, ConfigError for an
        unknown dtype, or a KV dtype or policy that does not suit device or model.
        """
        checkpoint = Checkpoint(folder)
        check_weights(checkpoint)
        backend = backend or select_backend(device)
        check_kv_dtype(device, kv_dtype)
        resolved = compute_dtype(dtype, checkpoint.config, backend)
        config = checkpoint.native_config.keeping(parse_kv_policy(kv_policy, kv_dtype))
        layout = config.kv_layout(str(resolved).removeprefix("torch."), block_size, kv_dtype)
        weights = load_weights(checkpoint, resolved, device, backend)
        return cls(config, weights, layout, backend)

    @torch.inference_mode()
    def forward(self, batch: Batch, kv: KVPages) -> torch.Tensor:
        """Implements `CausalModel.forward`, for one thread. Returns an inference tensor, valid until the next call."""
        program = None if batch.watched else self._program_for(batch, kv)
        if program is not None:
            return program.run(batch)
        batch = batch.to(self.device)
        return self.run(self._backend, batch, self.angles_for(kv).at(batch.positions), kv, NO_BUFFERS)

    def of_each_kind(self) -> "Decoder":
        """Returns a decoder that runs one layer of each kind: it launches the kernels of all, and computes nothing."""
        sample, columns = copy(self), self._angle_columns
        kinds = {
            (kind_of(layer), kind_of(self._variants[index]), columns[index]): index
            for index, layer in enumerate(self.weights.layers)
        }
        sample._order = sorted(kinds.values())
        return sample

    @torch.inference_mode()
    def decode_greedily(self, batch: Batch, kv: KVPages, num_runs: int) -> torch.Tensor:
        """Implements `DraftModel.decode_greedily`; in one program where the backend has recordings."""
        is_recordable = self.device.type == "cpu" and not self._far_angles and batch.samples_all
        program = self._program_for(batch, kv) if is_recordable else None
        if isinstance(program, RecordedProgram):
            return program.decode_greedily(batch, num_runs)
        return decode_greedily(self, batch.to(self.device), kv, num_runs)

    def run(self, do: Backend, batch: Batch, angles: Angles, kv: KVPages, to: Buffers) -> torch.Tensor:
        """Runs a batch through a backend, and returns logits; `angles` has a row for each token."""
        states = self.run_layers(do, batch, angles, kv, to)
        return self.run_head(do, states if batch.samples_all else states[batch.sample_rows], to)

    def run_layers(self, do: Backend, batch: Batch, angles: Angles, kv: KVPages, to: Buffers) -> torch.Tensor:
        """Runs a batch through all layers; returns the states of its rows. The backend may be a recorder."""
        tables = Tables(batch.block_tables, batch.context_lens, batch.cu_query_lens, batch.num_decodes, angles.turns)
        half, columns = self.config.attention.head_dim // 2, self._angle_columns
        turned = {first: angles.columns(first, half) for first in set(columns)}
        states = do.embed(batch.token_ids, self.weights.embedding, self._embedding_factor, to.states)
        for index in self._order:
            layer, pages = self.weights.layers[index], kv.layer(index)
            normed = self._normed(do, states, layer.attention_norm, to)
            qkv = layer.qkv.run(do, normed, out=to.qkv)
            for part, norm in layer.row_norms:
                do.rms_norm(qkv[:, part], norm, self._eps, out=qkv[:, part])
            query = do.rotate_and_write(qkv, layer.heads, turned[columns[index]], pages, batch.slot_mapping)
            for one in batch.watched:
                one.queries[index] = query[one.rows]
            attended = do.attend(query, pages, tables, self._variants[index], to.attended).flatten(1)
            output = partial(layer.attention_output.run, do, attended)
            states = self._add(do, states, output, layer.added_norm, to)
            normed = self._normed(do, states, layer.mlp_norm, to)
            output = partial(layer.feed_forward.run, do, normed, to)
            states = self._add(do, states, output, layer.added_mlp_norm, to)
        return states

    def run_head(self, do: Backend, sampled: torch.Tensor, to: Buffers) -> torch.Tensor:
        """Returns the logits of sampled rows of states. The backend may be a recorder."""
        normed = self._normed(do, sampled, self.weights.norm, to)
        return do.logits(normed, self.weights.head, self.config.scalars.logit_cap, to.logits)

    @cached_property
    def _angle_columns(self) -> list[int]:
        """The first column of each layer's rotary embedding among the angles of all."""
        ropes, half = self.config.ropes, self.config.attention.head_dim // 2
        return [ropes.index(one) * half for one in self.config.layer_ropes]

    @cached_property
    def _embedding_factor(self) -> float:
        scalars = self.config.scalars
        if not scalars.is_rounded:
            return scalars.of_embeddings
        return float(torch.tensor(scalars.of_embeddings, dtype=self.weights.embedding.dtype))

    @cached_property
    def _eps(self) -> float:
        return self.config.scalars.norm_eps(self.config.rms_norm_eps)

    def _normed(self, do: Backend, states: torch.Tensor, norm: torch.Tensor | None, to: Buffers) -> torch.Tensor:
        return states if norm is None else do.rms_norm(states, norm, self._eps, out=to.normed)

    def _add(
        self, do: Backend, states: torch.Tensor, output: Output, norm: torch.Tensor | None, to: Buffers
    ) -> torch.Tensor:
        """Adds an output to states, in place, normalized where the architecture has a norm for it."""
        if norm is None:
            return output(states, states)
        return do.rms_norm(output(None, to.normed), norm, self._eps, states, states)

    def new_queries(self, num_rows: int) -> torch.Tensor:
        attention = self.config.attention
        shape = (len(self._variants), num_rows, attention.num_heads, attention.head_dim)
        return torch.empty(shape, dtype=self.weights.embedding.dtype, device=self.device)

    @torch.inference_mode()
    def weigh(self, queries: torch.Tensor, kv: KVPages, block_table: torch.Tensor, num_tokens: int) -> torch.Tensor:
        layers = zip(queries, self._variants, strict=True)
        return torch.stack(
            [weigh(query, kv.layer(index), block_table, num_tokens, one) for index, (query, one) in enumerate(layers)]
        )

    @property
    def num_programs(self) -> int:
        """Counts the sizes of steps that were recorded or captured, or have failed to be."""
        return len(self._programs)

    @torch.inference_mode()
    def prepare(self, size: ProgramSize, kv: KVPages) -> bool:
        """Records or captures steps of up to such a size, once; returns whether these have a program."""
        return self._find_program(size, kv) is not None

    def _program_for(self, batch: Batch, kv: KVPages) -> StepProgram | None:
        """Finds the program for a batch, or makes it; `prepare` alone captures chunks of prompts."""
        num_rows, size = len(batch.token_ids), ProgramSize(len(batch.token_ids), batch.block_tables.shape[1])
        if self.device.type == "cpu":
            if batch.samples_all:
                return self._find_program(size, kv)
            is_small = (
                num_rows <= RECORDED_CHUNKS.num_tokens and len(batch.sample_rows) <= RECORDED_CHUNKS.num_sequences
            )
            return self._find_program(RECORDED_CHUNKS, kv) if is_small else None
        if not batch.positions.is_cpu:
            return None  # columns that are on the device already are not captured
        if batch.samples_all and batch.num_decodes == num_rows:
            return self._find_program(size, kv)
        made = self._programs_on(kv)
        fitting = [one for one, program in made.items() if one.chunk_tokens and program and one.fits(batch)]
        return made[min(fitting, key=lambda one: one.num_tokens)] if fitting else None

    def _find_program(self, size: ProgramSize, kv: KVPages) -> StepProgram | None:
        """Finds or makes the program for these numbers."""
        on_cpu, made = self.device.type == "cpu", self._programs_on(kv)
        if not on_cpu and self._far_angles:
            return None  # sinks are not captured
        if not size.chunk_tokens:
            num_blocks = 0 if on_cpu else padded(size.num_blocks, MIN_BLOCKS, 4)
            size = ProgramSize(padded(size.num_rows, MIN_ROWS), num_blocks)
        if size not in made:
            made[size] = self._record(kv, size) if on_cpu else self._capture(kv, size)
        return made[size]

    def _programs_on(self, kv: KVPages) -> dict[ProgramSize, StepProgram | None]:
        """Returns the programs of a pool; drops another's."""
        if kv.data.data_ptr() != self._programs_kv:
            self._programs, self._programs_kv = {}, kv.data.data_ptr()
        return self._programs

    def _record(self, kv: KVPages, size: ProgramSize) -> StepProgram | None:
        """Records a step of rows, or guesses, of any number of blocks."""
        recorder = self._backend.record()
        if recorder is None:
            return None
        buffers = Buffers.make(self.config, size.num_tokens, size.num_sequences, self.weights.embedding.dtype)
        return RecordedProgram(
            recorder,
            lambda batch, angles: self.run_layers(recorder, batch, angles, kv, buffers),
            lambda sampled: self.run_head(recorder, sampled, buffers),
            self.angles_for(kv),
            len(self.config.ropes) * (self.config.attention.head_dim // 2),
            size,
            self.layout.num_blocks(Window(self.layout).max_len(len(kv.data), self.max_context_len)),
            self.layout.block_size,
        )

    def _capture(self, kv: KVPages, size: ProgramSize) -> StepProgram | None:
        """Captures a step; None if the device has no memory for it.

        All captures write one tensor of logits, which are read before the next graph runs.
        """
        angles = self.angles_for(kv)
        assert isinstance(angles, Angles), "sinks are not captured"

        try:
            if len(self._captured_logits) < size.num_sequences:
                self._captured_logits = self._captured_logits.new_empty(size.num_sequences, self.vocab_size)
            buffers = Buffers(logits=self._captured_logits[: size.num_sequences])

            def forward(batch: Batch, angles: Angles) -> torch.Tensor:
                return self.run(self._backend, batch, angles, kv, buffers)

            return CapturedProgram(forward, angles, size, self.device)
        except RuntimeError as failure:
            log.warning("steps of %s run without a graph: %s", size, failure)
            return None

    def _make_far_angles(self) -> FarAngles:
        head_dim, last_near = self.config.attention.head_dim, self.layout.num_sinks + (self.layout.window or 0) - 1
        return FarAngles(self.config.ropes[0], head_dim, self.max_context_len, last_near, self.device)

    def angles_for(self, kv: KVPages) -> Angles | FarAngles:
        """Makes the angles of all positions that a pool has room for, at the first call."""
        if self._far_angles is not None:
            return self._far_angles
        num_positions = Window(self.layout).max_len(len(kv.data), self.max_context_len)
        if len(self._angles.cosines) < num_positions:
            self._angles = make_angles(self.config.ropes, self.config.attention.head_dim, num_positions, self.device)
        return self._angles


def kind_of(value: object) -> object:
    """Describes what launches follow from: types, dtypes, shapes, strides and alignments, but no tensor's numbers."""
    if isinstance(value, torch.Tensor):
        return value.dtype, value.shape, value.stride(), value.data_ptr() % ALIGNED_BYTES
    if is_dataclass(value):
        return type(value), *(kind_of(getattr(value, one.name)) for one in fields(value))
    return tuple(map(kind_of, value)) if isinstance(value, tuple) else repr(value)


def compute_dtype(dtype: str | None, config: ServedConfig, backend: Backend) -> torch.dtype:
    """Resolves a compute dtype: as requested, else the checkpoint's own; float32 for torch's backend on a CPU.

    Raises ConfigError for an unknown dtype.
    """
    name = dtype or ("float32" if backend.name == "torch" else config.dtype)
    if name not in DTYPES:
        raise ConfigError(f"unknown dtype {name[:64]}; known: {', '.join(DTYPES)}")
    resolved = getattr(torch, name)
    assert isinstance(resolved, torch.dtype)
    return resolved


def check_kv_dtype(device: torch.device, kv_dtype: str) -> None:
    """Raises ConfigError for a KV dtype that the kernels of the device do not read."""
    if device.type != "cpu" and (problem := accelerator_of(device).refuses(device, kv_dtype)):
        raise ConfigError(f"model.kv_dtype: {problem}")
