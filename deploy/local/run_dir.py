"""The folder of a cluster's sockets, logs and Ray session, beside its nodes' folders, until the cluster ends."""

import os
import re
import shutil
import stat
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from deploy.plan.byte_size import format_bytes
from deploy.plan.machine import SHARED_MEMORY
from deploy.processes.atomic_file import AtomicFile
from wire.errors import ConfigError
from worker.progress import SUFFIX as WARMING

# Unix socket paths may have 107 bytes, and Ray appends up to 68: a short place, whatever TMPDIR says.
ROOT = Path("/tmp")
PREFIX = "baton-"
CRASH = "crash"
MIN_FREE_BYTES = 32 << 20
"""Space for logs, sockets and Ray's files: with less, some part would fail later with an obscure error."""


def create(cluster: str) -> Path:
    """Makes an empty folder that only its owner may enter. Raises ConfigError if there is no room."""
    if (shortage := find_shortage()) is not None:
        raise ConfigError(shortage)
    try:
        return Path(tempfile.mkdtemp(dir=ROOT, prefix=f"{PREFIX}{cluster}-"))
    except OSError as error:
        raise ConfigError(f"{ROOT} takes no folder of a cluster ({error.strerror}): make room for one") from error


def find_shortage() -> str | None:
    """Returns advice if too little room is left for a cluster's logs and sockets, else None."""
    free = os.statvfs(ROOT)
    if (free_bytes := free.f_bavail * free.f_frsize) >= MIN_FREE_BYTES:
        return None
    return f"only {format_bytes(free_bytes)} of {ROOT} are free: make room for a cluster's logs there"


def is_of(cluster: str, folder: Path) -> bool:
    """Tells whether `create` may have made a folder for a cluster."""
    return folder.parent == ROOT and cluster_of(folder.name) == cluster


def cluster_of(folder_name: str) -> str | None:
    """Returns the name of the cluster for which `create` may have made a folder; None for any other folder."""
    found = re.fullmatch(rf"{PREFIX}(.+)-[a-z0-9_]{{8}}", folder_name)
    return found and found[1]


def arenas(folder: Path) -> list[Path]:
    """Returns the arenas on this machine that belong to a run folder; several Ray nodes have several arenas."""
    return list(SHARED_MEMORY.glob(f"{folder.name}.*"))


def warming(folder: Path) -> dict[str, str]:
    """Returns what workers on this machine have warmed so far, in words, by worker. Passes over files of dead ones."""
    found = {}
    for node in ROOT.glob(f"{folder.name}.*"):
        for path in node.glob(f"*{WARMING}") if _is_own(node, stat.S_ISDIR) else ():
            worker_id, _, pid = path.name.removesuffix(WARMING).rpartition(".")
            if _is_own(path, stat.S_ISREG) and Path("/proc", pid).exists():
                with suppress(OSError):  # it is warm by now
                    found[worker_id] = path.read_text(errors="replace")
    return found


def remove(folder: Path) -> list[Path]:
    """Removes a folder made by `create`, and folders and arenas of its nodes; returns the paths that remain.

    Raises ValueError for any other path, and removes nothing. Links and files of other users stay.
    """
    if folder.parent != ROOT or not folder.name.startswith(PREFIX):
        raise ValueError(f"{folder} is no run folder")
    folders, files = [folder, *ROOT.glob(f"{folder.name}.*")], arenas(folder)
    for path in folders:
        if _is_own(path, stat.S_ISDIR):
            shutil.rmtree(path, ignore_errors=True)
    for path in files:
        if _is_own(path, stat.S_ISREG):
            path.unlink()
    return [path for path in (*folders, *files) if os.path.lexists(path)]


def _is_own(path: Path, is_kind: Callable[[int], bool]) -> bool:
    with suppress(FileNotFoundError):
        found = path.lstat()
        return is_kind(found.st_mode) and found.st_uid == os.getuid()
    return False


def record_crash(folder: Path, reason: str) -> None:
    """Records a cluster's crash, for later commands; the first record counts."""
    moment = time.strftime("%Y-%m-%d %H:%M:%S")
    with suppress(OSError):
        AtomicFile(folder / CRASH).create(f"at {moment} ({reason})".encode())


def crash(folder: Path) -> str | None:
    """Returns the time and the reason of a crash, in words, if one is recorded."""
    with suppress(OSError):
        recorded = AtomicFile(folder / CRASH).read()
        return None if recorded is None else recorded.decode(errors="replace")
    return None


def find_loss(folder: Path, has_ray: bool) -> Path | None:
    """Returns the part of a cluster's folder that was removed, if any: all of it, or the session of its own Ray."""
    parts = [folder, ray_session(folder)] if has_ray else [folder]
    return next((part for part in parts if not part.exists()), None)


def renew(folder: Path) -> None:
    """Sets the times of a cluster's files, and of its nodes' files, to now, lest cleaners of /tmp remove them."""
    for top in (folder, *ROOT.glob(f"{folder.name}.*")):
        for path in (top, *top.rglob("*")):
            with suppress(OSError):  # it is gone, or another user's
                os.utime(path, follow_symlinks=False)


def ray_folder(folder: Path) -> Path:
    """Returns the folder of the files of a cluster's own Ray. A short name: see above."""
    return folder / "r"


def ray_session(folder: Path) -> Path:
    """Returns the folder of that Ray's session. Ray's link to it proves nothing: each worker removes and renews it."""
    return max(ray_folder(folder).glob("session_[0-9]*"), default=ray_folder(folder) / "session_latest")


def ray_logs(folder: Path) -> Path:
    """Returns the folder in which that Ray collects the stderr of actors, a file for each process."""
    return ray_session(folder) / "logs"


def log_tail(log: Path, num_lines: int = 15) -> str:
    """Returns the last lines of a log, for a message; empty if there is none."""
    lines = log.read_text(errors="replace").splitlines() if log.exists() else []
    return "\n".join(lines[-num_lines:])
