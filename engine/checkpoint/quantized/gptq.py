"""GPTQ's matrices: 4 or 8 bits with zero points, in groups of the depth or in groups by order of activation.

X.weight [columns, depth] is X.qweight int32 [words of the depth, columns], X.qzeros int32 [groups, words of the
columns], X.scales [groups, columns] and X.g_idx int32 [depth], the group of each place; low bits first. A weight is
(code - zero point) * scale, rounded to the scale's dtype. The format `gptq` stores zero points less 1, `gptq_v2` as
they are. Source: the package gptqmodel.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil

import torch

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

PARTS = ("qweight", "qzeros", "scales", "g_idx")
FORMATS = ("gptq", "gptq_v2")


@dataclass(frozen=True)
class GptqScheme:
    """The layout of codes and groups that a checkpoint declares.

    bits: the width of a code. group: weights of a column that share a scale, None for all. addend: what zero points are
    stored without. is_ordered: whether groups are by order of activation, as `desc_act` says.
    """

    bits: int
    group: int | None
    addend: int
    is_ordered: bool

    @classmethod
    def parse(cls, fields: JsonFields) -> "GptqScheme":
        """Raises ModelError for another layout or width, and for schemes of single matrices."""
        require(fields, "bits", "4 or 8", (4, 8))
        for name in ("checkpoint_format", "format"):
            require(fields, name, " or ".join(FORMATS), (None, *FORMATS))
        require(fields, "is_marlin_format", "false: it is not supported", (None, False))
        require(fields, "pack_dtype", "int32", (None, "int32"))
        require(fields, "dynamic", "none: one scheme for all matrices", (None, {}))
        stored = fields.text("checkpoint_format", fields.text("format", FORMATS[0]))
        addend = 1 if stored == FORMATS[0] else 0
        return cls(fields.count("bits"), group_size(fields), addend, fields.flag("desc_act", False))

    def open(self, tensor_to_file: Mapping[str, TensorFile]) -> "GptqCodes":
        """Implements `Scheme.open`."""
        return GptqCodes(tensor_to_file, self)


class GptqCodes:
    """The matrices of a checkpoint of GPTQ."""

    def __init__(self, tensor_to_file: Mapping[str, TensorFile], scheme: GptqScheme) -> None:
        self._files = tensor_to_file
        self._scheme = scheme

    def names(self, name: str) -> list[str]:
        """Implements `CodeReader.names`."""
        stem = name.removesuffix("weight")
        parts = [part for part in PARTS if f"{stem}{part}" in self._files]
        return [] if parts == ["g_idx"] else [f"{stem}{part}" for part in parts]

    def read(self, name: str, shape: tuple[int, ...], device: torch.device) -> Quantized:
        """Implements `CodeReader.read`. Groups by order of activation become groups of one, which kernels widen."""
        (columns, depth), bits, stem = shape, self._scheme.bits, name.removesuffix("weight")
        in_word, group = 32 // bits, self._scheme.group or depth
        if columns % in_word or depth % in_word:
            raise ModelError(f"tensor {name} is {list(shape)}, of GPTQ expected multiples of {in_word}")
        num_groups = ceil(depth / group)
        expected = {
            "qweight": Expected((depth // in_word, columns)),
            "qzeros": Expected((num_groups, columns // in_word)),
            "scales": Expected((num_groups, columns), SCALE_DTYPES),
        }
        if f"{stem}g_idx" in self._files:
            expected["g_idx"] = Expected((depth,))
        parts = read_parts(self._files, stem, expected, device)
        if device.type == "meta":
            is_ordered = self._scheme.is_ordered and num_groups > 1
            return outline_with_zero_points((columns, depth), parts["scales"].dtype, bits, 1 if is_ordered else group)
        codes, scales = split_words(parts["qweight"].T, bits), parts["scales"].T
        zeros = split_words(parts["qzeros"], bits).T.to(torch.int16) + self._scheme.addend
        if bool((zeros >> bits).any()):
            raise ModelError(f"tensor {stem}qzeros has a zero point of {1 << bits}, above the codes of {bits} bits")
        groups = parts.get("g_idx", torch.arange(depth) // group).long()
        if bool(((groups < 0) | (groups >= num_groups)).any()):
            raise ModelError(f"tensor {stem}g_idx has a group out of range: there are {num_groups}")
        if torch.equal(groups, torch.arange(depth) // group):
            return with_zero_points(codes, zeros, scales, bits, group)
        return with_zero_points(codes, zeros[:, groups], scales[:, groups], bits, 1)
