"""The table of a converted model's tensors, and the parts of the GGUF model that hold their data."""

import os
from collections.abc import Mapping
from functools import partial
from io import BufferedReader
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from engine.checkpoint.gguf import TABLE_FILE, VERSION, require_gguf
from engine.checkpoint.gguf.blocks import TYPES, BlockType, Bytes, Floats, StoredTensor, unpack
from engine.checkpoint.json_fields import JsonFields, parse_object
from kernels.quantized.codebook import Codebook
from kernels.quantized.matrix import Quantized
from text.model_file import open_regular, read_regular
from wire.errors import ModelError

MAX_TABLE_BYTES = 1 << 25
_STEP_VALUES = 1 << 22
"""Numbers that are dequantized at once."""
_ZEROS = {"Q4_0": 8, "Q5_0": 16, "Q6_K": 32}
"""The code that stands for 0, in types with signed numbers."""


class GgufPart:
    """A GGUF file of a model, with the tensors that the table places in it."""

    def __init__(self, path: Path, entries: Mapping[str, StoredTensor]) -> None:
        self.path = path
        self.entries = entries

    def read(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        """Reads, dequantizes and rounds a tensor, a few rows at a time. Raises ModelError if the file has been cut."""
        entry, stored = self.entries[name], self.read_stored(name)
        values = torch.empty(entry.shape, dtype=dtype).view(len(stored), -1)
        step = max(1, _STEP_VALUES // entry.shape[-1])
        for start in range(0, len(stored), step):
            values[start : start + step] = dequantize(entry.kind, stored[start : start + step])
        return values.view(entry.shape)

    def read_codes(self, name: str) -> Quantized:
        """Reads the codes and scales of a tensor that has them. Raises ModelError if the file has been cut."""
        return quantized(self.entries[name].kind, self.read_stored(name))

    def outline(self, name: str) -> Quantized:
        """Returns the tensors of `read_codes` without content, on the device `meta`."""
        entry = self.entries[name]
        return quantized(entry.kind, np.zeros((1, entry.row_bytes), np.uint8)).outline(entry.shape[0])

    def read_stored(self, name: str) -> Bytes:
        """Reads a tensor's bytes, uint8 [rows, bytes of a row], with rows in our order; a vector is one row."""
        entry = self.entries[name]
        raw = np.empty(entry.num_bytes, np.uint8)
        with BufferedReader(open_regular(self.path)) as file:
            file.seek(entry.offset)
            if file.readinto(raw.data) != len(raw):
                raise ModelError(f"{self.path.name} ended while {name[:64]} was being read")
        if not entry.heads:
            return raw.reshape(-1, entry.row_bytes)
        pairs = raw.reshape(entry.heads, -1, 2, entry.num_bytes // entry.shape[0])
        return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(-1, entry.row_bytes)


class GgufCodes:
    """The matrices of GGUF files that have codes."""

    def __init__(self, tensor_to_part: Mapping[str, GgufPart]) -> None:
        self._parts = tensor_to_part

    def names(self, name: str) -> list[str]:
        """Implements `CodeReader.names`."""
        part = self._parts.get(name)
        return [] if part is None or part.entries[name].kind.decode is None else [name]

    def read(self, name: str, shape: tuple[int, ...], device: torch.device) -> Quantized:
        """Implements `CodeReader.read`."""
        part = self._parts[name]
        found = part.entries[name].shape
        if found != shape:
            raise ModelError(f"tensor {name} has shape {list(found)}, config.json makes it {list(shape)}")
        return part.outline(name) if device.type == "meta" else part.read_codes(name)


def dequantize(kind: BlockType, stored: Bytes) -> torch.Tensor:
    """Returns [rows, columns] in the dtype of a float type, else in float32."""
    if kind.dtype is None:
        return torch.from_numpy(unpack(kind, stored).values())
    dtype: torch.dtype = getattr(torch, kind.dtype)
    return torch.from_numpy(stored).view(dtype)


def _entry(row: JsonFields, file_bytes: int) -> StoredTensor:
    """Reads a tensor's place. Raises ModelError if it exceeds its file, or if its rows do not fit its type."""
    kind, shape = TYPES.get(row.text("type", "")), row.raw("shape")
    if kind is None:
        raise row.wrong("type", "a type of tensors")
    if not (isinstance(shape, list) and shape and all(type(one) is int and one > 0 for one in shape)):
        raise row.wrong("shape", "numbers above 0")
    heads = row.count("heads", least=0)
    entry = StoredTensor(kind, tuple(shape), row.count("offset", least=0), heads)
    if shape[-1] % kind.numbers or (heads and shape[0] % (2 * heads)) or entry.offset + entry.num_bytes > file_bytes:
        raise row.wrong("shape", "whole blocks of whole heads within the file")
    return entry


def read_table(folder: Path) -> dict[str, GgufPart]:
    """Maps each tensor to its part. Raises ModelError for a damaged table, or parts that are gone or changed."""
    table = JsonFields(parse_object(read_regular(folder / TABLE_FILE, MAX_TABLE_BYTES), TABLE_FILE), TABLE_FILE)
    table.count("version", most=VERSION, least=VERSION)
    try:
        sizes = {Path(file["path"]): int(file["bytes"]) for file in table.raw("files")}
    except (KeyError, TypeError, ValueError) as error:
        raise ModelError(f"{TABLE_FILE}: malformed", folder=str(folder)) from error
    entries: list[dict[str, StoredTensor]] = [{} for _ in sizes]
    file_bytes, tensors = [*sizes.values()], table.section("tensors")
    for name, _ in tensors.items():
        row = tensors.section(name)
        place = row.count("file", most=len(sizes) - 1, least=0)
        entries[place][name] = _entry(row, file_bytes[place])
    for path, num_bytes in sizes.items():
        require_gguf(path)
        with open_regular(path) as file:
            if os.fstat(file.fileno()).st_size != num_bytes:
                raise ModelError(f"{path.name} has changed since its folder was made: start again", folder=str(folder))
    parts = [GgufPart(path, found) for path, found in zip(sizes, entries, strict=True)]
    return {name: part for part in parts for name in part.entries}


def quantized(kind: BlockType, stored: Bytes) -> Quantized:
    """Decodes uint8 [rows, bytes of a row] of a type with codes."""
    found, zero = unpack(kind, stored), _ZEROS.get(kind.name, 0)
    bits = 4 if kind.codebook else int(kind.name[1])
    codes = torch.from_numpy(_places(kind.codebook, found.codes) if kind.codebook else found.codes)
    codes = codes if bits == 8 else (codes + zero).view(torch.uint8)
    coded = partial(
        Quantized, codes=codes, bits=bits, group=found.group, block=kind.numbers, zero=zero, codebook=kind.codebook
    )
    if kind.codebook is Codebook.E2M1:
        return coded(scales=torch.from_numpy(found.scale).bfloat16())
    if found.group == kind.numbers:  # one level of scales
        return coded(scales=_half(found.scale), offsets=None if found.offset is None else _half(found.offset))
    halves = [_read_half(kind, stored, at) for at in kind.halves]
    scaled = partial(coded, scales=_half(halves[0]), scale_factors=_factors(found.scale, halves[0]))
    if found.offset is None:
        return scaled()
    return scaled(offsets=_half(-halves[1]), offset_factors=_factors(found.offset, -halves[1]))


def _places(codebook: Codebook, numbers: NDArray[np.int8]) -> NDArray[np.int8]:
    """Finds the codes of numbers."""
    codes = np.zeros(256, np.int8)
    codes[np.array(codebook.value, np.int8).view(np.uint8)] = np.arange(len(codebook.value))
    return codes[numbers.view(np.uint8)]


def _half(values: Floats) -> torch.Tensor:
    return torch.from_numpy(values.astype(np.float16))


def _read_half(kind: BlockType, stored: Bytes, at: int) -> Floats:
    """Reads the half-precision number at a byte of each block, [rows, blocks]."""
    blocks = stored.reshape(len(stored), -1, kind.bytes)
    return np.ascontiguousarray(blocks[:, :, at : at + 2]).view(np.float16)[..., 0].astype(np.float32)


def _factors(of_groups: Floats, of_blocks: Floats) -> torch.Tensor:
    """Divides group scales by their block's scale; quotients are whole numbers, for the products were exact."""
    groups = of_groups.reshape(*of_blocks.shape, -1)
    with np.errstate(divide="ignore", invalid="ignore"):
        factors: NDArray[np.float32] = groups / of_blocks[..., None]
    return torch.from_numpy(np.nan_to_num(factors).reshape(of_groups.shape).astype(np.int8))
