"""The one command for a machine with a GPU, which has torch, Triton, pytest and hypothesis, and little else."""

import os
import subprocess
import sys
from pathlib import Path

from benchmarks.gpu import PYTEST, ROOT, TESTS

ABSENT = ("ray", "redis", "cryptography")


def test_its_tests_load_without_ray_redis_and_cryptography(tmp_path: Path) -> None:
    for name in ABSENT:
        (tmp_path / f"{name}.py").write_text(f"raise ModuleNotFoundError('no {name} here')\n")
    command = [sys.executable, "-m", "pytest", *PYTEST, "--collect-only", *TESTS]
    env = os.environ | {"PYTHONPATH": str(tmp_path)}
    collected = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=100, check=False)
    assert collected.returncode == 0, collected.stdout + collected.stderr
    assert "tests/kernels/test_paged_decode.py" in collected.stdout
