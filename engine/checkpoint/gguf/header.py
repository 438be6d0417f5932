"""The header of a GGUF file: its metadata, and the table of its tensors, read within bounds.

Layout, little-endian: magic, u32 version, u64 tensors, u64 metadata entries; the entries (key, u32 type, value); the
tensors (name, u32 dimensions, u64 sizes from the fastest on, u32 type, u64 offset); then data at the next multiple of
`general.alignment`. A string is a u64 length and bytes, an array a u32 type, a u64 length and values. Source: the
format's specification in ggml's repository. Ours is stricter: sizes are compared with the bytes that are left before
anything is read, tensors fill the data without gap or overlap, and no name occurs twice.
"""

import os
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from io import BufferedReader, FileIO
from itertools import pairwise
from pathlib import Path
from typing import Any

from engine.checkpoint.gguf.blocks import TYPES, StoredTensor
from text.model_file import open_regular
from wire.errors import ModelError

MAX_HEADER_BYTES = 64 << 20
MAX_ENTRIES, MAX_TENSORS, MAX_ITEMS = 1 << 12, 1 << 16, 1 << 21
MAX_DIMENSIONS = 4
MAX_SIZE = 1 << 31
MAX_NAME_BYTES = 1 << 10
VERSIONS = (2, 3)
ALIGNMENT = "general.alignment"
MAX_ALIGNMENT = 1 << 16

_STRING, _ARRAY = 8, 9
_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_OTHER_TYPES = {9: "Q8_1", 10: "Q2_K", 11: "Q3_K", 15: "Q8_K", 34: "TQ1_0", 35: "TQ2_0"}
_OTHER_TYPES |= {16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S", 21: "IQ3_S", 22: "IQ2_S", 29: "IQ1_M"}
_OTHER_TYPES |= {24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64"}
_BY_NUMBER = {kind.number: kind for kind in TYPES.values()}


@dataclass(frozen=True)
class Header:
    """metadata: values by key. tensors: places by the file's own names, with offsets from the file's beginning."""

    path: Path
    metadata: Mapping[str, Any]
    tensors: Mapping[str, StoredTensor]

    @classmethod
    def read(cls, path: Path) -> "Header":
        """Raises ModelError, naming file, tensor and reason, for a file that is not whole and well-formed."""
        with BufferedReader(open_regular(path)) as file:
            return _Reader(file, path).header()


class _Reader:
    """A position in a file; no read goes beyond its end, nor beyond MAX_HEADER_BYTES."""

    def __init__(self, file: "BufferedReader[FileIO]", path: Path) -> None:
        self._file = file
        self._path = path
        self._file_bytes = os.fstat(file.fileno()).st_size
        self._left = min(self._file_bytes, MAX_HEADER_BYTES)

    def header(self) -> Header:
        if self._take(4, "the magic") != b"GGUF":
            raise self._wrong("not a GGUF file")
        version = self._number("I", "the version")
        if version not in VERSIONS:
            raise self._wrong(f"version {version} is not supported; supported: 2, 3, little-endian")
        num_tensors = self._count("the tensors", MAX_TENSORS, 24)
        metadata = self._distinct("key", [self._entry() for _ in range(self._count("the metadata", MAX_ENTRIES, 13))])
        alignment = metadata.get(ALIGNMENT, 32)
        if not isinstance(alignment, int) or not 8 <= alignment <= MAX_ALIGNMENT or alignment & (alignment - 1):
            raise self._wrong(
                f"{ALIGNMENT} is {str(alignment)[:32]}, expected a power of two from 8 to {MAX_ALIGNMENT}"
            )
        tensors = self._distinct("tensor", [self._tensor() for _ in range(num_tensors)])
        return Header(self._path, metadata, self._placed(tensors, alignment))

    def _entry(self) -> tuple[str, Any]:
        key = self._string("a key", MAX_NAME_BYTES)
        return key, self._value(self._number("I", key), key)

    def _value(self, kind: int, key: str) -> Any:
        if kind == _STRING:
            return self._string(key, self._left)
        if kind == _ARRAY:
            return self._array(key)
        if kind not in _NUMBERS:
            raise self._wrong(f"{key[:64]} has the unknown type {kind}")
        return self._number(_NUMBERS[kind], key)

    def _array(self, key: str) -> list[Any]:
        kind = self._number("I", key)
        if kind == _STRING:
            return [self._string(key, self._left) for _ in range(self._count(key, MAX_ITEMS, 8))]
        if kind not in _NUMBERS:
            raise self._wrong(f"{key[:64]} is an array of the type {kind}; only numbers and strings are read")
        code = _NUMBERS[kind]
        count = self._count(key, MAX_ITEMS, struct.calcsize(f"<{code}"))
        return list(struct.unpack(f"<{count}{code}", self._take(struct.calcsize(f"<{count}{code}"), key)))

    def _tensor(self) -> tuple[str, StoredTensor]:
        name = self._string("a tensor's name", MAX_NAME_BYTES)
        dimensions = self._number("I", name)
        if not 1 <= dimensions <= MAX_DIMENSIONS:
            raise self._wrong(f"tensor {name[:64]} has {dimensions} dimensions, expected 1 to {MAX_DIMENSIONS}")
        shape = tuple(self._number("Q", name) for _ in range(dimensions))[::-1]
        number, offset = self._number("I", name), self._number("Q", name)
        kind = _BY_NUMBER.get(number)
        if kind is None:
            found = f"type {_OTHER_TYPES.get(number, number)}"
            raise self._wrong(f"tensor {name[:64]} has {found}, which is not supported; supported: {', '.join(TYPES)}")
        if any(not 0 < size < MAX_SIZE for size in shape) or shape[-1] % kind.numbers:
            sizes = f"rows of {kind.name} have a multiple of {kind.numbers} numbers"
            raise self._wrong(f"tensor {name[:64]} has sizes {str(list(shape))[:64]}: {sizes}")
        return name, StoredTensor(kind, shape, offset)

    def _placed(self, tensors: dict[str, StoredTensor], alignment: int) -> dict[str, StoredTensor]:
        """Adds the beginning of the data to all offsets, and compares each with the previous tensor's end."""
        start = _padded(self._file.tell(), alignment)
        placed, end = {}, 0
        for name, tensor in sorted(tensors.items(), key=lambda item: item[1].offset):
            if tensor.offset != _padded(end, alignment):
                raise self._wrong(f"tensor {name[:64]} is at {tensor.offset}, expected {_padded(end, alignment)}")
            end = tensor.offset + tensor.num_bytes
            if start + end > self._file_bytes:
                raise self._wrong(f"tensor {name[:64]} ends at {start + end}, the file at {self._file_bytes}")
            placed[name] = StoredTensor(tensor.kind, tensor.shape, start + tensor.offset)
        if self._file_bytes > max(start + _padded(end, alignment), self._file.tell()):
            raise self._wrong(f"{self._file_bytes - start - end} bytes follow the last tensor")
        return placed

    def _distinct(self, what: str, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        named = dict(pairs)
        if len(named) != len(pairs):
            twice = next(one for one, following in pairwise(sorted(name for name, _ in pairs)) if one == following)
            raise self._wrong(f"the {what} {twice[:64]} occurs twice")
        return named

    def _count(self, what: str, most: int, least_bytes: int) -> int:
        """Reads a number of items, each of `least_bytes` or more; raises ModelError if they exceed the file."""
        count: int = self._number("Q", what)
        if count > min(most, self._left // least_bytes):
            raise self._wrong(f"{what[:64]}: a count of {count}, more than {most} or than the file has bytes for")
        return count

    def _string(self, what: str, most: int) -> str:
        num_bytes = self._number("Q", what)
        if num_bytes > most:
            raise self._wrong(f"{what[:64]}: a string of {num_bytes} bytes, more than {most} or than the header has")
        try:
            return self._take(num_bytes, what).decode()
        except UnicodeDecodeError as error:
            raise self._wrong(f"{what[:64]}: a string that is not UTF-8") from error

    def _number(self, code: str, what: str) -> Any:
        return struct.unpack(f"<{code}", self._take(struct.calcsize(f"<{code}"), what))[0]

    def _take(self, num_bytes: int, what: str) -> bytes:
        if num_bytes > self._left:
            raise self._wrong(f"the file, or its header of {MAX_HEADER_BYTES} bytes at most, ends amid {what[:64]}")
        self._left -= num_bytes
        data = self._file.read(num_bytes)
        if len(data) != num_bytes:
            raise self._wrong(f"ended amid {what[:64]} while it was being read")
        return data

    def _wrong(self, reason: str) -> ModelError:
        return ModelError(f"{self._path.name}: {reason}")


def _padded(num_bytes: int, alignment: int) -> int:
    return -(-num_bytes // alignment) * alignment
