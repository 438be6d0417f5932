"""The memory, cores and GPUs of this machine, for sizing."""

import os
import shutil
import subprocess
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from wire.errors import ConfigError

SHARED_MEMORY = Path("/dev/shm")
QUERY_TIMEOUT_S = 20.0


@dataclass(frozen=True)
class Machine:
    """Free memory, free shared memory (which is memory too), cores of this process, and free bytes of each GPU."""

    memory_bytes: int
    shared_bytes: int
    num_cores: int
    gpus: tuple[int, ...] = ()


def inspect_machine() -> Machine:
    """Looks at the machine; blocks for a second where there is a GPU. Raises ConfigError for a GPU without answer."""
    shared = os.statvfs(SHARED_MEMORY)
    return Machine(
        memory_bytes=min(psutil.virtual_memory().available, _free_in_cgroup()),
        shared_bytes=shared.f_bavail * shared.f_frsize,
        num_cores=len(os.sched_getaffinity(0)),
        gpus=_free_on_gpus(),
    )


def _free_in_cgroup() -> int:
    """Returns the memory that a container still has; without a limit, which is `max` there, all memory."""
    group = Path("/sys/fs/cgroup")
    with suppress(OSError, ValueError):
        return max(0, int((group / "memory.max").read_text()) - int((group / "memory.current").read_text()))
    return psutil.virtual_memory().total


def _free_on_gpus() -> tuple[int, ...]:
    program = shutil.which("nvidia-smi")
    if program is None:
        return ()
    query = [program, "--query-gpu=memory.free", "--format=csv,noheader,nounits"]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, timeout=QUERY_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired as error:
        silence = f"nvidia-smi did not answer within {QUERY_TIMEOUT_S:.0f} s"
        raise ConfigError(f"{silence}: is the GPU's driver well?") from error
    return tuple(int(line) << 20 for line in answer.stdout.split() if line.isdigit())
