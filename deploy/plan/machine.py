"""The memory, cores and GPUs of this machine, for sizing."""

import os
import resource
import shutil
import subprocess
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from wire.errors import ConfigError

SHARED_MEMORY = Path("/dev/shm")
CGROUP = Path("/sys/fs/cgroup")
RAYS_SHARE = 20
"""Ray ends workers when less than 1/20 of the memory is free."""
QUERY_TIMEOUT_S = 20.0


LIMITS = {
    resource.RLIMIT_NOFILE: ("open files", "-n", 1024, 1),
    resource.RLIMIT_NPROC: ("processes and threads", "-u", 1024, 1),
    resource.RLIMIT_FSIZE: ("bytes of a file", "-f", 1 << 30, 1 << 10),
}
"""Limits of a process: the name, the flag and the unit of `ulimit`, and the least with which a cluster starts."""


@dataclass(frozen=True)
class Machine:
    """Memory to be had, free shared memory (which is memory too), cores of this process, and free bytes of each GPU."""

    memory_bytes: int
    shared_bytes: int
    num_cores: int
    gpus: tuple[int, ...] = ()


def inspect_machine() -> Machine:
    """Looks at the machine; blocks for a second where there is a GPU. Raises ConfigError for a GPU without answer."""
    shared = os.statvfs(SHARED_MEMORY)
    return Machine(
        memory_bytes=_free_memory(),
        shared_bytes=shared.f_bavail * shared.f_frsize,
        num_cores=len(os.sched_getaffinity(0)),
        gpus=_free_on_gpus(),
    )


def require_limits() -> None:
    """Raises ConfigError for a limit of this process, and so of its children, with which no cluster starts."""
    for limit, (name, flag, least, unit) in LIMITS.items():
        soft, hard = resource.getrlimit(limit)
        most = hard if limit == resource.RLIMIT_NOFILE else soft  # Ray raises that of files itself
        if most != resource.RLIM_INFINITY and most < least:
            raise ConfigError(
                f"only {most} {name} are allowed here: allow more, as with `ulimit {flag} {least // unit}`"
            )


def _free_memory() -> int:
    """Returns the memory that may be taken yet, of the machine and of its container; files in memory can go."""
    system = psutil.virtual_memory()
    free = [system.available - system.total // RAYS_SHARE]
    with suppress(OSError, ValueError):  # no container, or `max`
        limit, current = (int((CGROUP / f"memory.{name}").read_text()) for name in ("max", "current"))
        counts = dict(line.split() for line in (CGROUP / "memory.stat").read_text().splitlines())
        free.append(limit - limit // RAYS_SHARE - current + int(counts.get("inactive_file", 0)))
    return max(0, min(free))


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
