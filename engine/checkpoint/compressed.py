"""Quantized checkpoints in .safetensors files: formats of compressed-tensors (W4A16, W8A16, FP8), and `fp8`.

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

from collections.abc import Container, Mapping
from dataclasses import dataclass
from math import ceil
from typing import Any

import torch
from torch import Tensor

from engine.checkpoint.json_fields import JsonFields
from engine.checkpoint.tensor_file import TensorFile
from kernels.quantized.matrix import Quantized
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
        """Reads the quantization of config.json, None if absent. Raises ModelError for an unsupported scheme."""
        name = next((one for one in FIELDS if one in config), None)
        if name is None:
            return None
        fields = config.section(name)
        match fields.text("quant_method", "compressed-tensors"):
            case "compressed-tensors":
                return cls._of_compressed_tensors(fields)
            case "fp8":
                return cls._of_fp8(fields)
            case "mxfp4":
                return cls()
        raise fields.wrong("quant_method", SUPPORTED)

    @classmethod
    def _of_fp8(cls, fields: JsonFields) -> "Scheme":
        _require(
            fields, "activation_scheme", "dynamic: static scales of activations are not supported", (None, "dynamic")
        )
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
                _require(activations, "dynamic", "true: static scales of activations are not supported", (True,))
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
    """The quantized matrices of .safetensors files; none without a scheme."""

    def __init__(self, tensor_to_file: Mapping[str, TensorFile], scheme: Scheme | None) -> None:
        self._files = tensor_to_file
        self._scheme = scheme

    def names(self, name: str) -> list[str]:
        """Lists the stored tensors of a matrix; empty if it is not quantized."""
        stem = name.removesuffix("weight")
        parts = [part for part in PARTS if f"{stem}{part}" in self._files]
        return [f"{stem}{part}" for part in parts] if self._scheme and parts not in ([], ["weight"]) else []

    def read(self, name: str, shape: tuple[int, ...], device: torch.device) -> Quantized:
        """Reads a matrix; on the device `meta` without content. Raises ModelError, which names the tensor."""
        stem = name.removesuffix("weight")
        parts = {one.removeprefix(stem): self._part(one, device) for one in self.names(name)}
        codes, bits = _codes(name, parts, shape[1])
        declared = [parts["weight_shape"].tolist()] if "weight_shape" in parts and device.type != "meta" else []
        if wrong := [one for one in (list(codes.shape), *declared) if one != list(shape)]:
            raise ModelError(f"tensor {name} has codes of {str(wrong[0])[:64]}, config.json makes it {list(shape)}")
        stored = next((parts[one] for one in SCALES if one in parts), None)
        if stored is None or stored.dtype not in _DTYPES:
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

    def _part(self, name: str, device: torch.device) -> Tensor:
        file = self._files[name]
        if device.type != "meta":
            return file.read(name)
        return torch.empty(file.entries[name].shape, dtype=file.entries[name].dtype, device=device)

    def _spread(self, name: str, scales: Tensor, shape: tuple[int, ...]) -> tuple[Tensor, int]:
        """Expands scales to [columns, groups]; returns them and the group size. Raises ModelError."""
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
    rows = packed.contiguous().view(torch.uint8)
    if bits == 8:
        return (rows ^ 128).view(torch.int8)[:, :count]
    return torch.stack((rows & 15, rows >> 4), -1).flatten(1)[:, :count]


def _zeros(given: Tensor, bits: int, columns: int) -> Tensor:
    """Reads zero points, int8 [columns, groups], in the range of the codes: from 0 for 4 bits, from -128 for 8."""
    if given.dtype is torch.int32 and given.dim() == 2:
        return _unpacked(given.T, bits, columns).T.to(torch.int8)
    return given.to(torch.int8) + (8 if bits == 4 else 0)


def _require(fields: JsonFields, name: str, expected: str, served: Container[Any]) -> None:
    if fields.raw(name) not in served:
        raise fields.wrong(name, expected)


def _block(fields: JsonFields, name: str) -> set[tuple[int, int]]:
    """Reads the size of a block [columns, depth], if config.json has one."""
    match fields.raw(name):
        case None:
            return set()
        case [int(columns), int(depth)] if columns > 0 and depth > 0:
            return {(columns, depth)}
    raise fields.wrong(name, "two numbers above 0")
