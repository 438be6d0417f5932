"""The one command for a machine with a GPU, which has torch, Triton, pytest and hypothesis, and little else."""

import os
import subprocess
import sys
from pathlib import Path

from benchmarks.gpu import PYTEST, ROOT

ABSENT = ("ray", "redis")


def test_its_tests_load_without_ray_and_redis(tmp_path: Path) -> None:
    for name in ABSENT:
        (tmp_path / f"{name}.py").write_text(f"raise ModuleNotFoundError('no {name} here')\n")
    command = [sys.executable, "-m", "pytest", *PYTEST, "--collect-only", "tests/gpu", "tests/kernels"]
    env = os.environ | {"PYTHONPATH": str(tmp_path)}
    collected = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=100, check=False)
    assert collected.returncode == 0, collected.stdout + collected.stderr
    assert "tests/kernels/test_paged_decode.py" in collected.stdout
