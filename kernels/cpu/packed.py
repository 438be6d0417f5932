"""The packed format of weights: codes of 4, 5, 6 and 8 bits in panels, with their scales or table. Layout: packed.h."""

import ctypes
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kernels.quantized.matrix import SCALES, Quantized

MAX_GROUP = 128
LINE_BYTES = 64
PANEL = 32
_DTYPE_TO_CODE = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
_BITS_TO_CODES = {4: 0, 5: 1, 6: 2}
_INT8, _FP8, _LOOKED_UP = 3, 4, 5
_BITS_TO_GROUPS = {4: (16, 32, 64, 128), 5: (32, 64, 128), 6: (16, 32, 64, 128), 8: (16, 32, 64, 128)}


class Format(ctypes.Structure):
    """The fields of `Format` in packed.h."""

    _fields_ = [
        ("codes", ctypes.c_uint8), ("scale_dtype", ctypes.c_uint8),
        ("flags", ctypes.c_uint8), ("source_dtype", ctypes.c_uint8),
        ("group", ctypes.c_uint16), ("block", ctypes.c_uint16),
    ]  # fmt: skip


class Coded(ctypes.Structure):
    """The fields of `Coded` in packed.cpp."""

    _fields_ = [
        (name, ctypes.c_void_p) for name in ("codes", "scales", "offsets", "scale_factors", "offset_factors", "table")
    ]


SIGNATURES: dict[str, tuple[type | None, list[type]]] = {
    "baton_panel_bytes": (ctypes.c_int64, [ctypes.c_void_p, ctypes.c_int64]),
    "baton_pack_codes": (None, [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64, ctypes.c_void_p]),
}


def in_groups(matrix: Quantized) -> Quantized:
    """Repeats scales so that each covers one kernel group (checkpoint groups may be larger)."""
    if matrix.group < matrix.depth and (matrix.group <= MAX_GROUP or matrix.group % MAX_GROUP):
        return matrix
    at = torch.arange(0, matrix.depth, MAX_GROUP, device=matrix.codes.device) // matrix.group
    tables = {name: getattr(matrix, name) for name in ("scales", "offsets", "scale_factors", "offset_factors")}
    spread: dict[str, Any] = {name: None if one is None else one[:, at].contiguous() for name, one in tables.items()}
    return replace(matrix, group=MAX_GROUP, block=MAX_GROUP, **spread)


def is_packable(matrix: Quantized, dtype: torch.dtype) -> bool:
    """Tells whether the kernels can widen a matrix to a dtype bit by bit as `dequantize` does."""
    if matrix.group not in _BITS_TO_GROUPS[matrix.bits] or not _rounds_once(matrix, dtype):
        return False
    if matrix.scales.dtype is torch.float32 and (matrix.offsets is not None or matrix.bits == 6):
        return False  # the product of a code and a scale would be rounded before the sum
    if matrix.bits == 6 and (matrix.offsets is not None or not matrix.zero):
        return False  # the kernels add 64 to such codes, and take it away with the zero, where no bit is lost
    if matrix.codes.is_meta:
        return True
    largest = matrix.scales.float().abs()
    return bool(((largest == 0) | (largest >= SCALES[0]) & (largest <= SCALES[1])).all())


def _rounds_once(matrix: Quantized, dtype: torch.dtype) -> bool:
    return torch.float32 in (matrix.source, dtype) or matrix.source is dtype


def pack(library: ctypes.CDLL, parts: Sequence[Quantized]) -> Tensor:
    """Packs matrices of one depth, joined along the columns, into bytes. All must be packable, after `in_groups`."""
    formats = [_format_of(part) for part in parts]
    depth = parts[0].depth
    sizes = [library.baton_panel_bytes(ctypes.addressof(one), depth) for one in formats]
    counts = [-(-part.columns // PANEL) for part in parts]
    begin = -(-(16 + 24 * sum(counts)) // LINE_BYTES) * LINE_BYTES
    num_bytes = begin + sum(size * count for size, count in zip(sizes, counts, strict=True))
    data = torch.zeros(num_bytes, dtype=torch.uint8, device=parts[0].codes.device)
    if data.is_meta:
        return data
    panels, first_column = [], 0
    for part, form, size, count in zip(parts, formats, sizes, counts, strict=True):
        tables = [part.codes, part.scales, part.offsets, part.scale_factors, part.offset_factors]
        tables.append(None if part.codebook is None else torch.tensor(part.codebook.value, dtype=torch.int8))
        tables = [None if one is None else one.contiguous() for one in tables]
        coded = Coded(*[None if one is None else one.data_ptr() for one in tables])
        target = data.data_ptr() + begin
        library.baton_pack_codes(ctypes.addressof(form), ctypes.addressof(coded), part.columns, depth, target)
        [word] = np.frombuffer(bytes(form), np.int64)
        for index in range(count):
            num_columns = min(PANEL, part.columns - index * PANEL)
            panels += [begin, first_column + index * PANEL | num_columns << 32, int(word)]
            begin += size
        first_column += part.columns
    padded = max(-(-depth // part.group) * part.group for part in parts)
    table = np.array([sum(counts), padded, *panels], dtype=np.int64)
    data[: table.nbytes] = torch.from_numpy(table.view(np.uint8))
    return data


def _format_of(matrix: Quantized) -> Format:
    has = (matrix.offsets, matrix.scale_factors, matrix.offset_factors, matrix.zero or None)
    flags = sum(1 << bit for bit, one in enumerate(has) if one is not None)
    of_bytes = _FP8 if matrix.codes.dtype is torch.float8_e4m3fn else _INT8
    codes = _LOOKED_UP if matrix.codebook is not None else _BITS_TO_CODES.get(matrix.bits, of_bytes)
    dtypes = _DTYPE_TO_CODE[matrix.scales.dtype], flags, _DTYPE_TO_CODE[matrix.source]
    return Format(codes, *dtypes, matrix.group, matrix.block)
