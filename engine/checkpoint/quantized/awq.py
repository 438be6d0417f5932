"""AWQ's matrices, as its GEMM kernels store them: 4 bits with zero points in groups of the depth.

X.weight [columns, depth] is X.qweight int32 [depth, columns / 8], X.qzeros int32 [groups, columns / 8] and X.scales
[groups, columns]. The nibbles of a word, from the lowest up, are of columns 0, 2, 4, 6, 1, 3, 5 and 7 of its eight. A
weight is (code - zero point) * scale, rounded to the scale's dtype. Source: the package autoawq.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil

import torch
from torch import Tensor

from engine.checkpoint.json_fields import JsonFields
from engine.checkpoint.quantized.parts import (
    SCALE_DTYPES,
    Expected,
    group_size,
    outline_with_zero_points,
    read_parts,
    require,
    split_words,
    with_zero_points,
)
from engine.checkpoint.tensor_file import TensorFile
from kernels.quantized.matrix import Quantized
from wire.errors import ModelError

PARTS = ("qweight", "qzeros", "scales")
COLUMNS_OF_WORD = 8
_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)
"""The nibble of each of a word's columns."""


@dataclass(frozen=True)
class AwqScheme:
    """The weights of a column that share a scale, None for all."""

    group: int | None

    @classmethod
    def parse(cls, fields: JsonFields) -> "AwqScheme":
        """Raises ModelError for another layout than that of GEMM, and for other widths than 4 bits."""
        require(fields, "bits", "4", (4,))
        require(fields, "version", "gemm: no other layout of AWQ is supported", (None, "gemm", "GEMM"))
        require(fields, "zero_point", "true", (None, True))
        return cls(group_size(fields))

    def open(self, tensor_to_file: Mapping[str, TensorFile]) -> "AwqCodes":
        """Implements `Scheme.open`."""
        return AwqCodes(tensor_to_file, self.group)


class AwqCodes:
    """The matrices of a checkpoint of AWQ."""

    def __init__(self, tensor_to_file: Mapping[str, TensorFile], group: int | None) -> None:
        self._files = tensor_to_file
        self._group = group

    def names(self, name: str) -> list[str]:
        """Implements `CodeReader.names`."""
        stem = name.removesuffix("weight")
        return [f"{stem}{part}" for part in PARTS if f"{stem}{part}" in self._files]

    def read(self, name: str, shape: tuple[int, ...], device: torch.device) -> Quantized:
        """Implements `CodeReader.read`."""
        columns, depth = shape
        if columns % COLUMNS_OF_WORD:
            raise ModelError(f"tensor {name} has {columns} columns, of AWQ expected a multiple of {COLUMNS_OF_WORD}")
        group, words = self._group or depth, columns // COLUMNS_OF_WORD
        num_groups = ceil(depth / group)
        expected = {
            "qweight": Expected((depth, words)),
            "qzeros": Expected((num_groups, words)),
            "scales": Expected((num_groups, columns), SCALE_DTYPES),
        }
        parts = read_parts(self._files, name.removesuffix("weight"), expected, device)
        if device.type == "meta":
            return outline_with_zero_points((columns, depth), parts["scales"].dtype, 4, group)
        codes, zeros = _split(parts["qweight"]), _split(parts["qzeros"])
        return with_zero_points(codes.T, zeros.T, parts["scales"].T, 4, group)


def _split(words: Tensor) -> Tensor:
    """Splits int32 [rows, words] into codes uint8 [rows, columns]."""
    nibbles = split_words(words, 4)
    return nibbles.view(len(words), -1, COLUMNS_OF_WORD)[:, :, list(_PLACES)].flatten(1)
