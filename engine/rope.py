"""Rotary position embedding: its part of config.json, and the rotation."""

from dataclasses import dataclass

import torch

from engine.json_fields import JsonFields
from engine.rope_scaling import (
    LinearScaling,
    Llama3Scaling,
    RopeScaling,
    Unscaled,
    YarnScaling,
    yarn_attention_factor,
)
from wire.errors import ModelError

DEFAULT_THETA = 10_000.0


@dataclass(frozen=True)
class RopeConfig:
    """theta: the longest period, in units of 2 pi positions, as head_dim grows."""

    theta: float
    scaling: RopeScaling

    @classmethod
    def parse(cls, config: JsonFields, max_context_len: int) -> "RopeConfig":
        """From a whole config.json: `rope_scaling` with `rope_theta` (transformers 4), or `rope_parameters` (5).

        Raises ModelError for kinds that cannot be served.
        """
        fields = config.section("rope_scaling" if config.raw("rope_scaling") else "rope_parameters")
        for name in ("full_attention", "sliding_attention"):
            if name in fields:
                raise ModelError("rotary embeddings that differ from layer to layer are not supported")
        for source in (fields, config):
            if source.positive("partial_rotary_factor", 1.0) != 1.0:
                raise ModelError("rotary embedding of a part of the head (partial_rotary_factor) is not supported")
        trained_len = config.count("original_max_position_embeddings", max_context_len)
        if "original_max_position_embeddings" not in config:
            trained_len = fields.count("original_max_position_embeddings", max_context_len)
        theta = fields.positive("rope_theta", config.positive("rope_theta", DEFAULT_THETA))
        return cls(theta, _parse_scaling(fields, max_context_len, trained_len))


def _parse_scaling(fields: JsonFields, max_context_len: int, trained_len: int) -> RopeScaling:
    kind = fields.text("rope_type", fields.text("type", "default"))
    match kind:
        case "default":
            return Unscaled()
        case "linear":
            return LinearScaling(fields.positive("factor"))
        case "llama3":
            return _parse_llama3(fields, trained_len)
        case "yarn":
            return _parse_yarn(fields, max_context_len, trained_len)
        case "dynamic" | "longrope" | "su":
            raise ModelError(
                f"rope type {kind} cannot be served: its angles depend on a request's total length, "
                "so a token's KV is no function of the tokens before it"
            )
    raise ModelError(f"rope type {kind[:64]} is not supported; supported: default, linear, llama3, yarn")


def _parse_llama3(fields: JsonFields, trained_len: int) -> Llama3Scaling:
    low, high = fields.positive("low_freq_factor"), fields.positive("high_freq_factor")
    if low >= high:
        raise fields.wrong("high_freq_factor", "more than low_freq_factor")
    return Llama3Scaling(fields.positive("factor"), low, high, trained_len)


def _parse_yarn(fields: JsonFields, max_context_len: int, trained_len: int) -> YarnScaling:
    factor = fields.positive("factor", max_context_len / trained_len)
    mscale, mscale_all_dim = (
        fields.positive(name) if fields.raw(name) else None for name in ("mscale", "mscale_all_dim")
    )
    attention_factor = fields.positive("attention_factor", yarn_attention_factor(factor, mscale, mscale_all_dim))
    beta_fast, beta_slow = (
        fields.positive(name, default) if fields.raw(name) else default
        for name, default in (("beta_fast", 32.0), ("beta_slow", 1.0))
    )
    return YarnScaling(factor, trained_len, attention_factor, beta_fast, beta_slow, fields.flag("truncate", True))


class Rope:
    """Turns positions into rotations. Angles are float32 whatever the model's dtype."""

    def __init__(self, config: RopeConfig, head_dim: int, dtype: torch.dtype, device: torch.device) -> None:
        periods = config.theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
        self._inverse_frequencies = config.scaling.inverse_frequencies(periods, config.theta).to(device)
        self._attention_factor = config.scaling.attention_factor
        self._dtype = dtype

    def rotation(self, positions: torch.Tensor) -> "Rotation":
        """For positions int64 [T]."""
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
        """Queries or keys [T, heads, head_dim], element i of a head rotated with element i + head_dim / 2."""
        first, second = states.chunk(2, dim=-1)
        return states * self.cos + torch.cat((-second, first), dim=-1) * self.sin
