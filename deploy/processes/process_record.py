"""Process references of a cluster's actors: each actor writes its own into the cluster's folder."""

import json
import os
from dataclasses import asdict
from pathlib import Path

from deploy.processes.atomic_file import AtomicFile
from deploy.processes.process import ProcessRef

SUFFIX = ".process"


def write_own(run_dir: Path, name: str) -> None:
    """Records this process as the actor of that name."""
    _file(run_dir, name).try_write(json.dumps(asdict(ProcessRef.of(os.getpid()))).encode())


def read(run_dir: Path, name: str) -> ProcessRef | None:
    """Returns the last process of that name, or None if there was none."""
    content = _file(run_dir, name).read()
    return None if content is None else ProcessRef(**json.loads(content))


def living(run_dir: Path) -> list[ProcessRef]:
    """Returns the recorded processes that are alive."""
    known = [read(run_dir, path.stem) for path in run_dir.glob(f"*{SUFFIX}")]
    return [process for process in known if process is not None and process.is_alive]


def _file(run_dir: Path, name: str) -> AtomicFile:
    return AtomicFile(run_dir / f"{name}{SUFFIX}")
