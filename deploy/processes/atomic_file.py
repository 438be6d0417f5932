"""A small file that is replaced atomically: readers see the old content or the new."""

import errno
import logging
import os
import stat
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TypeVar

from wire.errors import ConfigError

T = TypeVar("T")

log = logging.getLogger(__name__)


class AtomicFile:
    """A file that only its owner can read, replaced or created atomically."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def read(self) -> bytes | None:
        """Returns the content, None without a file. Raises OSError, also for a pipe or a device."""
        with suppress(FileNotFoundError), open(self.path, "rb", opener=_open_at_once) as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise OSError(errno.EINVAL, "not a regular file", str(self.path))
            return file.read()
        return None

    def recall(self, parse: Callable[[str], T]) -> T | None:
        """Returns the parsed content; None without a file, and for a damaged file, which is logged."""
        try:
            content = self.read()
            return None if content is None else parse(content.decode())
        except (OSError, ValueError, ConfigError) as error:
            log.warning("%s is damaged: %s", self.path, error)
            return None

    def write(self, content: bytes) -> None:
        """Replaces the content. Raises OSError, and then leaves the file unchanged."""
        with self._temporary(content) as temporary:
            temporary.replace(self.path)

    def try_write(self, content: bytes) -> bool:
        """Replaces the content of a file that is not essential; returns whether that succeeded."""
        try:
            self.write(content)
        except OSError as error:
            log.warning("%s cannot be written: %s", self.path, error)
            return False
        return True

    def create(self, content: bytes) -> bool:
        """Writes the file unless there is one; returns whether it did. Raises OSError."""
        with self._temporary(content) as temporary, suppress(FileExistsError):
            os.link(temporary, self.path)
            return True
        return False

    @contextmanager
    def _temporary(self, content: bytes) -> Iterator[Path]:
        descriptor, path = tempfile.mkstemp(dir=self.path.parent, prefix=".")
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(content)
            yield Path(path)
        finally:
            Path(path).unlink(missing_ok=True)


def _open_at_once(path: str, flags: int) -> int:
    """Opens without waiting: opening a pipe without a writer would block."""
    return os.open(path, flags | os.O_NONBLOCK)
