"""Products whose codes are scaled after them, interpreted where there is no GPU."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.gpu_codes import CodesTile, chunks_per_split, multiply_part, write_read
from kernels.quantized import products
from kernels.quantized.device_layout import CodedWeight
from kernels.triton_backend import TritonBackend
from tests.kernels.interpreter import bfloat16_as_on_a_gpu
from tests.kernels.quantized_matrices import DRAWS

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
NAMES = ("Q4_0", "Q4_1", "Q4_K", "Q6_K", "Q8_0", "W8A16 of channels", "W4A16 of groups", "W4A16 with zero points")
ROOT = Path(__file__).parents[2]
COMPILATION_S = 300
MOST_INSTRUCTIONS = {"Q4_K": 4.5, "Q6_K": 6.0, "Q8_0": 4.5}
MAY_SPILL = 64
WORDS = (0x0000, 0xFFFF, 0x1234, 0xA5F0, 0x8041, 0x7EB9)


@pytest.fixture(autouse=True, scope="module")
def bfloat16() -> Iterator[None]:
    with bfloat16_as_on_a_gpu():
        yield


def draw(name: str, columns: int, depth: int) -> tuple[CodedWeight, torch.Tensor]:
    """Draws a weight, and its numbers before they are rounded to the dtype of the file or of rows."""
    torch.manual_seed(0)
    matrix = DRAWS[name](columns, depth).to(DEVICE)
    weight = TritonBackend().pack_codes([matrix], torch.bfloat16)
    assert isinstance(weight, CodedWeight)
    return weight, replace(matrix, source=torch.float32).dequantize().double()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("num_rows", "rows", "num_programs"), [(3, 16, 1), (19, 16, 64), (5, 8, 2)])
def test_no_weight_is_rounded(name: str, num_rows: int, rows: int, num_programs: int) -> None:
    weight, widened = draw(name, 40, 600)
    [part] = weight.parts
    tile = CodesTile(rows, 32, 1, 3, num_programs)
    num_splits = -(-part.num_chunks // chunks_per_split(part, tile))
    assert (num_splits > 1) == (num_programs == 64)
    states = torch.randn(num_rows, 600, device=DEVICE).bfloat16()
    bias, residual = (torch.randn(one, 40, device=DEVICE) for one in (1, num_rows))
    out, counters = (
        torch.full((num_rows, 40), torch.nan, device=DEVICE),
        torch.zeros(8, dtype=torch.int32, device=DEVICE),
    )
    for _ in range(2):
        multiply_part(states, part, tile, counters, bias[0], residual, out)
        expected = states.double() @ widened.T + bias.double() + residual.double()
        magnitudes = states.double().abs() @ widened.abs().T + bias.double().abs() + residual.double().abs()
        assert ((out.double() - expected).abs() <= 1e-5 * magnitudes).all()
        assert not counters.any()


@pytest.mark.parametrize("name", ["Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "FP8 of blocks"])
def test_weights_that_are_widened_a_plane_at_a_time(name: str) -> None:
    [part] = draw(name, 40, 600)[0].parts
    states, counters = torch.randn(5, 600, device=DEVICE).bfloat16(), torch.zeros(8, dtype=torch.int32, device=DEVICE)
    out, expected = torch.empty(2, 5, 40, device=DEVICE)
    multiply_part(states, part, CodesTile(16, 32, 1, 3, 64, is_widened=True), counters, None, None, out)
    products.multiply_part(states, part, None, None, expected)
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-3)


def emulate(text: str, words: int, rests: int) -> int:
    """Runs assembly of a pair: registers of 32 bits, and pairs of bfloat16."""
    found = {"$1": words, "$2": rests}

    def value(name: str) -> int:
        return found[name] if name in found else int(name, 0)

    def both(one: int) -> torch.Tensor:
        return torch.tensor([one & 0xFFFF, one >> 16]).to(torch.uint16).view(torch.bfloat16).float()

    for line in re.findall(r"\b((?:shr|shl|prmt|lop3|mov|fma)\.[^;]*);", text):
        name, _, rest = line.partition(" ")
        target, *sources = (one.strip() for one in rest.split(","))
        given = [value(one) for one in sources]
        if name == "shr.b32":
            result = given[0] >> given[1]
        elif name == "shl.b32":
            result = given[0] << given[1] & 0xFFFFFFFF
        elif name == "prmt.b32":
            octets = (given[1] << 32 | given[0]).to_bytes(8, "little")
            result = int.from_bytes(bytes(octets[given[2] >> 4 * one & 7] for one in range(4)), "little")
        elif name == "lop3.b32":
            assert given[3] == 0xEA, "the first and the second, or the third"
            result = given[0] & given[1] | given[2]
        elif name == "mov.b32":
            result = given[0]
        else:
            assert name == "fma.rn.bf16x2"
            low, high = (both(given[0]) * both(given[1]) + both(given[2])).bfloat16().view(torch.uint16).tolist()
            result = low | high << 16
        found[target] = result
    return found["$0"]


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    env |= {"PYTHONPATH": str(ROOT), "TRITON_CACHE_DIR": str(tmp_path_factory.mktemp("triton"))}
    command = [sys.executable, "-m", "tests.benchmarks.codes_code"]
    done = subprocess.run(
        command, env=env, cwd=ROOT, capture_output=True, text=True, timeout=COMPILATION_S, check=False
    )
    assert done.returncode == 0, done.stderr
    tiles: dict[str, dict[str, Any]] = json.loads(done.stdout)
    return tiles


@pytest.mark.timeout(COMPILATION_S)
def test_a_weight_costs_few_instructions_and_nothing_is_spilled(compiled: dict[str, dict[str, Any]]) -> None:
    """Of scaled products of up to 16 rows on an H100; a conversion of codes through shared memory would show."""
    for tile, one in compiled.items():
        assert one["spilled"] <= MAY_SPILL, tile
        form, _, numbers = tile.partition(" ")
        if "True" not in numbers and not numbers.startswith("(32"):
            assert one["instructions_per_weight"] <= MOST_INSTRUCTIONS[form], tile


@pytest.mark.parametrize("name", ["Q4_0", "Q4_K", "Q6_K", "Q8_0"])
def test_assembly_reads_codes_exactly(name: str) -> None:
    """The interpreter runs none of it."""
    form = draw(name, 1, 512)[0].parts[0].format
    for plane in range(2 if form.bits == 8 else 4):
        text = write_read(form, plane)
        for first, second, rests in zip(WORDS, WORDS[::-1], WORDS[2:] + WORDS[:2], strict=True):
            pair = emulate(text, first | second << 16, rests * 0x10001)
            numbers = torch.tensor([pair & 0xFFFF, pair >> 16]).to(torch.uint16).view(torch.bfloat16)
            expected = []
            for word, byte in ((first, rests & 255), (second, rests >> 8)):
                if form.bits == 8:
                    code = (word >> 8 * plane & 255 ^ 128) - 128
                else:
                    code = word >> 4 * plane & 15
                    code |= (byte >> 2 * plane & 3) << 4 if form.bits == 6 else 0
                    code += 128 if form.has_offsets else -form.zero
                expected.append(float(code))
            assert numbers.tolist() == expected
