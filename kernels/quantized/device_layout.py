"""The layout of packed weights on a GPU: tables of codes and scales, for wide aligned loads.

The depth is cut in chunks, and a chunk in planes of 32 places. Each place has a 16-bit word with its codes in several
planes, from the lowest bits up: 4 codes of 4 bits or 2 of 8 bits. Kernels read the words of two places as one, for a
matrix instruction wants both in one register. Codes of 5 and 6 bits have their lower four bits there, and a byte at
each place has the rest, for all planes of a chunk. Tables go along the depth first, then along the
columns, so that a tile of columns is contiguous. A scale with its offset is a word of 32 bits for each column; so are
the factors of scales and offsets, for two planes.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from kernels.backend import Weight
from kernels.quantized.codebook import Codebook
from kernels.quantized.matrix import SCALES, Quantized

PLANE = 32
BITS_TO_PLANES = {4: 4, 5: 8, 6: 4, 8: 2}
HALVED_GROUP = PLANE // 2
ALIGNMENT = 16
HALVES = (torch.float16, torch.bfloat16)


@dataclass(frozen=True, kw_only=True)
class CodeFormat:
    """The format of a matrix; the kernels are compiled for each format.

    block: places that share a word of scales. is_halved: a plane's factors multiply its scale, one for each half; else
    the first its scale, the second its offset.
    """

    bits: int
    block: int
    zero: int
    is_fp8: bool
    has_offsets: bool
    has_factors: bool
    is_halved: bool
    scale_dtype: torch.dtype
    source: torch.dtype
    codebook: Codebook | None

    @property
    def planes(self) -> int:
        return BITS_TO_PLANES[self.bits]

    @property
    def chunk(self) -> int:
        """Places of a chunk."""
        return self.planes * PLANE


@dataclass(frozen=True)
class CodeTables:
    """The tables of a matrix, views of one contiguous tensor.

    codes: int32 [chunks, words of two places, columns, 16]. rest: int16 [chunks, columns, 16], for 5 and 6 bits.
    scales: int32 [blocks, columns], each a float32, or a 16-bit scale below its offset. factors: int32 [pairs of
    planes, columns], each four of 8 bits.
    """

    codes: Tensor
    rest: Tensor | None
    scales: Tensor
    factors: Tensor | None


@dataclass(frozen=True)
class Part:
    """Columns of a weight that have one format."""

    format: CodeFormat
    tables: CodeTables
    columns: int

    @property
    def num_chunks(self) -> int:
        return self.tables.codes.shape[0]


@dataclass(frozen=True)
class CodedWeight(Weight):
    """A weight that stays packed. data: uint8 [bytes], the tables of its parts in order, each padded to 16 bytes."""

    parts: tuple[Part, ...]


def is_packable(matrix: Quantized) -> bool:
    """Returns whether the kernels reproduce `Quantized.dequantize` bit for bit."""
    group, scales, offsets = matrix.group, matrix.scales, matrix.offsets
    if matrix.bits == 8 and matrix.codes.dtype is torch.uint8:
        return False  # codes of 8 bits have a sign
    if not scales.is_meta and scales.dtype is not torch.float16 and bool((scales.abs() > SCALES[1]).any()):
        return False  # the kernels multiply scales by powers of 2
    has_factors = (matrix.scale_factors, matrix.offset_factors) != (None, None)
    is_whole = group % PLANE == 0 or group >= matrix.depth
    if has_factors and group == HALVED_GROUP:
        is_whole = offsets is None and (matrix.block % PLANE == 0 or matrix.block >= matrix.depth)
    if offsets is None:
        return is_whole and scales.dtype in (*HALVES, torch.float32)
    # Beside long scales a product is rounded before its sum.
    return is_whole and scales.dtype in HALVES and offsets.dtype is scales.dtype


def pack(matrices: Sequence[Quantized], dtype: torch.dtype) -> CodedWeight:
    """Packs matrices of one depth, joined along the columns. All must be packable."""
    joined = [_joined(list(alike)) for _, alike in groupby(matrices, _kind_of)]
    formats = [_format_of(one) for one in joined]
    tables = [_tables_of(one, form) for one, form in zip(joined, formats, strict=True)]
    data = torch.cat([_bytes_of(one) for part in tables for one in _present(part)])
    pieces = iter(data.split([len(_bytes_of(one)) for part in tables for one in _present(part)]))
    parts = [
        Part(form, _placed(own, pieces), one.columns) for form, own, one in zip(formats, tables, joined, strict=True)
    ]
    return CodedWeight(data, sum(one.columns for one in matrices), matrices[0].depth, dtype, tuple(parts))


def _kind_of(matrix: Quantized) -> tuple[Any, ...]:
    tables = (matrix.codes, matrix.scales, matrix.offsets, matrix.scale_factors, matrix.offset_factors)
    dtypes = [None if one is None else one.dtype for one in tables]
    return (matrix.bits, matrix.group, matrix.block, matrix.zero, matrix.codebook, matrix.source, *dtypes)


def _joined(alike: list[Quantized]) -> Quantized:
    def cat(name: str) -> Tensor | None:
        tables = [getattr(one, name) for one in alike]
        return None if tables[0] is None else torch.cat(tables)

    names = ("codes", "scales", "offsets", "scale_factors", "offset_factors")
    changes: dict[str, Any] = {name: cat(name) for name in names}
    return replace(alike[0], **changes)


def _format_of(matrix: Quantized) -> CodeFormat:
    has_factors = (matrix.scale_factors, matrix.offset_factors) != (None, None)
    chunk = BITS_TO_PLANES[matrix.bits] * PLANE
    return CodeFormat(
        bits=matrix.bits,
        block=matrix.block if matrix.block < matrix.depth else -(-matrix.depth // chunk) * chunk,
        zero=matrix.zero,
        is_fp8=matrix.codes.dtype is torch.float8_e4m3fn,
        has_offsets=matrix.offsets is not None,
        has_factors=has_factors,
        is_halved=has_factors and matrix.group == HALVED_GROUP,
        scale_dtype=matrix.scales.dtype,
        source=matrix.source,
        codebook=matrix.codebook,
    )


def _tables_of(matrix: Quantized, form: CodeFormat) -> CodeTables:
    num_chunks = -(-matrix.depth // form.chunk)
    codes = _padded(matrix.codes.view(torch.uint8), num_chunks * form.chunk)
    planes = list(codes.view(-1, num_chunks, form.planes, PLANE).permute(2, 1, 0, 3))
    low_bits = 8 if form.bits == 8 else 4
    per_word = 16 // low_bits
    mask = (1 << low_bits) - 1
    words = [
        _shifted([one & mask for one in planes[first : first + per_word]], low_bits, torch.int16)
        for first in range(0, form.planes, per_word)
    ]
    rest = (
        None
        if form.bits in (4, 8)
        else _shifted([one >> 4 for one in planes], form.bits - 4, torch.uint8).view(torch.int16)
    )
    scales = _padded(_scale_words(matrix), -(-num_chunks * form.chunk // form.block))
    factors = _factor_words(matrix, num_chunks * form.chunk) if form.has_factors else None
    return CodeTables(torch.stack(words, 1).view(torch.int32), rest, scales.T.contiguous(), factors)


def _shifted(planes: list[Tensor], bits: int, dtype: torch.dtype) -> Tensor:
    """Joins the codes of planes in words, from the lowest bits up."""
    words = planes[0].to(dtype)
    for place, one in enumerate(planes[1:], 1):
        words = words | (one.to(dtype) << (bits * place))
    return words


def _scale_words(matrix: Quantized) -> Tensor:
    """Makes words int32 [columns, blocks]."""
    scales, offsets = matrix.scales.contiguous(), matrix.offsets
    if scales.dtype is torch.float32:
        return scales.view(torch.int32)
    high = torch.zeros_like(scales) if offsets is None else offsets
    return torch.stack((scales, high), -1).view(torch.int32)[..., 0]


def _factor_words(matrix: Quantized, padded_depth: int) -> Tensor:
    """Makes words int32 [pairs of planes, columns]."""
    given = matrix.scale_factors, matrix.offset_factors
    groups = next(one for one in given if one is not None)
    if matrix.group == HALVED_GROUP:
        both = groups
    else:
        ones = torch.ones_like(groups)
        of_planes = [(ones if one is None else one).repeat_interleave(-(-matrix.group // PLANE), 1) for one in given]
        both = torch.stack(of_planes, -1).flatten(1)
    return _padded(both, padded_depth // HALVED_GROUP).view(torch.int32).T.contiguous()


def _padded(table: Tensor, size: int) -> Tensor:
    padded = F.pad(table[:, :size], (0, max(0, size - table.shape[1])))
    return padded.clone(memory_format=torch.contiguous_format)  # a table of one column has strides of its own else


def _present(tables: CodeTables) -> list[Tensor]:
    return [one for one in (tables.codes, tables.rest, tables.scales, tables.factors) if one is not None]


def _bytes_of(table: Tensor) -> Tensor:
    flat = table.reshape(-1).view(torch.uint8)
    return F.pad(flat, (0, -len(flat) % ALIGNMENT))


def _placed(tables: CodeTables, pieces: Iterator[Tensor]) -> CodeTables:
    """Views each table's bytes in the contiguous tensor."""

    def view(table: Tensor) -> Tensor:
        return next(pieces)[: table.nbytes].view(table.dtype).view(table.shape)

    found = [view(one) for one in _present(tables)]
    codes, rest = found.pop(0), None if tables.rest is None else found.pop(0)
    return CodeTables(codes, rest, found.pop(0), found.pop(0) if found else None)
