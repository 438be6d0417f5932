"""Every kernel compiles for the GPU it was written for, on a machine that has none."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.pairs import RUNS_ALL

ROOT = Path(__file__).parents[2]
COMPILATION_S = 400
"""On a busy machine; 20 on a quiet one."""
pytestmark = pytest.mark.timeout(COMPILATION_S)
SHARED_BYTES_PER_PROGRAM = 227 * 1024
DTYPES = (("bf16", 128), ("fp16", 80), *([("fp32", 128)] if RUNS_ALL else []))
"""Float32 is for tests, and its prompts take longest to compile."""
ATTENTION = [
    f"{role}{what}"
    for role in ("decode", "prefill")
    for what in ("", " with sinks and a cap", " over int8", " over int4")
]
ROWS = ["normalize", "gate_rows", "rotate_and_write_heads", "rotate_and_write_heads of int8"]
ALL = {(kernel, *case) for kernel in ("close_block", *ROWS, *ATTENTION, "merge_splits") for case in DTYPES}
Compiled = list[dict[str, Any]]


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Compiled:
    script = Path(__file__).with_name("compile_for_sm90.py")
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    env |= {"PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "error::UserWarning"}
    env |= {"TRITON_CACHE_DIR": str(tmp_path_factory.mktemp("triton"))}
    command = [sys.executable, str(script), *(f"{dtype}:{head_dim}" for dtype, head_dim in DTYPES)]
    done = subprocess.run(
        command, env=env, cwd=ROOT, capture_output=True, text=True, timeout=COMPILATION_S, check=False
    )
    assert done.returncode == 0, done.stderr
    kernels: Compiled = json.loads(done.stdout)
    return kernels


def test_all_kernels_compile_for_sm90(compiled: Compiled) -> None:
    assert {(one["kernel"], one["dtype"], one["head_dim"]) for one in compiled} == ALL
    assert all(".target sm_90" in one["ptx"] and one["cubin_bytes"] > 0 for one in compiled)


def test_each_program_fits_its_processor(compiled: Compiled) -> None:
    assert max(one["shared_bytes"] for one in compiled) <= SHARED_BYTES_PER_PROGRAM


def test_kv_is_moved_16_bytes_at_a_time(compiled: Compiled) -> None:
    attention = [one["ptx"] for one in compiled if one["kernel"] in ("decode", "prefill")]
    assert all("cp.async.cg.shared.global [" in ptx and ", 0x10" in ptx for ptx in attention)


def test_half_precision_uses_the_tensor_cores(compiled: Compiled) -> None:
    attention = {(one["kernel"], one["dtype"]): one["ptx"] for one in compiled}
    for dtype in ("bf16", "fp16"):
        assert "mma.sync" in attention["decode", dtype]
        assert "wgmma.mma_async" in attention["prefill", dtype]


def test_no_register_is_spilled_but_in_float32_and_by_decoding_over_int8(compiled: Compiled) -> None:
    """Float32 is for tests; over int8, a shape of programs that spills a few was the fastest on a device."""
    stacks = {(one["kernel"], one["dtype"]): one["stack"] for one in compiled if one["dtype"] != "fp32"}
    spilled = {kernel: stack for kernel, stack in stacks.items() if stack}
    assert {kernel for kernel, _ in spilled} <= {"decode over int8"}, spilled
    assert max(spilled.values(), default=0) <= 256, spilled
