"""Which process an actor is: each writes that down itself, where whoever has to end it finds it."""

import json
import os
from dataclasses import asdict
from pathlib import Path

from deploy.processes.process import ProcessRef
from deploy.processes.record import Record

SUFFIX = ".process"


def write_own(run_dir: Path, name: str) -> None:
    """That this process is the actor of that name."""
    Record(run_dir / f"{name}{SUFFIX}").write(json.dumps(asdict(ProcessRef.of(os.getpid()))))


def read(run_dir: Path, name: str) -> ProcessRef | None:
    """The last one of that name; None if there was none."""
    text = Record(run_dir / f"{name}{SUFFIX}").read()
    return None if text is None else ProcessRef(**json.loads(text))


def living(run_dir: Path) -> list[ProcessRef]:
    """All that are alive of those that were written down in that folder."""
    known = [read(run_dir, path.stem) for path in run_dir.glob(f"*{SUFFIX}")]
    return [process for process in known if process is not None and process.is_alive]
