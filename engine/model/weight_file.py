"""A file of packed weights, written once and then mapped read-only.

It has the matrices, each at a multiple of 64 bytes; their table, a JSON object from the name of a matrix's first tensor
to the fields of `_Place`; the table's length, u64 little-endian; and XXH3-128 of all bytes before.
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
_LENGTH_BYTES, _DIGEST_BYTES = 8, 16

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Place:
    """The bytes of a matrix, what its `Weight` has, and the dtype and shape of its data."""

    begin: int
    end: int
    columns: int
    depth: int
    dtype: str
    data_dtype: str
    shape: list[int]


class WeightWriter:
    """The writer of a file, matrix by matrix: none of them stays in memory."""

    def __init__(self, file: FileIO) -> None:
        self._file = file
        self._digest = xxhash.xxh3_128()
        self._places: dict[str, _Place] = {}
        self._end = 0

    def put(self, name: str, pack: Callable[[], Weight]) -> Weight:
        """Packs a matrix and appends it. Raises OSError."""
        weight = pack()
        data = weight.data.contiguous()
        begin = self._end
        self._append(data.view(-1).view(torch.uint8).numpy().data)
        place = _Place(
            begin,
            self._end,
            weight.columns,
            weight.depth,
            _name_of(weight.dtype),
            _name_of(data.dtype),
            list(data.shape),
        )
        self._append(bytes(-self._end % LINE_BYTES))
        self._places[name] = place
        return weight

    def finish(self) -> None:
        """Writes the table and the digest; returns when the disk has all."""
        table = json.dumps({name: asdict(place) for name, place in self._places.items()}).encode()
        self._append(table)
        self._append(len(table).to_bytes(_LENGTH_BYTES, "little"))
        self._append(self._digest.digest())
        self._file.truncate(self._end)
        os.fsync(self._file.fileno())

    def _append(self, data: bytes | memoryview) -> None:
        self._digest.update(data)
        self._end += len(data)
        while data:
            data = memoryview(data)[self._file.write(data) :]


class WeightFile:
    """A whole file, mapped: its matrices are read-only tensors."""

    def __init__(self, data: torch.Tensor) -> None:
        self._data = data
        tail = len(data) - _DIGEST_BYTES - _LENGTH_BYTES
        length = int.from_bytes(data[tail : tail + _LENGTH_BYTES].numpy().tobytes(), "little")
        table = json.loads(data[tail - length : tail].numpy().tobytes())
        self._places = {name: _Place(**place) for name, place in table.items()}

    @classmethod
    def open(cls, path: Path) -> "WeightFile | None":
        """Maps a file and reads it once, for its digest; None where there is none, or a damaged one, with a warning.

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
        place = self._places[name]
        data = self._data[place.begin : place.end].view(_dtype_of(place.data_dtype)).view(place.shape)
        return Weight(data, place.columns, place.depth, _dtype_of(place.dtype))


class _Mapping:
    """A read-only mapping. Its array interface calls it writable, lest torch warns; a write would end the process."""

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
