"""The native decoder: Llama, Mistral, Qwen2, Qwen3 and models that differ from them in data only.

Numerics follow transformers step by step (norms, angles and softmax in float32, the rest in the model's dtype), so that
greedy tokens in float32 are the same.
"""

from dataclasses import dataclass
from pathlib import Path

import torch
from torch.nn import functional as F

from engine.checkpoint.checkpoint import Checkpoint
from engine.checkpoint.config import DTYPES, ModelConfig
from engine.checkpoint.rope import RopeConfig
from engine.model.batch import Batch
from engine.model.weights import DecoderWeights, LayerWeights, WeightLoader, check_weights
from kernels.backend import KernelBackend, select_backend
from wire.errors import ConfigError


class Rope:
    """The rotary embedding of a model. Angles are float32 in every dtype of the model."""

    def __init__(self, config: RopeConfig, head_dim: int, dtype: torch.dtype, device: torch.device) -> None:
        periods = config.theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
        self._inverse_frequencies = config.scaling.inverse_frequencies(periods, config.theta).to(device)
        self._attention_factor = config.scaling.attention_factor
        self._dtype = dtype

    def rotation(self, positions: torch.Tensor) -> "Rotation":
        """Rotates positions int64 [T]."""
        angles = positions[:, None].float() * self._inverse_frequencies
        angles = torch.cat((angles, angles), dim=-1)[:, None, :]
        cos, sin = angles.cos() * self._attention_factor, angles.sin() * self._attention_factor
        return Rotation(cos.to(self._dtype), sin.to(self._dtype))


@dataclass(frozen=True)
class Rotation:
    """cos, sin: [T, 1, head_dim], both halves of the head alike."""

    cos: torch.Tensor
    sin: torch.Tensor

    def apply(self, states: torch.Tensor) -> torch.Tensor:
        """Rotates queries or keys [T, heads, head_dim], element i of a head with element i + head_dim / 2."""
        first, second = states.chunk(2, dim=-1)
        return states * self.cos + torch.cat((-second, first), dim=-1) * self.sin


class PagedAttention:
    """The attention of one batch, layer after layer."""

    def __init__(self, backend: KernelBackend, batch: Batch, scale: float) -> None:
        self._backend = backend
        self._batch = batch
        self._scale = scale
        self._prompt_starts = batch.cu_query_lens[batch.num_decodes :] - batch.num_decodes

    def __call__(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_layer: torch.Tensor,
        window: int | None,
    ) -> torch.Tensor:
        """Writes the batch's keys and values into a layer, then attends to all of its sequences' tokens there.

        query and the result: [T, num_heads, head_dim]; key and value: [T, num_kv_heads, head_dim]; kv_layer:
        [num_pages, 2, num_kv_heads, block_size, head_dim]. window: tokens that a row sees, itself included.
        """
        self._backend.write_kv(key, value, kv_layer, self._batch.slot_mapping)
        num_decodes, num_sequences = self._batch.num_decodes, len(self._batch.context_lens)
        if num_decodes == num_sequences:
            return self._decode(query, kv_layer, window)
        prompts = self._prefill(query[num_decodes:], kv_layer, window)
        if num_decodes == 0:
            return prompts
        return torch.cat((self._decode(query[:num_decodes], kv_layer, window), prompts))

    def _decode(self, query: torch.Tensor, kv_layer: torch.Tensor, window: int | None) -> torch.Tensor:
        tables, lens = self._batch.block_tables[: len(query)], self._batch.context_lens[: len(query)]
        return self._backend.paged_decode_attention(query, kv_layer, tables, lens, self._scale, window)

    def _prefill(self, query: torch.Tensor, kv_layer: torch.Tensor, window: int | None) -> torch.Tensor:
        first = self._batch.num_decodes
        tables, lens = self._batch.block_tables[first:], self._batch.context_lens[first:]
        starts = self._prompt_starts
        return self._backend.paged_prefill_attention(query, kv_layer, tables, lens, starts, self._scale, window)


class Decoder:
    """A `Model` with weights. Its twin is `engine.model.hash_model.HashModel`."""

    def __init__(self, config: ModelConfig, weights: DecoderWeights, block_size: int, backend: KernelBackend) -> None:
        """Takes device and dtype from the weights."""
        dtype = weights.embedding.dtype
        self.config = config
        self.weights = weights
        self.layout = config.kv_layout(str(dtype).removeprefix("torch."), block_size)
        self.device = weights.embedding.device
        self.vocab_size = config.vocab_size
        self.max_context_len = config.max_context_len
        self.eos_token_ids = config.eos_token_ids
        self._backend = backend
        self._rope = Rope(config.rope, config.attention.head_dim, dtype, self.device)

    @classmethod
    def load(
        cls,
        folder: Path,
        dtype: str | None,
        device: torch.device,
        block_size: int,
        backend: KernelBackend | None = None,
    ) -> "Decoder":
        """Loads a checkpoint folder. Without a dtype it is float32 on a CPU, the checkpoint's own elsewhere.

        Raises ModelError for a folder that cannot be served, ConfigError for an unknown dtype.
        """
        checkpoint = Checkpoint(folder)
        check_weights(checkpoint)
        weights = WeightLoader(checkpoint, compute_dtype(dtype, checkpoint.config, device), device).load()
        return cls(checkpoint.config, weights, block_size, backend or select_backend(device))

    @torch.inference_mode()
    def forward(self, batch: Batch, kv: torch.Tensor) -> torch.Tensor:
        """Does as `Model.forward`. Returns an inference tensor, not to be changed in place outside that mode."""
        attention = PagedAttention(self._backend, batch, self.config.attention.head_dim**-0.5)
        rotation = self._rope.rotation(batch.positions)
        states = F.embedding(batch.token_ids, self.weights.embedding)
        for index, layer in enumerate(self.weights.layers):
            window = self.config.attention.windows[index]
            states = states + self._attend(
                layer, layer.attention_norm(states), rotation, attention, kv[:, index], window
            )
            states = states + _feed_forward(layer, layer.mlp_norm(states))
        return self.weights.head(self.weights.norm(states[batch.sample_rows])).float()

    def _attend(
        self,
        layer: LayerWeights,
        states: torch.Tensor,
        rotation: Rotation,
        attention: PagedAttention,
        kv_layer: torch.Tensor,
        window: int | None,
    ) -> torch.Tensor:
        shape = self.config.attention
        heads = layer.qkv(states).view(len(states), -1, shape.head_dim)
        query, key, value = torch.split(heads, [shape.num_heads, shape.num_kv_heads, shape.num_kv_heads], dim=1)
        if layer.query_norm and layer.key_norm:
            query, key = layer.query_norm(query), layer.key_norm(key)
        attended = attention(rotation.apply(query), rotation.apply(key), value, kv_layer, window)
        return layer.attention_output(attended.flatten(1))


def _feed_forward(layer: LayerWeights, states: torch.Tensor) -> torch.Tensor:
    gate, up = layer.gate_up(states).chunk(2, dim=-1)
    return layer.down(F.silu(gate) * up)


def compute_dtype(dtype: str | None, config: ModelConfig, device: torch.device) -> torch.dtype:
    """Resolves a compute dtype: as asked, else float32 on a CPU and the checkpoint's own dtype elsewhere."""
    name = dtype or ("float32" if device.type == "cpu" else config.dtype)
    if name not in DTYPES:
        raise ConfigError(f"unknown dtype {name[:64]}; known: {', '.join(DTYPES)}")
    resolved = getattr(torch, name)
    assert isinstance(resolved, torch.dtype)
    return resolved
