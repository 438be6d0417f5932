"""Triton's interpreter with bfloat16 as a GPU has it.

The interpreter keeps bfloat16 as bit patterns: it multiplies the patterns of matrices, takes integers for patterns, and
cuts float32 where a GPU rounds to the nearest.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
import torch
import triton.language as tl
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

own_cast, own_dot = InterpreterBuilder.cast_impl, InterpreterBuilder.create_dot


def widened(handle: TensorHandle) -> TensorHandle:
    """Makes float32 of bfloat16, whose bits are the upper half of it; others are given back as they are."""
    if handle.dtype.scalar != tl.bfloat16:
        return handle
    return TensorHandle((handle.data.astype(np.uint32) << 16).view(np.float32), tl.float32)


def rounded(handle: TensorHandle) -> TensorHandle:
    """Rounds float32 to bfloat16."""
    numbers = torch.from_numpy(np.array(handle.data, np.float32))
    return TensorHandle(numbers.bfloat16().view(torch.int16).numpy().view(np.uint16), tl.bfloat16)


def cast(builder: InterpreterBuilder, source: TensorHandle, wanted: tl.dtype) -> TensorHandle:
    source = widened(source)
    if wanted.scalar == tl.bfloat16:
        return rounded(own_cast(builder, source, tl.float32))
    return own_cast(builder, source, wanted)


def dot(builder: InterpreterBuilder, first: TensorHandle, second: TensorHandle, *others: object) -> TensorHandle:
    return own_dot(builder, widened(first), widened(second), *others)


@contextmanager
def bfloat16_as_on_a_gpu() -> Iterator[None]:
    """Converts operands of the interpreter's products to float32, and rounds its results."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(InterpreterBuilder, "create_dot", dot)
        patch.setattr(InterpreterBuilder, "cast_impl", cast)
        yield
