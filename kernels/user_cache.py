"""The user's cache: folders that only their user may write, each with a lock between processes."""

import fcntl
import os
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

POLL_S = 0.05


class NotOwn(OSError):
    """A file or folder that is another user's, or that others may write."""


def user_cache() -> Path:
    """Returns the place of Baton's caches: $XDG_CACHE_HOME/baton; ~/.cache/baton where that is not set, or relative."""
    root = os.path.expanduser(os.environ.get("XDG_CACHE_HOME", ""))
    return Path(root if os.path.isabs(root) else os.path.expanduser("~/.cache"), "baton")


def own_folder(name: str) -> Path:
    """Returns a folder of the cache, made if it is missing. Raises OSError."""
    folder = user_cache() / name
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    require_own(os.stat(folder, follow_symlinks=False), folder)
    return folder


def require_own(status: os.stat_result, path: Path) -> None:
    """Raises NotOwn unless the path is this user's, and writable by no other."""
    if status.st_uid != os.getuid() or stat.S_IMODE(status.st_mode) & 0o022:
        raise NotOwn(f"{path} is not this user's alone: remove it")


@contextmanager
def locked(folder: Path, timeout_s: float) -> Iterator[None]:
    """Holds the folder's flock, which the system releases when its process ends. Blocks.

    Raises TimeoutError if another process holds it for `timeout_s`.
    """
    deadline = time.monotonic() + timeout_s
    with (folder / "lock").open("w") as file:
        while not _try_lock(file.fileno()):
            if time.monotonic() > deadline:
                raise TimeoutError(f"another process has held the lock of {folder} for {timeout_s:.0f} s")
            time.sleep(POLL_S)
        yield


def _try_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
