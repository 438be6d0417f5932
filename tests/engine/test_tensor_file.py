"""Malformed .safetensors files are refused; well-formed ones read as the safetensors library reads them."""

import json
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save, save_file

from engine.checkpoint.tensor_file import TensorFile
from wire.errors import ModelError

TENSORS = {
    "float32": torch.arange(6, dtype=torch.float32).view(2, 3),
    "bfloat16": torch.full((3,), 1.5, dtype=torch.bfloat16),
    "float16": torch.full((2, 1, 2), -0.5, dtype=torch.float16),
    "int64": torch.tensor([1 << 40]),
    "bool": torch.tensor([True, False]),
    "scalar": torch.tensor(7.0),
    "empty": torch.empty(0, 4),
}
VALID = save({"a": torch.ones(4), "b": torch.zeros(2, 3, dtype=torch.bfloat16)}, metadata={"format": "pt"})
A = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
B = {"dtype": "F32", "shape": [2], "data_offsets": [8, 16]}


def written(tmp_path: Path, data: bytes) -> Path:
    path = tmp_path / "model.safetensors"
    path.write_bytes(data)
    return path


def framed(header: str, data: bytes = bytes(16)) -> bytes:
    return struct.pack("<Q", len(header)) + header.encode() + data


def described(**tensors: Any) -> bytes:
    return framed(json.dumps(tensors))


def test_reads_what_the_library_wrote(tmp_path: Path) -> None:
    save_file(TENSORS, tmp_path / "model.safetensors", metadata={"format": "pt"})
    file = TensorFile(tmp_path / "model.safetensors")
    assert file.entries.keys() == TENSORS.keys()
    for name, tensor in TENSORS.items():
        read = file.read(name)
        assert read.dtype == tensor.dtype
        assert torch.equal(read, tensor)


def test_follows_links_as_in_a_hub_snapshot(tmp_path: Path) -> None:
    (tmp_path / "blob").write_bytes(VALID)
    (tmp_path / "model.safetensors").symlink_to("blob")
    assert torch.equal(TensorFile(tmp_path / "model.safetensors").read("a"), torch.ones(4))


REFUSED: dict[str, tuple[bytes, str]] = {
    "nothing": (b"", "a header of 0 bytes"),
    "half a length": (VALID[:5], "a header of"),
    "no header": (struct.pack("<Q", 0) + bytes(16), "a header of 0 bytes"),
    "a header above 25 MB": (struct.pack("<Q", 25_000_001) + bytes(25_000_010), "a header of 25000001 bytes"),
    "a header beyond the file": (struct.pack("<Q", 1 << 60) + b"{}", "in a file of 10"),
    "a header cut short": (VALID[:40], "in a file of 40"),
    "no JSON": (framed('{"a"'), "not valid JSON"),
    "no UTF-8": (struct.pack("<Q", 4) + b'{"\xff"', "not valid JSON"),
    "a list": (framed("[]"), "not a JSON object"),
    "leading space": (framed(" {}", b""), "not a JSON object"),
    "nested without end": (framed('{"a":' * 100_000), "not valid JSON"),
    "a name twice": (framed(described(a=A, b=B)[8:-16].decode().replace('"b"', '"a"')), "not valid JSON"),
    "no object": (described(a=[1]), "not described"),
    "no shape": (described(a={"dtype": "F32", "data_offsets": [0, 16]}), "not described"),
    "one offset": (described(a=A | {"data_offsets": [0]}, b=B), "not described"),
    "an unknown key": (described(a=A | {"stride": [1]}, b=B), "not described"),
    "an unknown dtype": (described(a=A | {"dtype": "F31"}, b=B), "unknown dtype F31"),
    "a negative size": (described(a=A | {"shape": [-2]}, b=B), "whole number"),
    "two negative sizes": (described(a=A | {"shape": [-1, -2]}, b=B), "whole number"),
    "a negative offset": (described(a=A | {"data_offsets": [-8, 0]}, b=B), "whole number"),
    "a fraction": (described(a=A | {"shape": [2.0]}, b=B), "whole number"),
    "true": (described(a=A | {"shape": [2, True]}, b=B), "whole number"),
    "a shape that overflows": (described(a=A | {"shape": [1 << 62, 1 << 62]}, b=B), "does not fit"),
    "a shape that wraps to its size": (described(a=A | {"shape": [(1 << 62) + 2]}, b=B), "does not fit"),
    "offsets in reverse": (described(a=A | {"shape": [], "data_offsets": [8, 4]}, b=B), "does not fit"),
    "an overlap": (described(a=A, b=B | {"data_offsets": [4, 12]}), "gap or overlap"),
    "a gap": (described(a=A), "gap or overlap"),
    "a gap at the start": (described(b=B), "gap or overlap"),
    "more than the file": (framed(json.dumps({"a": A, "b": B}), bytes(15)), "gap or overlap"),
    "less than the file": (framed(json.dumps({"a": A, "b": B}), bytes(17)), "gap or overlap"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_malformed_files_are_refused(tmp_path: Path, case: str) -> None:
    data, message = REFUSED[case]
    with pytest.raises(ModelError, match=message):
        TensorFile(written(tmp_path, data))


def test_a_file_that_is_cut_after_it_was_opened_is_an_error(tmp_path: Path) -> None:
    file = TensorFile(written(tmp_path, VALID))
    file.path.write_bytes(VALID[:-1])
    with pytest.raises(ModelError, match="ended while b was being read"):
        file.read("b")


mutated_in_tmp_path = settings(
    max_examples=150, deadline=None, database=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


@mutated_in_tmp_path
@given(st.integers(0, len(VALID) - 1), st.integers(1, 255))
def test_a_changed_byte_is_refused_or_harmless(tmp_path: Path, position: int, change: int) -> None:
    data = bytearray(VALID)
    data[position] ^= change
    reads_or_refuses(tmp_path, bytes(data))


@mutated_in_tmp_path
@given(st.integers(0, len(VALID) - 1))
def test_a_cut_file_is_refused(tmp_path: Path, length: int) -> None:
    with pytest.raises(ModelError):
        TensorFile(written(tmp_path, VALID[:length]))


@mutated_in_tmp_path
@given(st.recursive(st.none() | st.integers() | st.text(max_size=5), lambda inner: st.lists(inner, max_size=3)))
def test_any_description_is_refused_or_harmless(tmp_path: Path, value: Any) -> None:
    for key in A:
        reads_or_refuses(tmp_path, described(a=A | {key: value}, b=B))


def reads_or_refuses(tmp_path: Path, data: bytes) -> None:
    """No other error than ModelError, and no tensor larger than the file."""
    try:
        file = TensorFile(written(tmp_path, data))
    except ModelError:
        return
    assert sum(file.read(name).nbytes for name in file.entries) <= len(data)
