"""The instructions that widen codes, one by one over all codes, against a cast by torch."""

import re
from collections.abc import Callable

import pytest
import torch

from kernels.attention.widening import FP8, INT8

MASK = 0xFFFFFFFF


def widen(asm: str, codes: list[int]) -> list[float]:
    """Runs the instructions on a word of four codes; returns the four numbers of two words of bfloat16."""
    values = {"$2": int.from_bytes(bytes(codes), "little")}
    for name, operands in re.findall(r"^\s*([a-z]\S*) (.*);$", asm, re.MULTILINE):
        to, *given = (one.strip() for one in operands.split(","))
        read = [values[one] if one in values else int(one, 0) for one in given]
        values[to] = OPERATIONS[name](*read)
    return [number for word in ("$0", "$1") for number in numbers_of(values[word])]


def permute(first: int, second: int, selector: int) -> int:
    """Picks four of eight bytes, the lowest digit of the selector first."""
    source = (first | second << 32).to_bytes(8, "little")
    return int.from_bytes(bytes(source[selector >> 4 * place & 7] for place in range(4)), "little")


def multiply_and_add(first: int, second: int, third: int) -> int:
    """Computes first * second + third of pairs in bfloat16, rounded once."""
    left, right, added = (torch.tensor(numbers_of(one), dtype=torch.float64) for one in (first, second, third))
    low, high = map(int, (left * right + added).bfloat16().view(torch.int16))
    return low & 0xFFFF | (high & 0xFFFF) << 16


def numbers_of(word: int) -> list[float]:
    pair = torch.tensor([word & 0xFFFF, word >> 16], dtype=torch.int32).short().view(torch.bfloat16)
    numbers: list[float] = pair.tolist()
    return numbers


OPERATIONS: dict[str, Callable[..., int]] = {
    "and.b32": lambda first, second: first & second,
    "or.b32": lambda first, second: first | second,
    "shl.b32": lambda word, places: word << places & MASK,
    "shr.b32": lambda word, places: word >> places,
    "mov.b32": lambda word: word,
    "prmt.b32": permute,
    "fma.rn.bf16x2": multiply_and_add,
}


@pytest.mark.parametrize(("asm", "dtype"), [(INT8.value, torch.int8), (FP8.value, torch.float8_e4m3fn)])
def test_each_code_is_widened_to_the_number_of_a_cast(asm: str, dtype: torch.dtype) -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    expected = codes.view(dtype).bfloat16()
    widened = torch.tensor([widen(asm, word) for word in codes.view(-1, 4).tolist()]).flatten().bfloat16()
    is_number = expected.isfinite()
    assert is_number.sum() == (256 if dtype is torch.int8 else 254)
    assert torch.equal(widened[is_number].view(torch.int16), expected[is_number].view(torch.int16))


def test_each_result_is_of_the_code_at_its_place() -> None:
    assert widen(INT8.value, [1, 2, 253, 4]) == [1.0, 2.0, -3.0, 4.0]
