"""Triton's interpreter with bfloat16 as a GPU has it.

The interpreter keeps bfloat16 as bit patterns: it multiplies the patterns of matrices, takes integers for patterns, and
cuts float32 where a GPU rounds to the nearest. Its float8 forgets the carry of a mantissa that is rounded up.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
import torch
import triton.language as tl
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

own_cast, own_dot = InterpreterBuilder.cast_impl, InterpreterBuilder.create_dot
own_float_cast = InterpreterBuilder.create_fp_to_fp


def widened(handle: TensorHandle) -> TensorHandle:
    """Makes float32 of bfloat16, whose bits are the upper half of it; others are given back as they are."""
    if handle.dtype.scalar != tl.bfloat16:
        return handle
    return TensorHandle((handle.data.astype(np.uint32) << 16).view(np.float32), tl.float32)


def rounded(handle: TensorHandle, wanted: tl.dtype) -> TensorHandle:
    """Rounds float32 as torch does."""
    numbers = torch.from_numpy(np.array(handle.data, np.float32))
    if wanted == tl.bfloat16:
        return TensorHandle(numbers.bfloat16().view(torch.int16).numpy().view(np.uint16), wanted)
    return TensorHandle(numbers.to(torch.float8_e4m3fn).view(torch.uint8).numpy(), wanted)


def cast(builder: InterpreterBuilder, source: TensorHandle, wanted: tl.dtype) -> TensorHandle:
    source = widened(source)
    if wanted.scalar == tl.bfloat16:
        return rounded(own_cast(builder, source, tl.float32), tl.bfloat16)
    return own_cast(builder, source, wanted)


def float_cast(builder: InterpreterBuilder, source: TensorHandle, wanted: tl.dtype, mode: object) -> TensorHandle:
    if wanted.scalar == tl.float8e4nv:
        return rounded(own_cast(builder, widened(source), tl.float32), tl.float8e4nv)
    return own_float_cast(builder, source, wanted, mode)


def dot(builder: InterpreterBuilder, first: TensorHandle, second: TensorHandle, *others: object) -> TensorHandle:
    return own_dot(builder, widened(first), widened(second), *others)


@contextmanager
def bfloat16_as_on_a_gpu() -> Iterator[None]:
    """Converts operands of the interpreter's products to float32, and rounds its results."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(InterpreterBuilder, "create_dot", dot)
        patch.setattr(InterpreterBuilder, "cast_impl", cast)
        patch.setattr(InterpreterBuilder, "create_fp_to_fp", float_cast)
        yield
