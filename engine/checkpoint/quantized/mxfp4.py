"""MXFP4's matrices: 4 bits looked up in E2M1's table, in groups of 32 whose scales are powers of two.

X [..., depth] is X_blocks uint8 [..., groups, 16], the even place of each pair in the low nibble, and X_scales uint8
[..., groups], exponents plus 127. Sources: the Microscaling Formats specification of OCP; transformers.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from engine.checkpoint.quantized.parts import Expected, read_parts
from engine.checkpoint.tensor_file import TensorFile
from kernels.quantized.codebook import Codebook
from kernels.quantized.matrix import Quantized
from wire.errors import ModelError

GROUP = 32
PARTS = ("_blocks", "_scales")
BIAS = 128
"""The bias of exponents, and one more for the numbers of `Codebook.E2M1`, which are doubled."""
NAN = 255


@dataclass(frozen=True)
class Mxfp4Scheme:
    """MXFP4 has no choices; the names of tensors say which matrices are quantized."""

    def open(self, tensor_to_file: Mapping[str, TensorFile]) -> "Mxfp4Codes":
        """Implements `Scheme.open`."""
        return Mxfp4Codes(tensor_to_file)


class Mxfp4Codes:
    """The matrices of a checkpoint in MXFP4, as gpt-oss has them for its experts."""

    def __init__(self, tensor_to_file: Mapping[str, TensorFile]) -> None:
        self._files = tensor_to_file

    def names(self, name: str) -> list[str]:
        """Implements `CodeReader.names`."""
        return [f"{name}{part}" for part in PARTS if f"{name}{part}" in self._files]

    def read(self, name: str, shape: tuple[int, ...], device: torch.device) -> Quantized:
        """Implements `CodeReader.read`."""
        *outer, depth = shape
        if depth % GROUP:
            raise ModelError(f"tensor {name} has a depth of {depth}, of MXFP4 expected a multiple of {GROUP}")
        bytes_only = (torch.uint8,)
        expected = {
            "_blocks": Expected((*outer, depth // GROUP, GROUP // 2), bytes_only),
            "_scales": Expected((*outer, depth // GROUP), bytes_only),
        }
        parts = read_parts(self._files, name, expected, device)
        if device.type != "meta":
            return from_blocks(parts["_blocks"], parts["_scales"])
        exponents = torch.zeros(1, depth // GROUP, dtype=torch.uint8)
        return from_blocks(exponents[..., None].expand(-1, -1, GROUP // 2), exponents).outline(prod(outer))


def from_blocks(blocks: Tensor, exponents: Tensor) -> Quantized:
    """Makes a matrix of uint8 [..., groups, 16] and uint8 [..., groups]; all leading dimensions are its columns.

    A group of zeros has the scale 0, whatever its exponent; the exponent 255 is NaN.
    """
    columns = prod(exponents.shape[:-1])
    blocks, exponents = blocks.reshape(columns, -1, GROUP // 2), exponents.reshape(columns, -1)
    powers = torch.exp2(torch.arange(NAN + 1, dtype=torch.float64) - BIAS).bfloat16()
    powers[NAN] = torch.nan
    has_weights = (blocks & 0x77).any(-1)
    return Quantized(
        codes=torch.stack((blocks & 15, blocks >> 4), -1).flatten(1),
        bits=4,
        group=GROUP,
        block=GROUP,
        scales=powers.to(exponents.device)[exponents.int()] * has_weights,
        codebook=Codebook.E2M1,
    )
