"""Rotary position embedding as config.json asks for it.

A scaling maps the periods of the unscaled embedding, `theta ** (2i / head_dim)` for i in [0, head_dim / 2), to inverse
frequencies of positions. Operations have transformers' order, so that angles are equal bit by bit. Scalings that depend
on a request's final length are refused: their keys depend on later tokens.
"""

import math
from dataclasses import dataclass

import torch

from engine.checkpoint.json_fields import JsonFields
from wire.errors import ModelError

MIN_CONTEXT, MAX_CONTEXT = 16, 1 << 24
"""The bounds of a context length, in tokens: float32, the dtype of angles, does not tell higher positions apart."""
DEFAULT_THETA = 10_000.0
THETAS = (10.0, 1e12)
FACTORS = (0.01, 10_000.0)
"""The bounds of a scaling's numbers, wider than any model's: a number beyond them is an error in config.json."""


@dataclass(frozen=True)
class RopeScaling:
    """Positions divided by a factor, by default 1; `attention_factor` multiplies cosines and sines.

    Sources: RoFormer, arXiv 2104.09864; position interpolation, arXiv 2306.15595.
    """

    factor: float = 1.0
    attention_factor: float = 1.0
    max_len: int = MAX_CONTEXT
    """Tokens for which the frequencies hold."""

    def inverse_frequencies(self, periods: torch.Tensor, theta: float) -> torch.Tensor:
        """Maps periods, float32 [head_dim / 2], to inverse frequencies of the same shape."""
        return (1.0 / periods) / self.factor


@dataclass(frozen=True, kw_only=True)
class Llama3Scaling(RopeScaling):
    """Long wavelengths divided by a factor, short ones kept, a blend between. Source: Llama 3.1's model code."""

    low_freq_factor: float
    high_freq_factor: float
    trained_len: int

    def inverse_frequencies(self, periods: torch.Tensor, theta: float) -> torch.Tensor:
        plain = 1.0 / periods
        wavelengths = 2 * math.pi / plain
        smooth = (self.trained_len / wavelengths - self.low_freq_factor) / (
            self.high_freq_factor - self.low_freq_factor
        )
        passage = (1 - smooth) * plain / self.factor + smooth * plain
        is_long = wavelengths > self.trained_len / self.low_freq_factor
        is_short = wavelengths < self.trained_len / self.high_freq_factor
        return torch.where(is_long, plain / self.factor, torch.where(is_short, plain, passage))


@dataclass(frozen=True, kw_only=True)
class YarnScaling(RopeScaling):
    """Fast dimensions kept, slow ones interpolated, a linear ramp between. Source: YaRN, arXiv 2309.00071.

    beta_fast, beta_slow: rotations over the trained length at which the ramp begins and ends.
    truncate: whether the ramp's ends are rounded outwards to whole dimensions.
    """

    trained_len: int
    beta_fast: float
    beta_slow: float
    truncate: bool

    def inverse_frequencies(self, periods: torch.Tensor, theta: float) -> torch.Tensor:
        kept = 1 - self._ramp(len(periods), theta)
        return 1.0 / (self.factor * periods) * (1 - kept) + 1.0 / periods * kept

    def _ramp(self, num_frequencies: int, theta: float) -> torch.Tensor:
        """Weighs each frequency: 0 keeps it, 1 interpolates it."""
        head_dim = 2 * num_frequencies
        first = self._dimension(self.beta_fast, head_dim, theta)
        last = self._dimension(self.beta_slow, head_dim, theta)
        if self.truncate:
            first, last = math.floor(first), math.ceil(last)
        first, last = max(first, 0), min(last, head_dim - 1)
        width = last - first if last != first else 0.001
        return ((torch.arange(num_frequencies, dtype=torch.float32) - first) / width).clamp(0, 1)

    def _dimension(self, rotations: float, head_dim: int, theta: float) -> float:
        """Finds the dimension with this number of rotations over the trained length."""
        return head_dim * math.log(self.trained_len / (rotations * 2 * math.pi)) / (2 * math.log(theta))


@dataclass(frozen=True, kw_only=True)
class ShortScaling(RopeScaling):
    """LongRoPE within the length that a model was trained on, arXiv 2402.13753: beyond it all angles would change.

    divisors: a number for each frequency.
    """

    divisors: tuple[float, ...]

    def inverse_frequencies(self, periods: torch.Tensor, theta: float) -> torch.Tensor:
        return 1.0 / (torch.tensor(self.divisors) * periods)


@dataclass(frozen=True)
class RopeConfig:
    """theta: the longest period, in units of 2 pi positions, as head_dim grows. part: the share of a head that rotates.

    A checkpoint has the rotated part of a head first. is_interleaved: it rotates neighbours there, else a number of its
    first half with one of its second.
    """

    theta: float
    scaling: RopeScaling
    part: float = 1.0
    is_interleaved: bool = False

    def rotated_dim(self, head_dim: int) -> int:
        return int(head_dim * self.part)

    def frequencies(self, head_dim: int) -> torch.Tensor:
        """Returns radians per position, float32 [head_dim / 2]: 0 for numbers that are not rotated."""
        rotated = self.rotated_dim(head_dim)
        periods = self.theta ** (torch.arange(0, rotated, 2, dtype=torch.float32) / rotated)
        found = self.scaling.inverse_frequencies(periods, self.theta) if rotated else periods
        return torch.cat([found, torch.zeros((head_dim - rotated) // 2)])

    def factors(self, head_dim: int) -> torch.Tensor:
        """Returns the factors of cosines and sines, float64 [head_dim / 2]."""
        factors = torch.ones(head_dim // 2, dtype=torch.float64)
        factors[: self.rotated_dim(head_dim) // 2] = self.scaling.attention_factor
        return factors

    def head_order(self, head_dim: int) -> torch.Tensor | None:
        """Returns which number of a checkpoint's head each of ours is, int64 [head_dim]; None where they are the same.

        Ours rotates each number of the first half of a whole head with one of the second half.
        """
        rotated = self.rotated_dim(head_dim)
        if rotated in (0, head_dim) and not self.is_interleaved:
            return None
        pairs = torch.arange(rotated).view(-1, 2).T if self.is_interleaved else torch.arange(rotated).view(2, -1)
        return torch.cat([pairs, torch.arange(rotated, head_dim).view(2, -1)], dim=1).flatten()

    @classmethod
    def parse(
        cls,
        fields: JsonFields,
        config: JsonFields,
        max_context_len: int,
        head_dim: int,
        part: float = 1.0,
        is_interleaved: bool = False,
    ) -> "RopeConfig":
        """Parses `rope_scaling` (transformers 4) or `rope_parameters` (5). config: has `rope_theta`, if they have not.

        Raises ModelError for kinds that cannot be served.
        """
        rotated = int(head_dim * part)
        if rotated % 2 or not rotated:
            raise fields.wrong("partial_rotary_factor", f"an even part of a head of {head_dim} dimensions")
        length = "original_max_position_embeddings"
        trained_len = (config if length in config else fields).count(length, max_context_len, MAX_CONTEXT, MIN_CONTEXT)
        theta = (fields if "rope_theta" in fields else config).number("rope_theta", *THETAS, DEFAULT_THETA)
        scaling = _parse_scaling(fields, max_context_len, trained_len, rotated // 2)
        return cls(theta, scaling, part, is_interleaved)


UNROTATED = RopeConfig(DEFAULT_THETA, RopeScaling(), 0.0)
"""The positions of a layer without a rotary embedding."""


def _parse_scaling(fields: JsonFields, max_context_len: int, trained_len: int, num_frequencies: int) -> RopeScaling:
    kind = fields.text("rope_type", fields.text("type", "default"))
    match kind:
        case "default":
            return RopeScaling()
        case "linear":
            return RopeScaling(fields.number("factor", *FACTORS))
        case "llama3":
            return _parse_llama3(fields, trained_len)
        case "yarn":
            return _parse_yarn(fields, max_context_len, trained_len)
        case "longrope" | "su":
            return _parse_short(fields, max_context_len, trained_len, num_frequencies)
        case "dynamic":
            raise ModelError(
                f"rope type {kind} cannot be served: its angles depend on a request's total length, "
                "so a token's KV is no function of the tokens before it"
            )
    raise ModelError(f"rope type {kind[:64]} is not supported; supported: default, linear, llama3, yarn, longrope")


def _parse_short(fields: JsonFields, max_context_len: int, trained_len: int, num_frequencies: int) -> ShortScaling:
    divisors = fields.raw("short_factor")
    expected = f"{num_frequencies} numbers from {FACTORS[0]:g} to {FACTORS[1]:g}"
    if not isinstance(divisors, list) or len(divisors) != num_frequencies:
        raise fields.wrong("short_factor", expected)
    if any(
        isinstance(one, bool) or not isinstance(one, int | float) or not FACTORS[0] <= one <= FACTORS[1]
        for one in divisors
    ):
        raise fields.wrong("short_factor", expected)
    stretch = fields.number("factor", *FACTORS, max_context_len / trained_len)
    attention_factor = math.sqrt(1 + math.log(stretch) / math.log(trained_len)) if stretch > 1 else 1.0
    return ShortScaling(
        attention_factor=fields.number("attention_factor", *FACTORS, attention_factor),
        max_len=trained_len,
        divisors=tuple(map(float, divisors)),
    )


def _parse_llama3(fields: JsonFields, trained_len: int) -> Llama3Scaling:
    low, high = fields.number("low_freq_factor", *FACTORS), fields.number("high_freq_factor", *FACTORS)
    if low >= high:
        raise fields.wrong("high_freq_factor", "more than low_freq_factor")
    factor = fields.number("factor", *FACTORS)
    return Llama3Scaling(factor=factor, low_freq_factor=low, high_freq_factor=high, trained_len=trained_len)


def _parse_yarn(fields: JsonFields, max_context_len: int, trained_len: int) -> YarnScaling:
    factor = fields.number("factor", *FACTORS, max_context_len / trained_len)
    return YarnScaling(
        factor=factor,
        attention_factor=fields.number("attention_factor", *FACTORS, _yarn_attention_factor(fields, factor)),
        trained_len=trained_len,
        beta_fast=_factor_if_set(fields, "beta_fast") or 32.0,
        beta_slow=_factor_if_set(fields, "beta_slow") or 1.0,
        truncate=fields.flag("truncate", True),
    )


def _yarn_attention_factor(fields: JsonFields, factor: float) -> float:
    """Computes the attention factor of a configuration that names none."""
    mscale, mscale_all_dim = _factor_if_set(fields, "mscale"), _factor_if_set(fields, "mscale_all_dim")
    if mscale and mscale_all_dim:
        return _mscale(factor, mscale) / _mscale(factor, mscale_all_dim)
    return _mscale(factor, 1.0)


def _factor_if_set(fields: JsonFields, name: str) -> float | None:
    return fields.number(name, *FACTORS) if fields.raw(name) else None


def _mscale(factor: float, weight: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0
