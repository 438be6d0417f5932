"""Quantized checkpoints in .safetensors files: weights of the package compressed-tensors, and of `fp8`.

Of a matrix X.weight [columns, depth] the files have codes and scales under names of their own:

| quant_method, format                      | codes                                                   |
|-------------------------------------------|---------------------------------------------------------|
| compressed-tensors, pack-quantized        | X.weight_packed, int32 [columns, words], low bits first |
| compressed-tensors, int-, naive-quantized | X.weight, int8                                          |
| the same, float-quantized                 | X.weight, float8_e4m3fn                                 |
| fp8                                       | X.weight, float8_e4m3fn                                 |

Scales are X.weight_scale or, of fp8, X.weight_scale_inv: one for all, [columns, 1], [columns, groups of the depth] or
[blocks, blocks]. X.weight_zero_point is int8 [columns, groups], or int32 packed down the columns. A weight is (code -
zero point) * scale, rounded once to the scale's dtype, as compressed-tensors decompresses it. Activations are not
rounded, so a checkpoint that has scales for them is refused.
"""

from collections.abc import Container, Mapping
from dataclasses import dataclass
from math import ceil
from typing import Any

import torch
from torch import Tensor

from engine.checkpoint.json_fields import JsonFields
from engine.checkpoint.tensor_file import TensorFile
from kernels.quantized import Quantized
from wire.errors import ModelError

FIELDS = ("quantization_config", "compression_config")
FORMATS = ("pack-quantized", "int-quantized", "float-quantized", "naive-quantized", "mixed-precision")
STRATEGIES = ("tensor", "channel", "group", "block")
SUPPORTED = "compressed-tensors (weights of 4 and 8 bits, FP8) or fp8"
SCALES = ("weight_scale", "weight_scale_inv")
PARTS = ("weight", "weight_packed", "weight_shape", "weight_zero_point", *SCALES)
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Scheme:
    """The sizes of groups, and of blocks [columns, depth], that a checkpoint declares."""

    groups: frozenset[int] = frozenset()
    blocks: frozenset[tuple[int, int]] = frozenset()

    @classmethod
    def parse(cls, config: JsonFields) -> "Scheme | None":
        """Reads config.json's quantization; None where there is none. Raises ModelError for any that is not served."""
        name = next((one for one in FIELDS if one in config), None)
        if name is None:
            return None
        fields = config.section(name)
        match fields.text("quant_method", "compressed-tensors"):
            case "compressed-tensors":
                return cls._of_compressed_tensors(fields)
            case "fp8":
                return cls._of_fp8(fields)
        raise fields.wrong("quant_method", SUPPORTED)

    @classmethod
    def _of_fp8(cls, fields: JsonFields) -> "Scheme":
        _require(fields, "activation_scheme", "dynamic: scales of activations are not supported", (None, "dynamic"))
        _require(fields, "fmt", "e4m3", (None, "e4m3"))
        return cls(blocks=frozenset(_block(fields, "weight_block_size")))

    @classmethod
    def _of_compressed_tensors(cls, fields: JsonFields) -> "Scheme":
        _require(fields, "format", " or ".join(FORMATS), FORMATS)
        _require(fields, "quantization_status", "compressed", (None, "compressed"))
        for name in ("kv_cache_scheme", "sparsity_config", "transform_config"):
            _require(fields, name, "none: it is not supported", (None, {}))
        schemes, groups = fields.section("config_groups"), set[int]()
        blocks = set[tuple[int, int]]()
        for name, _ in schemes.items():
            scheme = schemes.section(name)
            _require(scheme, "format", " or ".join(FORMATS), (None, *FORMATS))
            _require(scheme, "output_activations", "none: it is not supported", (None,))
            if "input_activations" in scheme:
                activations = scheme.section("input_activations")
                _require(activations, "dynamic", "true: scales of activations are not supported", (True,))
            weights = scheme.section("weights")
            _require(weights, "num_bits", "4 or 8", (4, 8))
            kinds = ("int", "float") if weights.count("num_bits") == 8 else ("int",)
            _require(weights, "type", "int, or float of 8 bits", kinds)
            _require(weights, "strategy", " or ".join(STRATEGIES), STRATEGIES)
            _require(weights, "actorder", "static, weight or none", (None, False, "static", "weight"))
            if weights.raw("strategy") == "group":
                groups.add(weights.count("group_size"))
            blocks |= _block(weights, "block_structure")
        return cls(frozenset(groups), frozenset(blocks))


class CompressedCodes:
    """The matrices of .safetensors files that have codes; none without a scheme."""

    def __init__(self, tensor_to_file: Mapping[str, TensorFile], scheme: Scheme | None) -> None:
        self._files = tensor_to_file
        self._scheme = scheme

    def names(self, name: str) -> list[str]:
        """Lists the tensors that a matrix is made of; none of one without codes."""
        stem = name.removesuffix("weight")
        parts = [part for part in PARTS if f"{stem}{part}" in self._files]
        return [f"{stem}{part}" for part in parts] if self._scheme and parts not in ([], ["weight"]) else []

    def read(self, name: str, shape: tuple[int, ...], device: torch.device) -> Quantized:
        """Reads a matrix, without content on the device `meta`. Raises ModelError, naming it, for a wrong one."""
        stem = name.removesuffix("weight")
        parts = {one.removeprefix(stem): self._part(one, device) for one in self.names(name)}
        codes, bits = _codes(name, parts, shape[1])
        is_other = "weight_shape" in parts and device.type != "meta" and tuple(parts["weight_shape"].tolist()) != shape
        if codes.shape != shape or is_other:
            raise ModelError(f"tensor {name} has codes of {list(codes.shape)}, config.json makes it {list(shape)}")
        given = next((parts[one] for one in SCALES if one in parts), None)
        if given is None or given.dtype not in _DTYPES:
            raise ModelError(f"tensor {name} has codes without scales of float32, bfloat16 or float16")
        scales, group = self._spread(name, given, shape)
        if "weight_zero_point" not in parts:
            return Quantized(codes, bits, group, group, scales, zero=8 if bits == 4 else 0, source=scales.dtype)
        zeros, _ = self._spread(name, _zeros(parts["weight_zero_point"], bits, len(codes)), shape)
        if codes.dtype.is_floating_point or zeros.shape != scales.shape:
            raise ModelError(f"tensor {name} has zero points that do not fit its codes and scales")
        return Quantized(codes, bits, group, group, scales, -scales, offset_factors=zeros, source=scales.dtype)

    def _part(self, name: str, device: torch.device) -> Tensor:
        file = self._files[name]
        if device.type != "meta":
            return file.read(name)
        return torch.empty(file.entries[name].shape, dtype=file.entries[name].dtype, device=device)

    def _spread(self, name: str, scales: Tensor, shape: tuple[int, ...]) -> tuple[Tensor, int]:
        """Returns scales [columns, groups], and the weights of a group. Raises ModelError for undeclared sizes."""
        assert self._scheme is not None
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
        raise ModelError(f"tensor {name} has scales of {list(scales.shape)}, not of groups that config.json declares")


def _codes(name: str, parts: Mapping[str, Tensor], depth: int) -> tuple[Tensor, int]:
    """Returns codes as `Quantized` has them, and their bits."""
    if "weight_packed" in parts:
        packed = parts["weight_packed"]
        for bits in (4, 8):
            if packed.dtype is torch.int32 and packed.dim() == 2 and packed.shape[1] == ceil(depth * bits / 32):
                return _unpacked(packed, bits, depth), bits
    elif "weight" in parts and parts["weight"].dtype in (torch.int8, torch.float8_e4m3fn):
        return parts["weight"], 8
    raise ModelError(f"tensor {name} has codes that are neither of 4 or 8 bits in int32, int8 nor float8_e4m3fn")


def _unpacked(packed: Tensor, bits: int, count: int) -> Tensor:
    """Reads the first codes of each row: of 4 bits as uint8, of 8 bits as int8."""
    rows = packed.contiguous().view(torch.uint8)
    if bits == 8:
        return (rows ^ 128).view(torch.int8)[:, :count]
    return torch.stack((rows & 15, rows >> 4), -1).flatten(1)[:, :count]


def _zeros(given: Tensor, bits: int, columns: int) -> Tensor:
    """Reads zero points, int8 [columns, groups], as far from zero as codes of `Quantized` are."""
    if given.dtype is torch.int32 and given.dim() == 2:
        return _unpacked(given.T, bits, columns).T.to(torch.int8)
    return given.to(torch.int8) + (8 if bits == 4 else 0)


def _require(fields: JsonFields, name: str, expected: str, served: Container[Any]) -> None:
    if fields.raw(name) not in served:
        raise fields.wrong(name, expected)


def _block(fields: JsonFields, name: str) -> set[tuple[int, int]]:
    """Reads the size of blocks [columns, depth], if there is one."""
    match fields.raw(name):
        case None:
            return set()
        case [int(columns), int(depth)] if columns > 0 and depth > 0:
            return {(columns, depth)}
    raise fields.wrong(name, "two numbers above 0")
