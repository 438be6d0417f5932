"""The types of a GGUF tensor: blocks of numbers, and the meaning of their bytes.

Source: ggml's ggml-common.h; the package `gguf` is the oracle of the tests.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kernels.quantized.codebook import Codebook

Bytes = NDArray[np.uint8]
Floats = NDArray[np.float32]
_BFLOAT16_EXPONENT = np.uint16(0x7F80)
_E2M1_BIAS, _LARGEST_EXPONENT = 128, 252
"""The bias of MXFP4's halved scales, and the largest exponent whose weights float32 holds; 255 is NaN."""


@dataclass(frozen=True)
class CodedRows:
    """Quantized rows: int8 codes [rows, columns], float32 scales [rows, columns / group], offsets alike or None.

    Codes that a type looks up are here the numbers of its codebook.
    """

    codes: NDArray[np.int8]
    scale: Floats
    offset: Floats | None = None

    @property
    def group(self) -> int:
        """Numbers that share a scale."""
        return int(self.codes.shape[1] // self.scale.shape[1])

    def values(self) -> Floats:
        """Dequantizes: scale * code + offset, float32 [rows, columns]."""
        grouped = self.codes.reshape(*self.scale.shape, self.group).astype(np.float32)
        grouped *= self.scale[..., None]
        if self.offset is not None:
            grouped += self.offset[..., None]
        return grouped.reshape(self.codes.shape)


@dataclass(frozen=True, kw_only=True)
class BlockType:
    """A tensor type: its number in a file, and how many `numbers` and `bytes` a block has.

    dtype: torch's name of a float type, else None. halves: offsets of half-precision numbers in a block. codebook: the
    numbers of its codes; E2M1's blocks begin with an exponent. decode: maps uint8 [blocks, bytes] to codes with one row
    a block.
    """

    name: str
    number: int
    numbers: int
    bytes: int
    dtype: str | None = None
    halves: tuple[int, ...] = ()
    codebook: Codebook | None = None
    decode: Callable[[Bytes], CodedRows] | None = None

    def is_finite(self, blocks: Bytes) -> bool:
        """Tells whether no float and no half-precision scale of uint8 [blocks, bytes] is NaN or infinite."""
        match self.dtype:
            case "float32":
                return bool(np.isfinite(blocks.view(np.float32)).all())
            case "bfloat16":
                return bool(((blocks.view(np.uint16) & _BFLOAT16_EXPONENT) != _BFLOAT16_EXPONENT).all())
        if self.codebook is Codebook.E2M1:
            return bool((blocks[:, 0] <= _LARGEST_EXPONENT).all())
        halves = blocks.view(np.float16)
        return bool(np.isfinite(halves if self.dtype else halves[:, [at // 2 for at in self.halves]]).all())


@dataclass(frozen=True)
class StoredTensor:
    """The place of a tensor: `offset` from the file's beginning; `heads` whose rows are stored in pairs, 0 for none."""

    kind: BlockType
    shape: tuple[int, ...]
    offset: int
    heads: int = 0

    @property
    def row_bytes(self) -> int:
        return self.shape[-1] // self.kind.numbers * self.kind.bytes

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape[:-1]) * self.row_bytes


def unpack(kind: BlockType, stored: Bytes) -> CodedRows:
    """Decodes uint8 [rows, bytes of a row] of a quantized type."""
    assert kind.decode is not None
    rows = len(stored)
    found = kind.decode(stored.reshape(-1, kind.bytes))
    offset = None if found.offset is None else found.offset.reshape(rows, -1)
    return CodedRows(found.codes.reshape(rows, -1), found.scale.reshape(rows, -1), offset)


def _half(blocks: Bytes, at: int) -> Floats:
    """Reads the half-precision number at a byte of each block, [blocks, 1]."""
    return np.ascontiguousarray(blocks[:, at : at + 2]).view(np.float16).astype(np.float32)


def _nibbles(packed: Bytes) -> Bytes:
    """Splits bytes [..., n] into low nibbles, then high ones, [..., 2n]."""
    return np.concatenate([packed & 15, packed >> 4], axis=-1)


def _fifth_bits(blocks: Bytes, at: int) -> Bytes:
    """Reads 32 bits at a byte of each block as bit 4 of 32 codes."""
    return np.unpackbits(blocks[:, at : at + 4], axis=-1, bitorder="little") * np.uint8(16)


def _q4_0(blocks: Bytes) -> CodedRows:
    return CodedRows(_nibbles(blocks[:, 2:]).view(np.int8) - np.int8(8), _half(blocks, 0))


def _q4_1(blocks: Bytes) -> CodedRows:
    return CodedRows(_nibbles(blocks[:, 4:]).view(np.int8), _half(blocks, 0), _half(blocks, 2))


def _q5_0(blocks: Bytes) -> CodedRows:
    codes = _nibbles(blocks[:, 6:]) | _fifth_bits(blocks, 2)
    return CodedRows(codes.view(np.int8) - np.int8(16), _half(blocks, 0))


def _q5_1(blocks: Bytes) -> CodedRows:
    codes = _nibbles(blocks[:, 8:]) | _fifth_bits(blocks, 4)
    return CodedRows(codes.view(np.int8), _half(blocks, 0), _half(blocks, 2))


def _q8_0(blocks: Bytes) -> CodedRows:
    return CodedRows(np.ascontiguousarray(blocks[:, 2:]).view(np.int8), _half(blocks, 0))


def _k_scales(packed: Bytes) -> tuple[Floats, Floats]:
    """Reads eight scales and eight minima of 6 bits each out of 12 bytes."""
    low, middle, high = packed[:, 0:4], packed[:, 4:8], packed[:, 8:12]
    scales = np.concatenate([low & 63, (high & 15) | ((low >> 6) << 4)], axis=-1)
    minima = np.concatenate([middle & 63, (high >> 4) | ((middle >> 6) << 4)], axis=-1)
    return scales.astype(np.float32), minima.astype(np.float32)


def _k_codes(blocks: Bytes, at: int, codes: Bytes) -> CodedRows:
    """Joins codes with the scales and minima at a block's beginning; `at`: the byte after these."""
    scales, minima = _k_scales(blocks[:, 4:at])
    return CodedRows(codes.view(np.int8), _half(blocks, 0) * scales, -(_half(blocks, 2) * minima))


def _q4_k(blocks: Bytes) -> CodedRows:
    codes = _nibbles(blocks[:, 16:].reshape(-1, 4, 32)).reshape(-1, 256)
    return _k_codes(blocks, 16, codes)


def _q5_k(blocks: Bytes) -> CodedRows:
    low = _nibbles(blocks[:, 48:].reshape(-1, 4, 32)).reshape(-1, 8, 32)
    bits = np.unpackbits(blocks[:, 16:48, None], axis=-1, bitorder="little").transpose(0, 2, 1)
    return _k_codes(blocks, 16, (low | bits * np.uint8(16)).reshape(-1, 256))


def _q6_k(blocks: Bytes) -> CodedRows:
    low = _nibbles(blocks[:, :128].reshape(-1, 2, 64))
    shifts = np.array([0, 2, 4, 6], np.uint8)[:, None]
    high = (blocks[:, 128:192].reshape(-1, 2, 1, 32) >> shifts) & 3
    codes = low.reshape(-1, 256) | (high.reshape(-1, 256) << 4)
    scales = np.ascontiguousarray(blocks[:, 192:208]).view(np.int8).astype(np.float32)
    return CodedRows(codes.view(np.int8) - np.int8(32), _half(blocks, 208) * scales)


def _looked_up(codebook: Codebook, packed: Bytes) -> NDArray[np.int8]:
    """Reads the numbers of codes, uint8 [blocks, n], in groups of 32 of which the first half lies in low nibbles."""
    codes = _nibbles(packed.reshape(len(packed), -1, 16)).reshape(len(packed), -1)
    return np.array(codebook.value, np.int8)[codes]


def _iq4_nl(blocks: Bytes) -> CodedRows:
    return CodedRows(_looked_up(Codebook.IQ4_NL, blocks[:, 2:]), _half(blocks, 0))


def _iq4_xs(blocks: Bytes) -> CodedRows:
    low = np.stack([blocks[:, 4:8] & 15, blocks[:, 4:8] >> 4], axis=-1).reshape(-1, 8)
    high = (blocks[:, 2:4, None] >> np.array([0, 2, 4, 6], np.uint8) & 3).reshape(-1, 8)
    scales = (low | high << 4).astype(np.float32) - 32
    return CodedRows(_looked_up(Codebook.IQ4_NL, blocks[:, 8:]), _half(blocks, 0) * scales)


def _mxfp4(blocks: Bytes) -> CodedRows:
    numbers = _looked_up(Codebook.E2M1, blocks[:, 1:])
    scales = np.ldexp(np.float32(1), blocks[:, :1].astype(np.int32) - _E2M1_BIAS)
    return CodedRows(numbers, scales * numbers.any(-1, keepdims=True))  # files have the exponent 0 for zeros


TYPES = {
    kind.name: kind
    for kind in (
        BlockType(name="F32", number=0, numbers=1, bytes=4, dtype="float32"),
        BlockType(name="F16", number=1, numbers=1, bytes=2, dtype="float16"),
        BlockType(name="BF16", number=30, numbers=1, bytes=2, dtype="bfloat16"),
        BlockType(name="Q4_0", number=2, numbers=32, bytes=18, halves=(0,), decode=_q4_0),
        BlockType(name="Q4_1", number=3, numbers=32, bytes=20, halves=(0, 2), decode=_q4_1),
        BlockType(name="Q5_0", number=6, numbers=32, bytes=22, halves=(0,), decode=_q5_0),
        BlockType(name="Q5_1", number=7, numbers=32, bytes=24, halves=(0, 2), decode=_q5_1),
        BlockType(name="Q8_0", number=8, numbers=32, bytes=34, halves=(0,), decode=_q8_0),
        BlockType(
            name="IQ4_NL", number=20, numbers=32, bytes=18, halves=(0,), codebook=Codebook.IQ4_NL, decode=_iq4_nl
        ),
        BlockType(
            name="IQ4_XS", number=23, numbers=256, bytes=136, halves=(0,), codebook=Codebook.IQ4_NL, decode=_iq4_xs
        ),
        BlockType(name="MXFP4", number=39, numbers=32, bytes=17, codebook=Codebook.E2M1, decode=_mxfp4),
        BlockType(name="Q4_K", number=12, numbers=256, bytes=144, halves=(0, 2), decode=_q4_k),
        BlockType(name="Q5_K", number=13, numbers=256, bytes=176, halves=(0, 2), decode=_q5_k),
        BlockType(name="Q6_K", number=14, numbers=256, bytes=210, halves=(208,), decode=_q6_k),
    )
}
"""The types that are served."""
