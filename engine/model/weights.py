"""The tensors of a decoder, as they are read from a checkpoint."""

from dataclasses import dataclass

import torch
from torch.nn import functional as F

from engine.checkpoint.checkpoint import Checkpoint
from engine.checkpoint.config import ModelConfig


@dataclass(frozen=True)
class Linear:
    """weight [out, in], bias [out] or None."""

    weight: torch.Tensor
    bias: torch.Tensor | None = None

    def __call__(self, states: torch.Tensor) -> torch.Tensor:
        return F.linear(states, self.weight, self.bias)


@dataclass(frozen=True)
class RMSNorm:
    """Computed in float32 and cast before the weight is applied. Source: arXiv 1910.07467."""

    weight: torch.Tensor
    eps: float

    def __call__(self, states: torch.Tensor) -> torch.Tensor:
        wide = states.float()
        scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * (wide * scale).to(states.dtype)


@dataclass(frozen=True)
class LayerWeights:
    """A layer. Query, key and value are one matrix, as are gate and up: fewer and larger products."""

    attention_norm: RMSNorm
    qkv: Linear
    query_norm: RMSNorm | None
    key_norm: RMSNorm | None
    attention_output: Linear
    mlp_norm: RMSNorm
    gate_up: Linear
    down: Linear


@dataclass(frozen=True)
class DecoderWeights:
    """embedding: [vocab_size, hidden_size]."""

    embedding: torch.Tensor
    layers: tuple[LayerWeights, ...]
    norm: RMSNorm
    head: Linear


class WeightLoader:
    """A reader of a checkpoint's weights into one dtype on one device."""

    def __init__(self, checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device) -> None:
        self._checkpoint = checkpoint
        self._config: ModelConfig = checkpoint.config
        self._dtype = dtype
        self._device = device

    def load(self) -> DecoderWeights:
        """Raises ModelError if a tensor is missing or of the wrong shape."""
        config = self._config
        embedding = self._tensor("model.embed_tokens.weight", config.vocab_size, config.hidden_size)
        is_tied = config.tied_embeddings and "lm_head.weight" not in self._checkpoint
        head = embedding if is_tied else self._tensor("lm_head.weight", config.vocab_size, config.hidden_size)
        layers = tuple(self._layer(f"model.layers.{index}") for index in range(config.num_layers))
        return DecoderWeights(embedding, layers, self._norm("model.norm", config.hidden_size), Linear(head))

    def _layer(self, layer: str) -> LayerWeights:
        config, attention = self._config, self._config.attention
        hidden, mlp = config.hidden_size, config.intermediate_size
        queries, keys = attention.num_heads * attention.head_dim, attention.num_kv_heads * attention.head_dim
        norms = [
            self._norm(f"{layer}.self_attn.{name}", attention.head_dim) if attention.qk_norm else None
            for name in ("q_norm", "k_norm")
        ]
        qkv = {f"{layer}.self_attn.{name}_proj": size for name, size in (("q", queries), ("k", keys), ("v", keys))}
        gate_up = {f"{layer}.mlp.gate_proj": mlp, f"{layer}.mlp.up_proj": mlp}
        return LayerWeights(
            attention_norm=self._norm(f"{layer}.input_layernorm", hidden),
            qkv=self._linear(qkv, hidden, attention.qkv_bias),
            query_norm=norms[0],
            key_norm=norms[1],
            attention_output=self._linear({f"{layer}.self_attn.o_proj": hidden}, queries, attention.output_bias),
            mlp_norm=self._norm(f"{layer}.post_attention_layernorm", hidden),
            gate_up=self._linear(gate_up, hidden, config.mlp_bias),
            down=self._linear({f"{layer}.mlp.down_proj": hidden}, mlp, config.mlp_bias),
        )

    def _linear(self, name_to_size: dict[str, int], in_size: int, has_bias: bool) -> Linear:
        weight = self._stacked({f"{name}.weight": (size, in_size) for name, size in name_to_size.items()})
        bias = self._stacked({f"{name}.bias": (size,) for name, size in name_to_size.items()}) if has_bias else None
        return Linear(weight, bias)

    def _stacked(self, name_to_shape: dict[str, tuple[int, ...]]) -> torch.Tensor:
        return torch.cat([self._tensor(name, *shape) for name, shape in name_to_shape.items()])

    def _norm(self, name: str, size: int) -> RMSNorm:
        return RMSNorm(self._tensor(f"{name}.weight", size), self._config.rms_norm_eps)

    def _tensor(self, name: str, *shape: int) -> torch.Tensor:
        return self._checkpoint.read(name, shape, self._dtype, self._device)


def check_weights(checkpoint: Checkpoint) -> None:
    """Raises ModelError for a tensor that is missing, of another shape or no part of the model; reads no content."""
    WeightLoader(checkpoint, torch.float32, torch.device("meta")).load()
    checkpoint.refuse_unread()
