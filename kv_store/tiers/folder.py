"""A folder of frames, local or on the network; several nodes may use it at a time.

FOLDER/ab/abcd...   a frame, named by its block's key
FOLDER/ab/.1234     a frame that is being written, and renamed once it is whole
FOLDER/.lock        made by the node that makes room; it counts for nothing once it has not changed for a minute
"""

import errno
import os
import re
import secrets
import stat
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from enum import Enum
from math import inf

from wire.ids import BlockKey

_LOCK = ".lock"
_LEASE_S = 60.0
_FOLDER_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_READ_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC  # a pipe is opened, too, and not waited for
_WRITE_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_OPENS_AS_NO_FILE = (errno.ELOOP, errno.ENXIO)
_FULL = (errno.ENOSPC, errno.EDQUOT)
_NO_ENTRY = (FileNotFoundError, NotADirectoryError)
"""Errors of a missing entry; NotADirectoryError: a file or a link is in a folder's place."""
SHARDS = tuple(f"{number:02x}" for number in range(256))
_OWN_NAME = re.compile(r"[0-9a-f]{64}|\.[0-9a-f]+")


class Found(Enum):
    """The entry under a key: a file of the expected size, something else, or nothing."""

    FILE = "file"
    OTHER = "other"
    NOTHING = "nothing"


@dataclass(frozen=True, order=True)
class StoredFile:
    """A file in a listing. Files are ordered by their last use."""

    used_ns: int
    num_bytes: int
    path: str

    @property
    def idle_s(self) -> float:
        """Returns the time since the last use, by this machine's clock."""
        return max(0.0, time.time() - self.used_ns / 1e9)

    @property
    def key(self) -> BlockKey | None:
        """The key of a frame; None for an unfinished one."""
        name = self.path.partition("/")[2]
        return None if name.startswith(".") else BlockKey(bytes.fromhex(name))


class FolderLock:
    """A lock file in an open folder, held by the node that evicts; void a minute after its last renewal."""

    def __init__(self, folder: int, clock: Callable[[], float]) -> None:
        self._folder = folder
        self._clock = clock
        self._seen = (0, 0.0)

    def take(self) -> bool:
        """Creates the lock file, or replaces one that was not renewed for a minute of this process's clock.

        Returns False if another node holds it. Raises OSError.
        """
        for _ in range(2):
            with suppress(FileExistsError), _closing(os.open(_LOCK, _WRITE_FLAGS, 0o600, dir_fd=self._folder)):
                return True
            with suppress(FileNotFoundError):  # it is released by now
                changed_ns = os.stat(_LOCK, dir_fd=self._folder, follow_symlinks=False).st_mtime_ns
                if changed_ns != self._seen[0]:
                    self._seen = (changed_ns, self._clock())
                if self._clock() - self._seen[1] < _LEASE_S:
                    return False
                self.release()
        return False

    def renew(self) -> None:
        os.utime(_LOCK, dir_fd=self._folder, follow_symlinks=False)

    def release(self) -> None:
        with suppress(FileNotFoundError):
            os.unlink(_LOCK, dir_fd=self._folder)


class Folder:
    """An open folder, until `close` or its collection. Calls may block as the file system does, and raise OSError.

    No link is followed below the folder, and only regular files are read. A file's mtime is its last use: each write
    and each read sets it.
    """

    def __init__(self, path: str, clock: Callable[[], float], ttl_s: float = inf) -> None:
        """Makes the folder if only it is missing. `clock` is monotonic, in seconds. ttl_s: time since a file's last
        use.
        """
        with suppress(FileExistsError):
            os.mkdir(path, 0o700)
        self.path = path
        self._folder = os.open(path, _FOLDER_FLAGS & ~os.O_NOFOLLOW)
        self._close = weakref.finalize(self, os.close, self._folder)
        self._ttl_s = ttl_s
        self.lock = FolderLock(self._folder, clock)

    def is_expired(self, used_ns: int) -> bool:
        """Returns whether a file with this last use has expired, by this machine's clock."""
        return time.time() - used_ns / 1e9 > self._ttl_s

    def try_to_write(self) -> None:
        """Raises OSError if files cannot be written, but not if the file system is full: reads still work."""
        try:
            with _written_aside(self._folder, b"tried"):
                pass
        except OSError as error:
            if error.errno not in _FULL:
                raise

    def close(self) -> None:
        self._close()

    @property
    def is_at_its_path(self) -> bool:
        """Returns whether the path still names this folder: it may be removed, moved, or mounted over."""
        with suppress(*_NO_ENTRY):
            return os.path.samestat(os.stat(self.path), os.fstat(self._folder))
        return False

    def has(self, key: BlockKey) -> bool:
        """Returns whether the file system shows an entry under a key that is not expired."""
        if self._ttl_s < inf:
            with suppress(*_NO_ENTRY):
                found = os.stat(_path_of(key), dir_fd=self._folder, follow_symlinks=False)
                return not self.is_expired(found.st_mtime_ns)
        return os.access(_path_of(key), os.F_OK, dir_fd=self._folder, follow_symlinks=False)

    def read(self, key: BlockKey, into: memoryview) -> Found:
        """Fills `into` from a regular file of exactly its size; reads nothing from any other entry."""
        try:
            with self._shard(key) as shard, _closing(os.open(key.hex(), _READ_FLAGS, dir_fd=shard)) as file:
                found = os.fstat(file)
                if not stat.S_ISREG(found.st_mode) or found.st_size != len(into):
                    return Found.OTHER
                if self.is_expired(found.st_mtime_ns):
                    return Found.NOTHING
                if os.preadv(file, [into], 0) != len(into):
                    raise OSError(errno.EIO, "a file has become shorter")
                with suppress(OSError):
                    os.utime(file)
                return Found.FILE
        except _NO_ENTRY:
            return Found.NOTHING
        except OSError as error:
            if error.errno not in _OPENS_AS_NO_FILE:
                raise
            return Found.OTHER

    def write(self, key: BlockKey, *parts: bytes | memoryview) -> None:
        """Writes a file atomically, replacing an earlier entry."""
        with suppress(FileExistsError):
            os.mkdir(_shard_of(key), 0o700, dir_fd=self._folder)
        with self._shard(key) as shard, _written_aside(shard, *parts) as path:
            os.rename(path, key.hex(), src_dir_fd=shard, dst_dir_fd=shard)

    def look(self, key: BlockKey, num_bytes: int) -> tuple[StoredFile, bytes] | None:
        """Reads the first bytes of a regular file, without counting a use; None if there is none."""
        with suppress(*_NO_ENTRY), self._shard(key) as shard:
            found = os.stat(key.hex(), dir_fd=shard, follow_symlinks=False)
            if stat.S_ISREG(found.st_mode):
                with _closing(os.open(key.hex(), _READ_FLAGS, dir_fd=shard)) as file:
                    head = os.pread(file, num_bytes, 0)
                    return StoredFile(found.st_mtime_ns, found.st_size, _path_of(key)), head
        return None

    def remove(self, keys: Iterable[BlockKey]) -> bool:
        """Removes the entries under some keys, except folders that are not empty. Returns True."""
        for key in keys:
            with suppress(*_NO_ENTRY), self._shard(key) as shard:
                try:
                    os.unlink(key.hex(), dir_fd=shard)
                except IsADirectoryError:
                    with suppress(OSError):
                        os.rmdir(key.hex(), dir_fd=shard)
        return True

    def files(self) -> Iterator[StoredFile]:
        """Lists frames, also unfinished ones, and no files of other programs."""
        for shard in SHARDS:
            yield from self.shard_files(shard)

    def shard_files(self, shard: str) -> Iterator[StoredFile]:
        """Lists the frames whose keys begin with two hex digits, as `files` does."""
        with suppress(*_NO_ENTRY), _opened(shard, self._folder) as folder, os.scandir(folder) as entries:
            for entry in filter(lambda entry: _OWN_NAME.fullmatch(entry.name), entries):
                with suppress(FileNotFoundError):
                    file = entry.stat(follow_symlinks=False)
                    if not stat.S_ISDIR(file.st_mode):
                        yield StoredFile(file.st_mtime_ns, file.st_size, f"{shard}/{entry.name}")

    def remove_file(self, file: StoredFile) -> None:
        """Removes a listed file if it is still there."""
        shard, _, name = file.path.partition("/")
        with suppress(*_NO_ENTRY), _opened(shard, self._folder) as folder:
            os.unlink(name, dir_fd=folder)

    @contextmanager
    def _shard(self, key: BlockKey) -> Iterator[int]:
        with _opened(_shard_of(key), self._folder) as shard:
            yield shard


@contextmanager
def _opened(path: str, folder: int) -> Iterator[int]:
    with _closing(os.open(path, _FOLDER_FLAGS, dir_fd=folder)) as descriptor:
        yield descriptor


@contextmanager
def _closing(descriptor: int) -> Iterator[int]:
    try:
        yield descriptor
    finally:
        os.close(descriptor)


@contextmanager
def _written_aside(folder: int, *parts: bytes | memoryview) -> Iterator[str]:
    """Writes a file under a temporary name, and removes it at the end unless it was renamed."""
    path = f".{secrets.token_hex(8)}"
    descriptor = os.open(path, _WRITE_FLAGS, 0o600, dir_fd=folder)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.writelines(parts)
        yield path
    finally:
        with suppress(FileNotFoundError):
            os.unlink(path, dir_fd=folder)


def _shard_of(key: BlockKey) -> str:
    return key.hex()[:2]


def _path_of(key: BlockKey) -> str:
    return f"{_shard_of(key)}/{key.hex()}"
