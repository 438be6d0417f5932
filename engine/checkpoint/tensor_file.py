"""A .safetensors file: its header checked in full, its tensors read one at a time.

Layout: u64 little-endian length of the header, the header (a JSON object from tensor name to dtype, shape and the
bounds of its bytes), then the bytes of all tensors without gap or overlap. Source: the format's specification in the
safetensors repository. Ours is stricter in two things: a header has at most 25 MB, and no name occurs twice.
"""

import hashlib
import json
import math
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from io import BufferedReader, FileIO
from pathlib import Path
from typing import Any

import torch

from engine.checkpoint.json_fields import parse_object
from text.model_file import open_regular
from wire.errors import ModelError
from wire.typed_reader import once

MAX_HEADER_BYTES = 25_000_000
_STEP_BYTES = 4 << 20

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


@dataclass(frozen=True)
class TensorEntry:
    """The place of a tensor. `begin` and `end` are bytes from the start of the data."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int
    end: int


class TensorFile:
    """A .safetensors file. Its construction raises ModelError if the header is malformed or the file cut.

    rename: gives a stored tensor the name that it is read by.
    """

    def __init__(self, path: Path, rename: Callable[[str], str] = str) -> None:
        self.path = path
        with open_regular(path) as file:
            header, self._data_start = _read_header(file, path.name)
            data_bytes = os.fstat(file.fileno()).st_size - self._data_start
        header.pop("__metadata__", None)
        self.entries = {rename(name): _parse_entry(path.name, name, entry) for name, entry in header.items()}
        if not _tiles(self.entries.values(), data_bytes):
            raise ModelError(f"{path.name}: the tensors do not fill the file without gap or overlap")

    def digest(self) -> tuple[str, str | None]:
        """Reads the whole file; returns its hex SHA-256, and the name of a tensor with NaN or infinity, if any."""
        sha, flawed = hashlib.sha256(), None
        buffer = torch.empty(_STEP_BYTES, dtype=torch.uint8)
        with BufferedReader(open_regular(self.path)) as file:
            sha.update(file.read(self._data_start))
            for name, entry in sorted(self.entries.items(), key=lambda item: item[1].begin):
                for start in range(entry.begin, entry.end, _STEP_BYTES):
                    part = buffer[: min(_STEP_BYTES, entry.end - start)]
                    self._fill(part, file, name)
                    sha.update(part.numpy().data)
                    if flawed is None and not is_finite(part.view(entry.dtype)):
                        flawed = name
        return sha.hexdigest(), flawed

    def read(self, name: str, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Reads a tensor into host memory, by default in the file's dtype. Raises ModelError if the file was cut."""
        entry = self.entries[name]
        return self._read(name, entry.begin, entry.end).view(entry.shape).to(dtype)

    def read_item(self, name: str, index: int) -> torch.Tensor:
        """Reads the part of a tensor at a place of its first dimension. Raises ModelError if the file was cut."""
        entry = self.entries[name]
        num_bytes = (entry.end - entry.begin) // entry.shape[0]
        begin = entry.begin + index * num_bytes
        return self._read(name, begin, begin + num_bytes).view(entry.shape[1:])

    def _read(self, name: str, begin: int, end: int) -> torch.Tensor:
        raw = torch.empty(end - begin, dtype=torch.uint8)
        with BufferedReader(open_regular(self.path)) as file:
            file.seek(self._data_start + begin)
            self._fill(raw, file, name)
        return raw.view(self.entries[name].dtype)

    def _fill(self, raw: torch.Tensor, file: "BufferedReader[FileIO]", name: str) -> None:
        if file.readinto(raw.numpy().data) != len(raw):
            raise ModelError(f"{self.path.name} ended while {name[:64]} was being read")


def is_finite(tensor: torch.Tensor) -> bool:
    """Returns whether no element is NaN or infinite; true for integers and floats of one byte."""
    if not tensor.numel() or not tensor.is_floating_point() or tensor.element_size() == 1:
        return True
    return all(math.isfinite(end.item()) for end in torch.aminmax(tensor))  # which passes NaN on


def _read_header(file: FileIO, source: str) -> tuple[dict[str, Any], int]:
    """Reads the header; returns it with the offset at which the data begins."""
    size = os.fstat(file.fileno()).st_size
    header_bytes = int.from_bytes(file.read(8), "little")
    if not 0 < header_bytes <= min(MAX_HEADER_BYTES, size - 8):
        raise ModelError(f"{source}: a header of {header_bytes} bytes in a file of {size}")
    data = file.read(header_bytes)
    if not data.startswith(b"{"):
        raise ModelError(f"{source}: the header is not a JSON object")
    return parse_object(data, f"the header of {source}", partial(json.loads, object_pairs_hook=once)), 8 + header_bytes


def _parse_entry(source: str, name: str, entry: Any) -> TensorEntry:
    match entry:
        case {"dtype": str(dtype), "shape": [*shape], "data_offsets": [begin, end], **rest} if not rest:
            sizes = (*shape, begin, end)
        case _:
            raise ModelError(f"{source}: tensor {name[:64]} is not described by dtype, shape and data_offsets")
    if dtype not in _DTYPES:
        raise ModelError(f"{source}: tensor {name[:64]} has the unknown dtype {dtype[:64]}")
    if any(isinstance(size, bool) or not isinstance(size, int) or size < 0 for size in sizes):
        raise ModelError(f"{source}: tensor {name[:64]} has a size that is not a whole number")
    if end - begin != math.prod(shape) * _DTYPES[dtype].itemsize:
        raise ModelError(f"{source}: the shape of tensor {name[:64]} does not fit its bytes")
    return TensorEntry(_DTYPES[dtype], tuple(shape), begin, end)


def _tiles(entries: Iterable[TensorEntry], data_bytes: int) -> bool:
    """Returns whether the entries cover [0, data_bytes) without gap or overlap."""
    position = 0
    for begin, end in sorted((entry.begin, entry.end) for entry in entries):
        if begin != position:
            return False
        position = end
    return position == data_bytes
