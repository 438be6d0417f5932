"""Kernels compiled in child processes: the launch finds them, and a compiler's failure names the kernel."""

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from kernels.cpu.library import NoKernels

pytest.importorskip("triton")
from engine.warm.compiling import UNWRITABLE, Compilers, Signature

ROOT = Path(__file__).parents[2]
SCRIPT = Path(__file__).with_name("compile_children.py")


@dataclass(frozen=True)
class Named(Signature):
    """A signature that no kernel has."""

    @property
    def name(self) -> str:
        return self.kernel

    @property
    def digest(self) -> str:
        return self.kernel


SIGNATURES = [Named(name, ("cuda", 90, 32), "{}") for name in ("first", "second")]


def compiled_by(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, program: str, deadline_s: float = 60) -> list[int]:
    """Compiles by a faked compiler, which gets its order on standard input; returns the reported numbers."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    done: list[int] = []
    Compilers((sys.executable, "-c", program), 2, deadline_s).compile(SIGNATURES, done.append)
    return done


def in_process_of_its_own(cache: Path) -> dict[str, Any]:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(cache), "PYTHONPATH": str(ROOT)}
    answer = subprocess.run(
        [sys.executable, SCRIPT], env=environment, capture_output=True, text=True, timeout=300, check=True
    )
    found: dict[str, Any] = json.loads(answer.stdout)
    return found


def test_a_launch_finds_what_a_child_has_compiled_and_no_child_starts_again(tmp_path: Path) -> None:
    found = in_process_of_its_own(tmp_path)
    assert found["noted"] == 1
    assert found["names"] == ["kernels.row_operations.gate_rows(COLUMNS=1024, ACTIVATION=0)"]
    assert any(name.startswith("compiled-") for name in found["compiled"])
    assert found["after"] == found["compiled"]
    assert found["late"] == 1
    assert "launcher" in found["stopped"]


def test_a_cache_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    error = in_process_of_its_own(tmp_path / "file" / "cache")["error"]
    assert "the cache of compiled kernels cannot be used" in error
    assert str(tmp_path / "file" / "cache") in error


def test_a_full_cache_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = f"import sys; sys.stderr.write('[Errno 28] No space left on device'); sys.exit({UNWRITABLE})"
    with pytest.raises(NoKernels, match=r"cache of compiled kernels cannot be used .*No space left.*XDG_CACHE_HOME"):
        compiled_by(tmp_path, monkeypatch, program)


def test_progress_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert compiled_by(tmp_path, monkeypatch, "import sys; sys.stdin.read()") == [0, 1, 2]
    (tmp_path / "compiled-first").touch()
    assert compiled_by(tmp_path, monkeypatch, "import sys; sys.stdin.read()") == [1, 2]


def test_a_compiler_that_fails_names_its_kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = "import json, sys; name, *_ = json.load(sys.stdin); sys.exit(name == 'second' and 'no registers left')"
    with pytest.raises(NoKernels, match="second cannot be compiled: no registers left"):
        compiled_by(tmp_path, monkeypatch, program)


def test_a_compiler_that_hangs_is_ended_at_its_deadline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = "import json, sys, time; name, *_ = json.load(sys.stdin); name == 'first' and time.sleep(600)"
    with pytest.raises(NoKernels, match=r"first was not compiled within 3 s"):
        compiled_by(tmp_path, monkeypatch, program, 3)
