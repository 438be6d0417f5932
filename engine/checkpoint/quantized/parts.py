"""The tensors that a quantized matrix is made of, and integers in words of 32 bits."""

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

SCALE_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Expected:
    """The shape of a tensor, and the dtypes that it may have."""

    shape: tuple[int, ...]
    dtypes: tuple[torch.dtype, ...] = (torch.int32,)


def require(fields: JsonFields, name: str, expected: str, served: Container[Any]) -> None:
    """Raises ModelError, which names the expected value, for a field whose value is not served."""
    if fields.raw(name) not in served:
        raise fields.wrong(name, expected)


def group_size(fields: JsonFields) -> int | None:
    """Reads the weights of a column that share a scale; None for all of them, -1 in the file."""
    return None if fields.raw("group_size") == -1 else fields.count("group_size")


def read_part(files: Mapping[str, TensorFile], name: str, device: torch.device) -> Tensor:
    """Reads a stored tensor; on the device `meta` without content."""
    if device.type != "meta":
        return files[name].read(name)
    entry = files[name].entries[name]
    return torch.empty(entry.shape, dtype=entry.dtype, device=device)


def read_parts(
    files: Mapping[str, TensorFile], stem: str, expected: Mapping[str, Expected], device: torch.device
) -> dict[str, Tensor]:
    """Reads the tensors `stem` + part. Raises ModelError, naming the tensor, for one that is missing or unexpected."""
    for part, one in expected.items():
        name = f"{stem}{part}"
        if name not in files:
            raise ModelError(f"the weights lack the tensor {name}")
        entry = files[name].entries[name]
        if entry.shape != one.shape or entry.dtype not in one.dtypes:
            found, dtypes = f"{entry.dtype} {list(entry.shape)}", " or ".join(map(str, one.dtypes))
            raise ModelError(f"tensor {name} is {found}, expected {dtypes} {list(one.shape)}".replace("torch.", ""))
    return {part: read_part(files, f"{stem}{part}", device) for part in expected}


def split_words(words: Tensor, bits: int) -> Tensor:
    """Splits int32 [..., words] into codes uint8 [..., codes], the low bits of a word first."""
    parts = words.contiguous().view(torch.uint8)
    return parts if bits == 8 else torch.stack((parts & 15, parts >> 4), -1).flatten(-2)


def with_zero_points(codes: Tensor, zeros: Tensor, scales: Tensor, bits: int, group: int) -> Quantized:
    """Makes a matrix of weights (code - zero point) * scale, rounded once to the scales' dtype.

    codes: uint8 [columns, depth]. zeros: zero points in the range of codes, [columns, groups], as `scales`.
    """
    if bits == 8:
        codes, zeros = (codes ^ 128).view(torch.int8), zeros - 128
    return Quantized(
        codes=codes.contiguous(),
        bits=bits,
        group=group,
        block=group,
        scales=scales.contiguous(),
        offsets=-scales.contiguous(),
        offset_factors=zeros.to(torch.int8).contiguous(),
        source=scales.dtype,
    )


def outline_with_zero_points(shape: tuple[int, int], scales: torch.dtype, bits: int, group: int) -> Quantized:
    """Makes a matrix of `with_zero_points` without content, on the device `meta`, with scales of a dtype."""
    columns, depth = shape
    codes, zeros = torch.zeros(1, depth, dtype=torch.uint8), torch.zeros(1, ceil(depth / group), dtype=torch.int16)
    return with_zero_points(codes, zeros, zeros.to(scales), bits, group).outline(columns)
