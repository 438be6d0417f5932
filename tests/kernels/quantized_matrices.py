"""Drawn matrices of each format of weights that files have, by name."""

from collections.abc import Callable

import torch

from kernels.quantized.codebook import Codebook
from kernels.quantized.matrix import Quantized

Draw = Callable[[int, int], Quantized]


def _codes(bits: int, columns: int, depth: int) -> torch.Tensor:
    if bits == 8:
        return torch.randint(-128, 128, (columns, depth), dtype=torch.int8)
    return torch.randint(0, 1 << bits, (columns, depth), dtype=torch.uint8)


def _scales(columns: int, count: int, dtype: torch.dtype = torch.float16) -> torch.Tensor:
    """Draws scales of all sizes that files have, some negative, some 0."""
    scales = torch.randn(columns, count) * 2.0 ** torch.randint(-12, -4, (columns, count))
    scales[::7] = 0
    return scales.to(dtype)


def _groups(bits: int, group: int, has_offsets: bool) -> Draw:
    def draw(columns: int, depth: int) -> Quantized:
        count = -(-depth // group)
        scales, zero = _scales(columns, count), 0 if bits == 8 or has_offsets else 1 << (bits - 1)
        offsets = _scales(columns, count) * 8 if has_offsets else None
        return Quantized(
            codes=_codes(bits, columns, depth),
            bits=bits,
            group=group,
            block=group,
            scales=scales,
            offsets=offsets,
            zero=zero,
        )

    return draw


def _blocks(bits: int, group: int, has_offsets: bool) -> Draw:
    """As Q4_K, Q5_K and Q6_K: blocks of 256, whose groups have factors."""

    def draw(columns: int, depth: int) -> Quantized:
        blocks, groups = -(-depth // 256), -(-depth // group)
        low, high = (0, 64) if has_offsets else (-128, 128)
        factors, others = (torch.randint(low, high, (columns, groups), dtype=torch.int8) for _ in range(2))
        scales, offsets = _scales(columns, blocks), _scales(columns, blocks) if has_offsets else None
        zero, offset_factors = 0 if has_offsets else 1 << (bits - 1), others if has_offsets else None
        codes = _codes(bits, columns, depth)
        return Quantized(
            codes=codes,
            bits=bits,
            group=group,
            block=256,
            scales=scales,
            offsets=offsets,
            scale_factors=factors,
            offset_factors=offset_factors,
            zero=zero,
        )

    return draw


def _with_scales_of(dtype: torch.dtype, bits: int, group: int | None) -> Draw:
    """As compressed-tensors has them: weights are computed in the dtype of their scales."""

    def draw(columns: int, depth: int) -> Quantized:
        size = group or depth
        scales, zero = _scales(columns, -(-depth // size), dtype), 0 if bits == 8 else 8
        codes = _codes(bits, columns, depth)
        return Quantized(codes=codes, bits=bits, group=size, block=size, scales=scales, zero=zero, source=dtype)

    return draw


def _fp8(group: int | None) -> Draw:
    def draw(columns: int, depth: int) -> Quantized:
        size = group or depth
        codes = (torch.randn(columns, depth) * 2.0 ** torch.randint(-9, 6, (columns, depth))).to(torch.float8_e4m3fn)
        scales = _scales(columns, -(-depth // size), torch.bfloat16)
        return Quantized(codes=codes, bits=8, group=size, block=size, scales=scales, source=torch.bfloat16)

    return draw


def _asymmetric(columns: int, depth: int) -> Quantized:
    """As W4A16 with zero points: a scale times a code less its zero point."""
    count = -(-depth // 32)
    scales, points = _scales(columns, count, torch.bfloat16), torch.randint(0, 16, (columns, count), dtype=torch.int8)
    codes = _codes(4, columns, depth)
    return Quantized(
        codes=codes,
        bits=4,
        group=32,
        block=32,
        scales=scales,
        offsets=-scales,
        scale_factors=None,
        offset_factors=points,
        source=torch.bfloat16,
    )


def _looked_up(codebook: Codebook, dtype: torch.dtype) -> Draw:
    """As MXFP4, with scales that are powers of two, and as IQ4_NL."""

    def draw(columns: int, depth: int) -> Quantized:
        count, codes = -(-depth // 32), _codes(4, columns, depth)
        powers = 2.0 ** torch.randint(-14, 6, (columns, count))
        powers[::7] = 0
        scales = powers.to(dtype) if codebook is Codebook.E2M1 else _scales(columns, count, dtype)
        return Quantized(codes=codes, bits=4, group=32, block=32, scales=scales, codebook=codebook)

    return draw


def _iq4_xs(columns: int, depth: int) -> Quantized:
    """As IQ4_XS: blocks of 256, whose groups of 32 have factors of 6 bits."""
    factors = torch.randint(-32, 32, (columns, -(-depth // 32)), dtype=torch.int8)
    return Quantized(
        codes=_codes(4, columns, depth),
        bits=4,
        group=32,
        block=256,
        scales=_scales(columns, -(-depth // 256)),
        scale_factors=factors,
        codebook=Codebook.IQ4_NL,
    )


DRAWS: dict[str, Draw] = {
    "Q4_0": _groups(4, 32, has_offsets=False),
    "Q4_1": _groups(4, 32, has_offsets=True),
    "Q5_0": _groups(5, 32, has_offsets=False),
    "Q5_1": _groups(5, 32, has_offsets=True),
    "Q8_0": _groups(8, 32, has_offsets=False),
    "Q4_K": _blocks(4, 32, has_offsets=True),
    "Q5_K": _blocks(5, 32, has_offsets=True),
    "Q6_K": _blocks(6, 16, has_offsets=False),
    "MXFP4": _looked_up(Codebook.E2M1, torch.bfloat16),
    "IQ4_NL": _looked_up(Codebook.IQ4_NL, torch.float16),
    "IQ4_XS": _iq4_xs,
    "W8A16 of channels": _with_scales_of(torch.bfloat16, 8, None),
    "W4A16 of groups": _with_scales_of(torch.bfloat16, 4, 128),
    "W4A16 in float32": _with_scales_of(torch.float32, 4, 32),
    "W4A16 with zero points": _asymmetric,
    "FP8 of channels": _fp8(None),
    "FP8 of blocks": _fp8(128),
}
FILE_BITS = {
    "Q4_0": 4.5, "Q4_1": 5.0, "Q5_0": 5.5, "Q5_1": 6.0, "Q8_0": 8.5, "Q4_K": 4.5, "Q5_K": 5.5, "Q6_K": 6.5625,
    "MXFP4": 4.25, "IQ4_NL": 4.5, "IQ4_XS": 4.25,
    "W8A16 of channels": 8.0, "W4A16 of groups": 4.125, "W4A16 in float32": 5.0, "W4A16 with zero points": 4.625,
    "FP8 of channels": 8.0, "FP8 of blocks": 8.0,
}  # fmt: skip
"""Bits of a weight in the file of each format, scales included."""
