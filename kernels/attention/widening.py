"""Codes of 8 bits widened to bfloat16 on an NVIDIA GPU: four at a time, by operations on integers and one of numbers.

Each number has the bits that a cast gives.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
import torch
import triton
import triton.language as tl
from torch import Tensor

INT8 = tl.constexpr(
    """
    {
    .reg .b32 low, sign, one, first, second, third, fourth;
    and.b32 low, $2, 0x7f7f7f7f;
    and.b32 sign, $2, 0x80808080;
    mov.b32 one, 0x3f803f80;
    prmt.b32 first, low, 0x43434343, 0x4140;
    prmt.b32 second, low, 0x43434343, 0x4342;
    prmt.b32 third, sign, 0xc3c3c3c3, 0x4140;
    prmt.b32 fourth, sign, 0xc3c3c3c3, 0x4342;
    fma.rn.bf16x2 $0, first, one, third;
    fma.rn.bf16x2 $1, second, one, fourth;
    }
    """
)
"""The seven low bits below 0x43 are 128 + them; the sign below 0xc3 is -128 or -256; their sum is the code."""
FP8 = tl.constexpr(
    """
    {
    .reg .b32 sign, size, high, low, factor, zero, first, second;
    and.b32 sign, $2, 0x80808080;
    and.b32 size, $2, 0x7f7f7f7f;
    shr.b32 high, size, 4;
    and.b32 high, high, 0x07070707;
    or.b32 high, high, sign;
    shl.b32 low, size, 4;
    and.b32 low, low, 0xf0f0f0f0;
    mov.b32 factor, 0x7b807b80;
    mov.b32 zero, 0x80008000;
    prmt.b32 first, low, high, 0x5140;
    prmt.b32 second, low, high, 0x7362;
    fma.rn.bf16x2 $0, first, factor, zero;
    fma.rn.bf16x2 $1, second, factor, zero;
    }
    """
)
"""Exponent and mantissa at their places in bfloat16 are the number times 2^-120. A code without a number becomes 480:
pages have none."""


@triton.jit
def widen(codes, DTYPE: tl.constexpr, BY_INTEGERS: tl.constexpr):
    """Converts a tile of codes to a dtype, whose numbers they are exactly; by integers to bfloat16 only.

    By integers it is not pure, so that it stays where codes are loaded, 16 bytes at a time. The compiler moves a cast
    behind the exchange through shared memory, where codes of values are then read byte by byte.
    """
    if BY_INTEGERS and codes.dtype == tl.int8:
        wide = tl.inline_asm_elementwise(INT8, "=r,=r,r", [codes], dtype=tl.bfloat16, is_pure=False, pack=4)
    elif BY_INTEGERS and codes.dtype == tl.float8e4nv:
        bits = codes.to(tl.int8, bitcast=True)
        wide = tl.inline_asm_elementwise(FP8, "=r,=r,r", [bits], dtype=tl.bfloat16, is_pure=False, pack=4)
    else:
        wide = codes.to(DTYPE)
    return wide


def widens_by_integers(query: Tensor) -> bool:
    """Tells whether codes are widened by integers for a query: in bfloat16, on an NVIDIA GPU, not interpreted."""
    return query.is_cuda and query.dtype is torch.bfloat16 and torch.version.hip is None
