"""The machine and the commit that a figure is of; on a shared machine no figure means anything without its state."""

import os
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

_NUM_BYTES = 256 << 20
_NUM_TRIALS = 3


@dataclass(frozen=True)
class MachineState:
    """Load of the last minute, cores, threads that torch is told to use, and memory bandwidth of one core in GB/s."""

    load_average: float
    num_cpus: int
    omp_num_threads: str
    read_gb_s: float
    copy_gb_s: float

    @classmethod
    def measure(cls) -> "MachineState":
        """Takes about a second and half a gigabyte. A copied byte counts once."""
        source = np.ones(_NUM_BYTES // 8, dtype=np.int64)
        target = np.ones_like(source)
        return cls(
            load_average=os.getloadavg()[0],
            num_cpus=len(os.sched_getaffinity(0)),
            omp_num_threads=os.environ.get("OMP_NUM_THREADS", "unset"),
            read_gb_s=_best_gb_s(lambda: source.sum()),
            copy_gb_s=_best_gb_s(lambda: np.copyto(target, source)),
        )

    def describe(self) -> str:
        """Formats a line to stand beside results."""
        return (
            f"load average {self.load_average:.2f}, {self.num_cpus} cores, OMP_NUM_THREADS={self.omp_num_threads}, "
            f"read {self.read_gb_s:.1f} GB/s, copy {self.copy_gb_s:.1f} GB/s"
        )


def commit() -> str:
    """Names the commit of this checkout, with "and changes" where files differ; a packed copy names it by COMMIT."""
    if named := os.environ.get("COMMIT"):
        return named
    command = ["git", "describe", "--always", "--abbrev=8", "--exclude=*", "--dirty= and changes"]
    try:
        return subprocess.check_output(command, cwd=Path(__file__).parent, text=True).strip()
    except (OSError, subprocess.CalledProcessError):
        return "not known"


def processor() -> str:
    """Names the processor as Linux knows it."""
    return _cpu_field("model name") or "unknown processor"


def has_avx512() -> bool:
    return "avx512f" in _cpu_field("flags").split()


def _cpu_field(name: str) -> str:
    """Reads a field of the first core; empty where Linux has no such field."""
    fields = (line.partition(":") for line in Path("/proc/cpuinfo").read_text().splitlines())
    return next((value.strip() for key, _, value in fields if key.strip() == name), "")


def _best_gb_s(work: Callable[[], object]) -> float:
    return max(_gb_s(work) for _ in range(_NUM_TRIALS))


def _gb_s(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return _NUM_BYTES / (time.perf_counter() - start) / 1e9
