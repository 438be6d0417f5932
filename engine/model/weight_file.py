"""A file of packed weights, written once and then mapped read-only.

Layout: the matrices, each aligned to 64 bytes; a table, the JSON object from the name of a matrix's first tensor to the
fields of `_Entry`; the length of the table, u64 little-endian; XXH3-128 of all bytes before it.
"""

import json
import logging
import mmap
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass
from io import FileIO
from pathlib import Path

import numpy as np
import torch
import xxhash

from kernels.backend import Weight
from kernels.user_cache import require_own

LINE_BYTES = 64
HUGE_PAGE_BYTES = 2 << 20
"""Bytes of each write but the last: file systems can keep such files in huge pages, and each step reads all of it."""
_LENGTH_BYTES, _DIGEST_BYTES = 8, 16

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class _Entry:
    """A matrix's entry in the table: its bytes in the file, the fields of its `Weight`, dtype and shape of its data."""

    begin: int
    end: int
    columns: int
    depth: int
    dtype: str
    data_dtype: str
    shape: list[int]


class WeightWriter:
    """The writer of a file, matrix by matrix; holds up to 2 MiB of what it has been given."""

    def __init__(self, file: FileIO) -> None:
        self._file = file
        self._digest = xxhash.xxh3_128()
        self._entries: dict[str, _Entry] = {}
        self._end = 0
        self._tail = bytearray()

    def put(self, name: str, pack: Callable[[], Weight]) -> Weight:
        """Packs a matrix and appends it. Raises OSError."""
        weight = pack()
        data = weight.data.contiguous()
        begin = self._end
        self._append(data.view(-1).view(torch.uint8).numpy().data)
        entry = _Entry(
            begin=begin,
            end=self._end,
            columns=weight.columns,
            depth=weight.depth,
            dtype=_name_of(weight.dtype),
            data_dtype=_name_of(data.dtype),
            shape=list(data.shape),
        )
        self._append(bytes(-self._end % LINE_BYTES))
        self._entries[name] = entry
        return weight

    def finish(self) -> None:
        """Writes the table and the digest, and syncs the file. Blocks. Raises OSError."""
        table = json.dumps({name: asdict(entry) for name, entry in self._entries.items()}).encode()
        self._append(table)
        self._append(len(table).to_bytes(_LENGTH_BYTES, "little"))
        self._append(self._digest.digest())
        self._write(self._tail)
        self._file.truncate(self._end)
        os.fsync(self._file.fileno())

    def _append(self, data: bytes | memoryview) -> None:
        self._digest.update(data)
        self._end += len(data)
        rest = memoryview(data)
        while rest:
            num_bytes = HUGE_PAGE_BYTES - len(self._tail)
            self._tail += rest[:num_bytes]
            rest = rest[num_bytes:]
            if len(self._tail) == HUGE_PAGE_BYTES:
                self._write(self._tail)
                self._tail = bytearray()

    def _write(self, data: bytearray | memoryview) -> None:
        rest = memoryview(data)
        while rest:
            rest = rest[self._file.write(rest) :]


class WeightFile:
    """A whole file, mapped: its matrices are read-only tensors."""

    def __init__(self, data: torch.Tensor) -> None:
        self._data = data
        tail = len(data) - _DIGEST_BYTES - _LENGTH_BYTES
        length = int.from_bytes(data[tail : tail + _LENGTH_BYTES].numpy().tobytes(), "little")
        table = json.loads(data[tail - length : tail].numpy().tobytes())
        self._entries = {name: _Entry(**entry) for name, entry in table.items()}

    @classmethod
    def open(cls, path: Path) -> "WeightFile | None":
        """Maps a file and verifies its digest, which reads all of it; None if missing or, with a warning, damaged.

        Raises OSError for a file that is not this user's own.
        """
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
        except FileNotFoundError:
            return None
        with open(descriptor, "rb") as file:
            status = os.fstat(descriptor)
            require_own(status, path)
            if status.st_size > _DIGEST_BYTES + _LENGTH_BYTES:
                data = np.asarray(_Mapping(file.fileno(), status.st_size))
                if xxhash.xxh3_128_digest(data[:-_DIGEST_BYTES].data) == data[-_DIGEST_BYTES:].tobytes():
                    return cls(torch.from_numpy(data))
        logger.warning("%s is damaged, and made anew", path)
        return None

    @property
    def num_bytes(self) -> int:
        return len(self._data)

    def find(self, name: str, _pack: Callable[[], Weight]) -> Weight:
        """Finds a matrix by the name of its first tensor."""
        entry = self._entries[name]
        data = self._data[entry.begin : entry.end].view(_dtype_of(entry.data_dtype)).view(entry.shape)
        return Weight(data, entry.columns, entry.depth, _dtype_of(entry.dtype))


class _Mapping:
    """A read-only mapping. Its array interface says writable, so that torch does not warn; a write is a SIGSEGV."""

    def __init__(self, descriptor: int, num_bytes: int) -> None:
        self._mapping = mmap.mmap(descriptor, num_bytes, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ)
        address = np.frombuffer(self._mapping, np.uint8).ctypes.data
        self.__array_interface__ = {"version": 3, "typestr": "|u1", "shape": (num_bytes,), "data": (address, False)}


def _name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _dtype_of(name: str) -> torch.dtype:
    found = getattr(torch, name)
    assert isinstance(found, torch.dtype)
    return found
