"""Every kernel compiles at the size of a launch for GPUs that this machine has not, and fits them."""

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from kernels.tiles import EXACT, GROUPS, ORDERED, PRODUCTS, WIDENED, read_table
from tests.pairs import RUNS_ALL, covering

ROOT = Path(__file__).parents[2]
COMPILATION_S = 3000 if RUNS_ALL else 600
"""On a busy machine."""
pytestmark = pytest.mark.timeout(COMPILATION_S)
DTYPES = {"float32": "fp32"}
"""By kind; bf16 of others."""
ROWS = {
    *("close_block", "normalize", "gate_rows", "merge_splits", "find_likeliest"),
    *("rotate_and_write_heads", "rotate_and_write_heads of int8", "widen_rows", "add_splits"),
    *("multiply_by_expert", "combine_rows", "sum_pieces"),
}
WANTED_PROGRAMS = {"decode": 2, "prompts": 1}
"""At once on a processor: decoding waits for memory, and a second program loads meanwhile."""
WANTED_PRODUCTS = {"few": 2, "some": 1, "more": 1, "many": 1, "most": 1}
"""Likewise."""
MOST_INSTRUCTIONS = {"Q4_K": 7.5, "Q6_K": 9.8, "Q8_0": 9.0, "MXFP4": 9.6}
"""For each weight of a thread, in the loop of few rows on an H100: no operation moves a code of 4 bits."""
MAY_SPILL = {"ordered most 1": 128, "ordered most 2": 128, "products many Q6_K": 32, "ordered some 1 SILU": 64}
MAY_SPILL |= {"products some Q4_K": 256, "products some MXFP4": 128, "products many MXFP4": 16}
"""Bytes that rows of sm_90 may spill, of tiles which an H200 has timed as the quickest."""
FORMATS_OF_BITS = {"4": 2, "5": 1, "6": 1, "8": 2}
Compiled = list[dict[str, Any]]


@dataclass(frozen=True)
class Processor:
    """The registers and the shared memory of a multiprocessor, and what one program may have of them.

    lanes: of a warp. reserved_bytes: of shared memory, by the driver for each program.
    """

    registers: int
    shared_bytes: int
    program_bytes: int
    lanes: int = 32
    reserved_bytes: int = 1024

    def holds(self, one: dict[str, Any], num_programs: int) -> bool:
        """Tells whether so many programs of a kernel fit at once."""
        registers = num_programs * one["registers"] * one["num_warps"] * self.lanes
        shared_bytes = num_programs * (one["shared_bytes"] + self.reserved_bytes)
        return bool(
            one["shared_bytes"] <= self.program_bytes
            and registers <= self.registers
            and shared_bytes <= self.shared_bytes
        )


PROCESSORS = {
    "sm_80": Processor(1 << 16, 100 << 10, 99 << 10),  # sm_86 and sm_89 have as much, and the A100 more
    "sm_90": Processor(1 << 16, 228 << 10, 227 << 10),
    "sm_100": Processor(1 << 16, 228 << 10, 227 << 10),
    "gfx942": Processor(1 << 17, 64 << 10, 64 << 10, 64, 0),
}
ROWS_OF_TABLE = [
    (architecture, role, kind, head_dim)
    for architecture, roles in read_table().items()
    for role, kinds in roles.items()
    if role not in (EXACT, WIDENED, GROUPS)  # test_hopper.py compiles the last one
    for kind, heads in kinds.items()
    for head_dim in heads
]


def chosen_cases() -> list[str]:
    """Lists rows of the table in bfloat16 with heads of 128: each kernel for each architecture, and each kind once.

    Products have pairs of architecture, number of rows, and bits or splits. With --all, each row with all heads.
    """
    few = [one for one in ROWS_OF_TABLE if one[3] == "128" and one[2] != "float32"]
    chosen = [few[place] for place in covering([(one[:2], one[2]) for one in few], strength=1)]
    for role in (PRODUCTS, ORDERED):
        products = [one for one in ROWS_OF_TABLE if one[1] == role and one[2] != "float32"]
        chosen += [products[place] for place in covering([(one[0], *one[2:]) for one in products])]
    if RUNS_ALL:
        chosen = [*ROWS_OF_TABLE, *((*one[:3], "64") for one in few)]
    return [":".join((*one, DTYPES.get(one[2], "bf16"))) for one in chosen]


COUNTED = [f"sm_90:{PRODUCTS}:few:{bits}:bf16" for bits in (4, 6, 8)]
CASES = chosen_cases()
CASES += [one for one in COUNTED if one not in CASES]
OTHERS = [f"{one}:rows:all:128:bf16" for one in (PROCESSORS if RUNS_ALL else ["sm_90"])]


def compile_cases(cases: list[str], cache: Path) -> Compiled:
    script = Path(__file__).with_name("compile_for.py")
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    env |= {"PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "error::UserWarning", "TRITON_CACHE_DIR": str(cache)}
    command = [sys.executable, str(script), *cases]
    done = subprocess.run(
        command, env=env, cwd=ROOT, capture_output=True, text=True, timeout=COMPILATION_S, check=False
    )
    assert done.returncode == 0, done.stderr
    kernels: Compiled = json.loads(done.stdout)
    return kernels


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Compiled:
    return compile_cases([*CASES, *OTHERS], tmp_path_factory.mktemp("triton"))


@pytest.fixture(scope="module")
def tiled(compiled: Compiled) -> Compiled:
    """All attention and products but in float32, which is for tests."""
    chosen = [one for one in compiled if one["kernel"] not in ROWS and one["dtype"] != "fp32"]
    assert {one["architecture"] for one in chosen} == set(PROCESSORS)
    return chosen


def test_all_kernels_compile(compiled: Compiled) -> None:
    assert {one["kernel"] for one in compiled} >= ROWS
    cases = [case.split(":") for case in CASES if f":{PRODUCTS}:" in case]
    further = [FORMATS_OF_BITS[bits] - (kind != "few" or bits != "4") for _, _, kind, bits, _ in cases]
    num_gated = sum(f":{ORDERED}:" in case and ":1:" in case for case in CASES)
    assert len(compiled) == len(CASES) + sum(further) + num_gated + len(ROWS) * len(OTHERS)


def test_no_register_is_spilled(tiled: Compiled) -> None:
    allowed = {("sm_90", kernel): num_bytes for kernel, num_bytes in MAY_SPILL.items()}
    assert [one for one in tiled if one["spilled"] > allowed.get((one["architecture"], one["kernel"]), 0)] == []


def test_programs_fit_their_processor_as_often_as_wanted(tiled: Compiled) -> None:
    def fits(one: dict[str, Any]) -> bool:
        role, kind, *_ = one["kernel"].split()
        wanted = WANTED_PRODUCTS[kind] if role in (PRODUCTS, ORDERED) else WANTED_PROGRAMS[role]
        return PROCESSORS[one["architecture"]].holds(one, wanted)

    assert [one for one in tiled if not fits(one)] == []


def test_products_are_matrix_instructions(tiled: Compiled) -> None:
    assert [one for one in tiled if not one["matrix_instructions"]] == []


@pytest.mark.parametrize("role", [PRODUCTS, ORDERED])
def test_products_of_few_rows_and_of_many_have_one_matrix_instruction(tiled: Compiled, role: str) -> None:
    """Else a row's bits could follow from the rows beside it."""
    instructions: dict[str, set[str]] = {one: set() for one in PROCESSORS}
    depths: dict[str, set[str]] = {one: set() for one in PROCESSORS}
    for one in tiled:
        if one["kernel"].startswith(role):
            instructions[one["architecture"]].update(one["matrix_instructions"])
            depths[one["architecture"]].update(one["instruction_depths"])
    assert [len(one) for one in instructions.values()] == [1] * len(PROCESSORS), instructions
    assert [depths[one] for one in ("sm_80", "sm_90")] == [{"16"}, {"16"}]


def test_kernels_of_dependent_launches_wait_before_they_touch_memory(compiled: Compiled) -> None:
    """Checksums and products of packed weights have ordinary launches."""
    waiting = {(one["architecture"], one["kernel"]) for one in compiled if one["waits_first"]}
    launched = {(one["architecture"], one["kernel"]) for one in compiled if one["architecture"] == "sm_90"}
    assert waiting == {one for one in launched if not one[1].startswith(("sum_pieces", PRODUCTS))}


def test_a_weight_is_widened_by_few_instructions(tiled: Compiled) -> None:
    found = {one["kernel"]: one["instructions_per_weight"] for one in tiled if one["architecture"] == "sm_90"}
    counted = {form: found[f"{PRODUCTS} few {form}"] for form in MOST_INSTRUCTIONS}
    assert {form: one for form, one in counted.items() if one > MOST_INSTRUCTIONS[form]} == {}, counted


def test_kv_and_codes_are_loaded_16_bytes_at_a_time(tiled: Compiled) -> None:
    assert [one for one in tiled if not one["has_wide_loads"]] == []


def test_a_tile_that_is_too_large_is_found() -> None:
    large = {"registers": 255, "num_warps": 8, "shared_bytes": 128 << 10}
    assert not PROCESSORS["sm_80"].holds(large, 1)
    assert PROCESSORS["sm_90"].holds(large, 1)
    assert not PROCESSORS["sm_90"].holds(large, 2)
