"""Tensors of a GGUF file as codes with the scales that the file has: nothing is widened, and nothing rounded."""

import numpy as np
import torch
from numpy.typing import NDArray

from engine.checkpoint.gguf.blocks import BlockType, Bytes, Floats, unpack
from kernels.quantized import Quantized

_ZEROS = {"Q4_0": 8, "Q5_0": 16, "Q6_K": 32}
"""The code of 0, of types with signed numbers."""


def quantized(kind: BlockType, stored: Bytes) -> Quantized:
    """Reads uint8 [rows, bytes of a row] of a type with codes."""
    found, zero = unpack(kind, stored), _ZEROS.get(kind.name, 0)
    bits = int(kind.name[1])
    codes = torch.from_numpy(found.codes)
    codes = codes if bits == 8 else (codes + zero).view(torch.uint8)
    if found.group == kind.numbers:  # one level of scales
        scales, offsets = (None if one is None else _half(one) for one in (found.scale, found.offset))
        assert scales is not None
        return Quantized(codes, bits, found.group, found.group, scales, offsets, zero=zero)
    halves = [_read_half(kind, stored, at) for at in kind.halves]
    factors = _factors(found.scale, halves[0])
    if found.offset is None:
        return Quantized(codes, bits, found.group, kind.numbers, _half(halves[0]), None, factors, zero=zero)
    scales, offsets, minima = _half(halves[0]), _half(-halves[1]), _factors(found.offset, -halves[1])
    return Quantized(codes, bits, found.group, kind.numbers, scales, offsets, factors, minima)


def _half(values: Floats) -> torch.Tensor:
    return torch.from_numpy(values.astype(np.float16))


def _read_half(kind: BlockType, stored: Bytes, at: int) -> Floats:
    """Reads the half-precision number at a byte of each block, [rows, blocks]."""
    blocks = stored.reshape(len(stored), -1, kind.bytes)
    return np.ascontiguousarray(blocks[:, :, at : at + 2]).view(np.float16)[..., 0].astype(np.float32)


def _factors(of_groups: Floats, of_blocks: Floats) -> torch.Tensor:
    """Finds the whole numbers by which groups multiply what their block has: exact products, so quotients are."""
    groups = of_groups.reshape(*of_blocks.shape, -1)
    with np.errstate(divide="ignore", invalid="ignore"):
        factors: NDArray[np.float32] = groups / of_blocks[..., None]
    return torch.from_numpy(np.nan_to_num(factors).reshape(of_groups.shape).astype(np.int8))
