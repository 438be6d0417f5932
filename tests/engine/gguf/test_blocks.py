"""Blocks of each type against the package `gguf`, bit by bit."""

import gguf
import numpy as np
import pytest
import torch

from engine.checkpoint.gguf.blocks import TYPES, unpack
from engine.checkpoint.gguf.table import dequantize
from tests.engine.gguf.files import drawn_blocks

QUANTIZED = [name for name, kind in TYPES.items() if kind.dtype is None]


@pytest.mark.parametrize("name", TYPES)
def test_values_equal_the_gguf_package_bit_by_bit(name: str) -> None:
    stored = drawn_blocks(name, 64, 768, seed=1)
    kind, theirs = TYPES[name], gguf.GGMLQuantizationType[name]
    assert gguf.GGML_QUANT_SIZES[theirs] == (kind.numbers, kind.bytes)
    expected = gguf.dequantize(stored, theirs)
    found = dequantize(kind, stored).float().numpy()
    assert found.shape == (64, 768)
    assert np.array_equal(found.view(np.uint32), expected.astype(np.float32).view(np.uint32))


@pytest.mark.parametrize("name", QUANTIZED)
def test_products_of_scale_and_code_are_exact_so_that_only_the_sum_rounds(name: str) -> None:
    codes = unpack(TYPES[name], drawn_blocks(name, 64, 768, seed=2))
    scale = codes.scale.repeat(codes.group, axis=1)
    in_double = scale.astype(np.float64) * codes.codes
    assert np.array_equal(in_double.astype(np.float32), in_double)
    if codes.offset is not None:
        in_double += codes.offset.repeat(codes.group, axis=1)
    assert np.array_equal(in_double.astype(np.float32), codes.values())


@pytest.mark.parametrize("name", QUANTIZED)
def test_each_byte_of_a_block_counts(name: str) -> None:
    kind, stored = TYPES[name], drawn_blocks(name, 1, TYPES[name].numbers, seed=3)
    plain = dequantize(kind, stored)
    for at in range(kind.bytes):
        changed = stored.copy()
        changed[0, at] ^= 1
        assert not torch.equal(dequantize(kind, changed), plain)
