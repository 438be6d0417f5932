"""The formats of compressed-tensors (W4A16, W8A16, FP8), and of the method `fp8`.

A matrix X.weight [columns, depth] is stored as codes and scales, in tensors of these names:

| quant_method, format                      | codes                                                   |
|-------------------------------------------|---------------------------------------------------------|
| compressed-tensors, pack-quantized        | X.weight_packed, int32 [columns, words], low bits first |
| compressed-tensors, int-, naive-quantized | X.weight, int8                                          |
| compressed-tensors, float-quantized       | X.weight, float8_e4m3fn                                 |
| fp8                                       | X.weight, float8_e4m3fn                                 |

Scales are X.weight_scale or, of fp8, X.weight_scale_inv. Their shape: one number, [columns, 1], [columns, groups of the
depth] or [blocks of columns, blocks of the depth]. X.weight_zero_point is int8 [columns, groups], or int32 packed along
the columns. A weight is (code - zero point) * scale, rounded once to the scale's dtype, as compressed-tensors
decompresses it. Activations are not quantized; a checkpoint with static scales of activations is refused.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil

import torch
from torch import Tensor

from engine.checkpoint.json_fields import JsonFields
from engine.checkpoint.quantized.parts import SCALE_DTYPES, read_part, require, split_words
from engine.checkpoint.tensor_file import TensorFile
from kernels.quantized.matrix import Quantized
from wire.errors import ModelError

FORMATS = ("pack-quantized", "int-quantized", "float-quantized", "naive-quantized", "mixed-precision")
STRATEGIES = ("tensor", "channel", "group", "block")
SCALES = ("weight_scale", "weight_scale_inv")
PARTS = ("weight", "weight_packed", "weight_shape", "weight_zero_point", *SCALES)


@dataclass(frozen=True)
class CompressedScheme:
    """The sizes of groups, and of blocks [columns, depth], that a checkpoint declares."""

    groups: frozenset[int] = frozenset()
    blocks: frozenset[tuple[int, int]] = frozenset()

    @classmethod
    def parse_fp8(cls, fields: JsonFields) -> "CompressedScheme":
        """Reads the quantization of the method fp8. Raises ModelError for an unsupported one."""
        require(
            fields, "activation_scheme", "dynamic: static scales of activations are not supported", (None, "dynamic")
        )
        require(fields, "fmt", "e4m3", (None, "e4m3"))
        return cls(blocks=frozenset(_block(fields, "weight_block_size")))

    @classmethod
    def parse(cls, fields: JsonFields) -> "CompressedScheme":
        """Reads the quantization of the method compressed-tensors. Raises ModelError for an unsupported one."""
        require(fields, "format", " or ".join(FORMATS), FORMATS)
        require(fields, "quantization_status", "compressed", (None, "compressed"))
        for name in ("kv_cache_scheme", "sparsity_config", "transform_config"):
            require(fields, name, "none: it is not supported", (None, {}))
        schemes, groups = fields.section("config_groups"), set[int]()
        blocks = set[tuple[int, int]]()
        for name, _ in schemes.items():
            scheme = schemes.section(name)
            require(scheme, "format", " or ".join(FORMATS), (None, *FORMATS))
            require(scheme, "output_activations", "none: it is not supported", (None,))
            if "input_activations" in scheme:
                activations = scheme.section("input_activations")
                require(activations, "dynamic", "true: static scales of activations are not supported", (True,))
            weights = scheme.section("weights")
            require(weights, "num_bits", "4 or 8", (4, 8))
            kinds = ("int", "float") if weights.count("num_bits") == 8 else ("int",)
            require(weights, "type", "int, or float of 8 bits", kinds)
            require(weights, "strategy", " or ".join(STRATEGIES), STRATEGIES)
            require(weights, "actorder", "static, weight or none", (None, False, "static", "weight"))
            if weights.raw("strategy") == "group":
                groups.add(weights.count("group_size"))
            blocks |= _block(weights, "block_structure")
        return cls(frozenset(groups), frozenset(blocks))

    def open(self, tensor_to_file: Mapping[str, TensorFile]) -> "CompressedCodes":
        """Implements `Scheme.open`."""
        return CompressedCodes(tensor_to_file, self)


class CompressedCodes:
    """The matrices of such a checkpoint."""

    def __init__(self, tensor_to_file: Mapping[str, TensorFile], scheme: CompressedScheme) -> None:
        self._files = tensor_to_file
        self._scheme = scheme

    def names(self, name: str) -> list[str]:
        """Lists the stored tensors of a matrix; empty if it is not quantized."""
        stem = name.removesuffix("weight")
        parts = [part for part in PARTS if f"{stem}{part}" in self._files]
        return [f"{stem}{part}" for part in parts] if parts not in ([], ["weight"]) else []

    def read(self, name: str, shape: tuple[int, ...], device: torch.device) -> Quantized:
        """Reads a matrix; on the device `meta` without content. Raises ModelError, which names the tensor."""
        stem = name.removesuffix("weight")
        parts = {one.removeprefix(stem): read_part(self._files, one, device) for one in self.names(name)}
        codes, bits = _codes(name, parts, shape[1])
        declared = [parts["weight_shape"].tolist()] if "weight_shape" in parts and device.type != "meta" else []
        if wrong := [one for one in (list(codes.shape), *declared) if one != list(shape)]:
            raise ModelError(f"tensor {name} has codes of {str(wrong[0])[:64]}, config.json makes it {list(shape)}")
        stored = next((parts[one] for one in SCALES if one in parts), None)
        if stored is None or stored.dtype not in SCALE_DTYPES:
            raise ModelError(f"tensor {name} has codes without scales of float32, bfloat16 or float16")
        scales, group = self._spread(name, stored, shape)
        if "weight_zero_point" not in parts:
            return Quantized(
                codes=codes,
                bits=bits,
                group=group,
                block=group,
                scales=scales,
                zero=8 if bits == 4 else 0,
                source=scales.dtype,
            )
        zeros, _ = self._spread(name, _zeros(parts["weight_zero_point"], bits, len(codes)), shape)
        if codes.dtype.is_floating_point or zeros.shape != scales.shape:
            raise ModelError(f"tensor {name} has zero points that do not fit its codes and scales")
        return Quantized(
            codes=codes,
            bits=bits,
            group=group,
            block=group,
            scales=scales,
            offsets=-scales,
            offset_factors=zeros,
            source=scales.dtype,
        )

    def _spread(self, name: str, scales: Tensor, shape: tuple[int, ...]) -> tuple[Tensor, int]:
        """Expands scales to [columns, groups]; returns them and the group size. Raises ModelError."""
        columns, depth = shape
        if scales.numel() == 1:
            return scales.reshape(1, 1).expand(columns, 1), depth
        if scales.shape in ((columns,), (columns, 1)):
            return scales.reshape(columns, 1), depth
        for rows, group in self._scheme.blocks:
            if scales.shape == (ceil(columns / rows), ceil(depth / group)):
                return scales.repeat_interleave(rows, 0)[:columns], group
        for group in self._scheme.groups:
            if scales.shape == (columns, depth / group):
                return scales, group
        raise ModelError(
            f"tensor {name} has scales of {list(scales.shape)}, which fit no group that config.json declares"
        )


def _codes(name: str, parts: Mapping[str, Tensor], depth: int) -> tuple[Tensor, int]:
    """Returns codes in the layout of `Quantized`, and their bits."""
    if "weight_packed" in parts:
        packed = parts["weight_packed"]
        for bits in (4, 8):
            if packed.dtype is torch.int32 and packed.dim() == 2 and packed.shape[1] == ceil(depth * bits / 32):
                return _unpacked(packed, bits, depth), bits
    elif "weight" in parts and parts["weight"].dtype in (torch.int8, torch.float8_e4m3fn):
        return parts["weight"], 8
    raise ModelError(
        f"tensor {name} has codes that are neither 4 or 8 bits packed in int32, nor int8, nor float8_e4m3fn"
    )


def _unpacked(packed: Tensor, bits: int, count: int) -> Tensor:
    """Unpacks the first `count` codes of each row: 4 bits to uint8, 8 bits to int8."""
    codes = split_words(packed, bits)[:, :count]
    return (codes ^ 128).view(torch.int8) if bits == 8 else codes


def _zeros(given: Tensor, bits: int, columns: int) -> Tensor:
    """Reads zero points, int8 [columns, groups], in the range of the codes: from 0 for 4 bits, from -128 for 8."""
    if given.dtype is torch.int32 and given.dim() == 2:
        return _unpacked(given.T, bits, columns).T.to(torch.int8)
    return given.to(torch.int8) + (8 if bits == 4 else 0)


def _block(fields: JsonFields, name: str) -> set[tuple[int, int]]:
    """Reads the size of a block [columns, depth], if config.json has one."""
    match fields.raw(name):
        case None:
            return set()
        case [int(columns), int(depth)] if columns > 0 and depth > 0:
            return {(columns, depth)}
    raise fields.wrong(name, "two numbers above 0")
