"""The folder of a cluster's sockets, logs and Ray session, which lives as long as the cluster."""

import os
import shutil
import tempfile
from pathlib import Path

# Unix socket paths may have 107 bytes, and Ray appends up to 68: a short place, whatever TMPDIR says.
ROOT = Path("/tmp")
PREFIX = "baton-"


def create(cluster: str) -> Path:
    """Makes an empty folder that only its owner may enter."""
    return Path(tempfile.mkdtemp(dir=ROOT, prefix=f"{PREFIX}{cluster}-"))


def remove(folder: Path) -> None:
    """Removes a folder made by `create`, if it is there. Raises ValueError for any other path, and removes nothing."""
    if folder.parent != ROOT or not folder.name.startswith(PREFIX):
        raise ValueError(f"{folder} is no run folder")
    if folder.exists() and not folder.is_symlink() and folder.stat().st_uid == os.getuid():
        shutil.rmtree(folder, ignore_errors=True)


def ray_folder(folder: Path) -> Path:
    """Returns the folder in which a Ray of our own keeps its files. A short name: see above."""
    return folder / "r"


def ray_logs(folder: Path) -> Path:
    """Returns the folder in which such a Ray collects the stderr of actors, a file for each process."""
    return ray_folder(folder) / "session_latest" / "logs"


def log_tail(log: Path, num_lines: int = 15) -> str:
    """Returns the last lines of a log, for a message; empty if there is none."""
    lines = log.read_text(errors="replace").splitlines() if log.exists() else []
    return "\n".join(lines[-num_lines:])
