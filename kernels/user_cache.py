"""The user's folders: state, and caches, which only the user may write and a lock between processes guards."""

import errno
import fcntl
import os
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

POLL_S = 0.05
TEMPORARY = Path("/tmp")
"""The parent of folders for a user without a home, whatever TMPDIR says: all processes must agree."""
OTHER_CACHE = "mend that, or set XDG_CACHE_HOME to another folder"


class NotOwn(OSError):
    """A file or folder belongs to another user, or others may write it."""

    def __init__(self, path: Path) -> None:
        super().__init__(errno.EPERM, "it is not this user's alone: remove it", str(path))


def user_cache() -> Path:
    """Returns the folder of Baton's caches, $XDG_CACHE_HOME/baton, as `user_folder` does."""
    return user_folder("XDG_CACHE_HOME", ".cache")


def user_folder(variable: str, default: str) -> Path:
    """Returns the path of Baton's folder in the folder that a variable names, else in `default` under the home.

    Ignores a relative path in the variable (XDG Base Directory Specification 0.8). Makes a private folder for a user
    without a home. Raises OSError, and NotOwn if that folder is another user's or writable by others.
    """
    given = os.path.expanduser(os.environ.get(variable, ""))
    return Path(given if os.path.isabs(given) else user_home() / default, "baton")


def user_home() -> Path:
    """Returns the user's home, or the private folder in its place. Raises the errors of `user_folder`."""
    if (home := Path(os.path.expanduser("~"))).is_absolute():
        return home
    private = substitute_home()
    with suppress(FileExistsError):
        private.mkdir(mode=0o700)
    require_own(private.lstat(), private, 0o077)
    return private


def substitute_home() -> Path:
    """Returns the path of the private folder of a user without a home: no HOME, and no entry among the users."""
    return TEMPORARY / f".baton-{os.getuid()}"


def own_folder(name: str) -> Path:
    """Returns a folder of the cache, made if missing. Raises OSError."""
    folder = user_cache() / name
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    require_own(folder.lstat(), folder)
    return folder


def require_own(status: os.stat_result, path: Path, denied: int = 0o022) -> None:
    """Raises NotOwn for another user's path, or a mode with a bit of `denied`. The mode of a link is 0o777."""
    if status.st_uid != os.getuid() or stat.S_IMODE(status.st_mode) & denied:
        raise NotOwn(path)


@contextmanager
def locked(folder: Path, timeout_s: float) -> Iterator[None]:
    """Holds the folder's flock, which the system releases when its process ends. Blocks.

    Raises TimeoutError if another process holds it for `timeout_s`.
    """
    deadline = time.monotonic() + timeout_s
    with (folder / "lock").open("w") as file:
        while not try_lock(file.fileno()):
            if time.monotonic() > deadline:
                raise TimeoutError(f"another process has held the lock of {folder} for {timeout_s:.0f} s")
            time.sleep(POLL_S)
        yield


def try_lock(descriptor: int) -> bool:
    """Takes the flock of an open file; returns whether it was free. Does not block."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
