"""Matrices of few bits, from files or rounded from plain matrices: codes, and scales in groups along the depth."""

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from kernels.quantized.codebook import Codebook

INT8_GROUP, INT4_GROUP = 64, 32
SCALES = (2.0**-100, 2.0**90)
"""Bounds of scales for the CPU's kernels: within them no weight, rounded or not, is subnormal or infinite."""


@dataclass(frozen=True, kw_only=True)
class Quantized:
    """A matrix [columns, depth] of weights (code - zero) * scale + offset, in float32, rounded to `source`.

    codes: uint8 of `bits` bits, int8 or float8_e4m3fn. codebook: the numbers that codes of 4 bits stand for, without a
    zero or offsets; None for the codes themselves. scales, offsets: float16, bfloat16 or float32 [columns, blocks].
    A block is `block` weights of a column; each `group` of them may multiply its scale and offset by factors, int8
    [columns, groups]. zero: 0, or half of the codes. source: the dtype that the file computes weights in.
    """

    codes: Tensor
    bits: int
    group: int
    block: int
    scales: Tensor
    offsets: Tensor | None = None
    scale_factors: Tensor | None = None
    offset_factors: Tensor | None = None
    zero: int = 0
    codebook: Codebook | None = None
    source: torch.dtype = torch.float32

    @property
    def columns(self) -> int:
        return self.codes.shape[0]

    @property
    def depth(self) -> int:
        return self.codes.shape[1]

    def to(self, device: torch.device) -> "Quantized":
        """Copies the matrix to a device."""
        return self._with(lambda one: one.to(device))

    def pick(self, columns: Tensor) -> "Quantized":
        """Returns the columns of these places, int64 [columns], in their order."""
        return self._with(lambda one: one[columns])

    def outline(self, columns: int) -> "Quantized":
        """Returns a matrix of `columns` columns in this format, without content, on the device `meta`."""
        return self._with(lambda one: one[:1].to("meta").expand(columns, -1))

    def dequantize(self) -> Tensor:
        """Computes the weights, float32 [columns, depth]: the oracle of all kernels."""
        # Products are exact in float32, and a sum rounds once; with long scales beside offsets they are not.
        is_long = self.offsets is not None and self.scales.dtype is torch.float32
        dtype = torch.float64 if is_long else torch.float32
        weights = (self._numbers() - self.zero) * self._spread(self.scales.to(dtype), self.scale_factors)
        if self.offsets is not None:
            weights = weights + self._spread(self.offsets.to(dtype), self.offset_factors)
        return weights.float().to(self.source).float()

    def is_finite(self, dtype: torch.dtype) -> bool:
        """Tells whether no weight is NaN or infinite in a dtype."""
        if dtype is torch.float16:
            return bool(self.dequantize().to(dtype).isfinite().all())
        if self.codebook is not None:
            return bool((self.scales.float() * self.codebook.largest).isfinite().all())
        scales = [one for one in (self.scales, self.offsets) if one is not None]
        return all(one.isfinite().all() for one in scales) and not self.codes.float().isnan().any()

    def _numbers(self) -> Tensor:
        """Reads what the codes stand for, float32 [columns, depth]."""
        if self.codebook is None:
            return self.codes.float()
        return torch.tensor(self.codebook.value, dtype=torch.float32, device=self.codes.device)[self.codes.int()]

    def _with(self, change: Callable[[Tensor], Tensor]) -> "Quantized":
        values = {one.name: getattr(self, one.name) for one in fields(self)}
        changed: dict[str, Any] = {name: change(one) for name, one in values.items() if isinstance(one, Tensor)}
        return replace(self, **changed)

    def _spread(self, of_blocks: Tensor, factors: Tensor | None) -> Tensor:
        """Multiplies numbers of blocks by the factors of groups; returns a number for each weight."""
        if factors is not None:
            of_groups = of_blocks.repeat_interleave(self.block // self.group, 1)[:, : factors.shape[1]]
            return (of_groups * factors).repeat_interleave(self.group, 1)[:, : self.depth]
        return of_blocks.repeat_interleave(self.block, 1)[:, : self.depth]


def round_to_int8(weight: Tensor) -> Quantized:
    """Rounds a plain matrix: each 64 weights of a column share a scale that maps the largest to 127."""
    groups = _groups(weight, INT8_GROUP)
    scales = _flushed(groups.abs().amax(-1) / 127)
    codes = (groups / scales[..., None]).nan_to_num(0.0).clamp(-127, 127).round().to(torch.int8)
    return Quantized(codes=_ungrouped(codes, weight), bits=8, group=INT8_GROUP, block=INT8_GROUP, scales=scales)


def round_to_int4(weight: Tensor) -> Quantized:
    """Rounds a plain matrix: each 32 weights of a column have sixteen steps, from the smallest to the largest."""
    groups = _groups(weight, INT4_GROUP)
    lowest, highest = torch.aminmax(groups, dim=-1)
    offsets = _flushed(lowest.bfloat16())
    scales = _flushed(((highest - offsets) / 15).bfloat16())
    codes = ((groups - offsets[..., None]) / scales[..., None]).nan_to_num(0.0).clamp(0, 15).round().to(torch.uint8)
    return Quantized(
        codes=_ungrouped(codes, weight), bits=4, group=INT4_GROUP, block=INT4_GROUP, scales=scales, offsets=offsets
    )


def _groups(weight: Tensor, size: int) -> Tensor:
    padding = -weight.shape[1] % size
    return F.pad(weight.float(), (0, padding), mode="constant").view(len(weight), -1, size)


def _ungrouped(codes: Tensor, weight: Tensor) -> Tensor:
    return codes.flatten(1)[:, : weight.shape[1]].contiguous()


def _flushed(scales: Tensor) -> Tensor:
    return scales.mul(scales.abs().ge(SCALES[0]))
