"""The native decoder: Llama, Mistral, Qwen2, Qwen3 and models that differ from them in data only.

Numerics follow transformers step by step (norms, angles and softmax in float32, the rest in the model's dtype), so that
greedy tokens in float32 are the same.
"""

from pathlib import Path

import torch

from engine.checkpoint.checkpoint import Checkpoint
from engine.checkpoint.config import DTYPES, ModelConfig
from engine.checkpoint.rope import RopeConfig
from engine.model.batch import Batch
from engine.model.weights import DecoderWeights, WeightLoader, check_weights
from kernels.backend import Angles, Backend, Tables, select_backend
from wire.errors import ConfigError

ANGLES_AT_ONCE = 1 << 16


def make_angles(config: RopeConfig, head_dim: int, num_positions: int, device: torch.device) -> Angles:
    """Makes the angles of a rotary embedding for the first positions.

    Angles are float32 as in transformers; their cosines are taken in float64 and rounded, so that no bit depends on
    where a position stands in a batch, nor on the number of threads.
    """
    angles = torch.arange(num_positions, dtype=torch.float32)[:, None] * config.frequencies(head_dim)
    parts = angles.split(ANGLES_AT_ONCE)
    factor = config.scaling.attention_factor
    cosines, sines = (
        torch.cat([(take(part.double()) * factor).float() for part in parts]) for take in (torch.cos, torch.sin)
    )
    return Angles(cosines.to(device), sines.to(device))


class Decoder:
    """A `Model` with weights. Its twin is `engine.model.hash_model.HashModel`."""

    def __init__(
        self, config: ModelConfig, weights: DecoderWeights, dtype: str, block_size: int, backend: Backend
    ) -> None:
        """Takes the device from the weights, which `backend` has packed."""
        self.config = config
        self.weights = weights
        self.layout = config.kv_layout(dtype, block_size)
        self.device = weights.norm.device
        self.vocab_size = config.vocab_size
        self.max_context_len = config.max_context_len
        self.eos_token_ids = config.eos_token_ids
        self._backend = backend
        self._angles = make_angles(config.rope, config.attention.head_dim, 1, self.device)
        self._scale = config.attention.head_dim**-0.5

    @classmethod
    def load(
        cls,
        folder: Path,
        dtype: str | None,
        device: torch.device,
        block_size: int,
        backend: Backend | None = None,
    ) -> "Decoder":
        """Loads a checkpoint folder. Without a dtype it is the checkpoint's own, where the backend is made for it.

        Raises ModelError for a folder that cannot be served, ConfigError for an unknown dtype.
        """
        checkpoint = Checkpoint(folder)
        check_weights(checkpoint)
        backend = backend or select_backend(device)
        resolved = compute_dtype(dtype, checkpoint.config, backend)
        weights = WeightLoader(checkpoint, resolved, device, backend).load()
        return cls(checkpoint.config, weights, str(resolved).removeprefix("torch."), block_size, backend)

    @torch.inference_mode()
    def forward(self, batch: Batch, kv: torch.Tensor) -> torch.Tensor:
        """Does as `Model.forward`. Returns an inference tensor, not to be changed in place outside that mode."""
        do, eps = self._backend, self.config.rms_norm_eps
        angles = self._angles_within(len(kv) * self.layout.block_size).at(batch.positions)
        tables = Tables(batch.block_tables, batch.context_lens, batch.cu_query_lens, batch.num_decodes)
        states = do.embed(batch.token_ids, self.weights.embedding)
        for index, layer in enumerate(self.weights.layers):
            pages, window = kv[:, index], self.config.attention.windows[index]
            qkv = do.linear(do.rms_norm(states, layer.attention_norm, eps), layer.qkv.weight, layer.qkv.bias)
            query = do.rotate_and_write(qkv, layer.heads, angles, pages, batch.slot_mapping)
            attended = do.attend(query, pages, tables, self._scale, window).flatten(1)
            states = do.linear(attended, layer.attention_output.weight, layer.attention_output.bias, states)
            gate_up = do.linear(do.rms_norm(states, layer.mlp_norm, eps), layer.gate_up.weight, layer.gate_up.bias)
            states = do.linear(do.gate(gate_up), layer.down.weight, layer.down.bias, states)
        return do.logits(do.rms_norm(states[batch.sample_rows], self.weights.norm, eps), self.weights.head)

    def _angles_within(self, num_positions: int) -> Angles:
        """Makes the angles of all positions that a pool has room for, once."""
        num_positions = min(num_positions, self.max_context_len)
        if len(self._angles.cosines) < num_positions:
            self._angles = make_angles(self.config.rope, self.config.attention.head_dim, num_positions, self.device)
        return self._angles


def compute_dtype(dtype: str | None, config: ModelConfig, backend: Backend) -> torch.dtype:
    """Resolves a compute dtype: as asked, else the checkpoint's own; float32 where torch serves on a CPU.

    Raises ConfigError for an unknown dtype.
    """
    name = dtype or ("float32" if backend.name == "torch" else config.dtype)
    if name not in DTYPES:
        raise ConfigError(f"unknown dtype {name[:64]}; known: {', '.join(DTYPES)}")
    resolved = getattr(torch, name)
    assert isinstance(resolved, torch.dtype)
    return resolved
