"""How a model stretches its rotary angles beyond the length it was trained on.

A scaling turns the periods of the unscaled embedding, `theta ** (2i / head_dim)` for i in [0, head_dim / 2), into the
inverse frequencies that positions are multiplied with. The order of operations is that of transformers, so that angles
are equal bit by bit. Scalings that depend on how long a request is in the end are not here: with them a key is no
function of the tokens before it.
"""

import math
from dataclasses import dataclass
from typing import Protocol

import torch


class RopeScaling(Protocol):
    """Kinds: `Unscaled`, `LinearScaling`, `Llama3Scaling`, `YarnScaling`."""

    @property
    def attention_factor(self) -> float:
        """What cosines and sines are multiplied with."""
        ...

    def inverse_frequencies(self, periods: torch.Tensor, theta: float) -> torch.Tensor:
        """float32 [head_dim / 2] to the same shape."""
        ...


@dataclass(frozen=True)
class Unscaled:
    """Rotary embedding as it was proposed. Source: RoFormer, arXiv 2104.09864."""

    attention_factor: float = 1.0

    def inverse_frequencies(self, periods: torch.Tensor, theta: float) -> torch.Tensor:
        return 1.0 / periods


@dataclass(frozen=True)
class LinearScaling:
    """Positions divided by a factor. Source: position interpolation, arXiv 2306.15595."""

    factor: float
    attention_factor: float = 1.0

    def inverse_frequencies(self, periods: torch.Tensor, theta: float) -> torch.Tensor:
        return (1.0 / periods) / self.factor


@dataclass(frozen=True)
class Llama3Scaling:
    """Long wavelengths divided by a factor, short ones kept, a passage between. Source: Llama 3.1's model code."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    trained_len: int
    attention_factor: float = 1.0

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


@dataclass(frozen=True)
class YarnScaling:
    """Fast dimensions kept, slow ones interpolated, a linear ramp between. Source: YaRN, arXiv 2309.00071.

    beta_fast, beta_slow: rotations over the trained length at which the ramp begins and ends.
    truncate: whether the ramp's ends are rounded outwards to whole dimensions.
    """

    factor: float
    trained_len: int
    attention_factor: float
    beta_fast: float = 32
    beta_slow: float = 1
    truncate: bool = True

    def inverse_frequencies(self, periods: torch.Tensor, theta: float) -> torch.Tensor:
        kept = 1 - self._ramp(len(periods), theta)
        return 1.0 / (self.factor * periods) * (1 - kept) + 1.0 / periods * kept

    def _ramp(self, num_frequencies: int, theta: float) -> torch.Tensor:
        """0 where a frequency is kept, 1 where it is interpolated."""
        head_dim = 2 * num_frequencies
        first = self._dimension(self.beta_fast, head_dim, theta)
        last = self._dimension(self.beta_slow, head_dim, theta)
        if self.truncate:
            first, last = math.floor(first), math.ceil(last)
        first, last = max(first, 0), min(last, head_dim - 1)
        width = last - first if last != first else 0.001
        return ((torch.arange(num_frequencies, dtype=torch.float32) - first) / width).clamp(0, 1)

    def _dimension(self, rotations: float, head_dim: int, theta: float) -> float:
        """The dimension that makes so many rotations over the trained length."""
        return head_dim * math.log(self.trained_len / (rotations * 2 * math.pi)) / (2 * math.log(theta))


def yarn_attention_factor(factor: float, mscale: float | None, mscale_all_dim: float | None) -> float:
    """The attention factor of a yarn configuration that names none."""
    if mscale and mscale_all_dim:
        return _mscale(factor, mscale) / _mscale(factor, mscale_all_dim)
    return _mscale(factor, 1.0)


def _mscale(factor: float, weight: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0
