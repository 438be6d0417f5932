"""Every kernel compiles for the GPU it was written for, on a machine that has none."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
SHARED_BYTES_PER_PROGRAM = 227 * 1024
ATTENTION = [f"attend_split{what}" for what in ("", " with sinks and a cap", " over int8", " over int4")]
ALL = {
    (kernel, dtype, head_dim)
    for kernel in ("write_token", "close_block", *ATTENTION, "merge_splits")
    for dtype, head_dim in (("bf16", 128), ("fp16", 80), ("fp32", 128))
}
Compiled = list[dict[str, Any]]


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Compiled:
    script = Path(__file__).with_name("compile_for_sm90.py")
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    env |= {"PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "error::UserWarning"}
    env |= {"TRITON_CACHE_DIR": str(tmp_path_factory.mktemp("triton"))}
    command = [sys.executable, str(script)]
    done = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
    kernels: Compiled = json.loads(done.stdout)
    return kernels


def test_all_kernels_compile_for_sm90(compiled: Compiled) -> None:
    assert {(one["kernel"], one["dtype"], one["head_dim"]) for one in compiled} == ALL
    assert all(".target sm_90" in one["ptx"] and one["cubin_bytes"] > 0 for one in compiled)


def test_each_program_fits_its_processor(compiled: Compiled) -> None:
    assert max(one["shared_bytes"] for one in compiled) <= SHARED_BYTES_PER_PROGRAM


def test_kv_is_moved_16_bytes_at_a_time(compiled: Compiled) -> None:
    attention = [one["ptx"] for one in compiled if one["kernel"] == "attend_split"]
    assert all("cp.async.cg.shared.global [" in ptx and ", 0x10" in ptx for ptx in attention)
    writes = [one["ptx"] for one in compiled if one["kernel"] == "write_token"]
    assert all("st.global.v4.b32" in ptx for ptx in writes)


def test_half_precision_uses_the_tensor_cores(compiled: Compiled) -> None:
    attention = {one["dtype"]: one["ptx"] for one in compiled if one["kernel"] == "attend_split"}
    assert "mma.sync" in attention["bf16"]
    assert "mma.sync" in attention["fp16"]
