"""Files of a model folder, opened with care.

Hub snapshots are links, so links are followed, but to regular files of bounded size alone: a pipe or a device could
block or never end.
"""

import os
import stat
from io import FileIO
from pathlib import Path

from wire.errors import ModelError


def open_regular(path: Path) -> FileIO:
    """Opens for reading, unbuffered. Raises ModelError if the file is missing, unreadable or not a regular file."""
    try:
        # Without O_NONBLOCK, opening a pipe that nobody writes to would never return.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError as error:
        raise ModelError(f"{path.name} is missing", folder=str(path.parent)) from error
    except OSError as error:
        raise ModelError(f"{path.name} cannot be read: {error.strerror}", folder=str(path.parent)) from error
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise ModelError(f"{path.name} is not a regular file", folder=str(path.parent))
    return FileIO(descriptor, "rb")


def read_regular(path: Path, max_bytes: int) -> bytes:
    """Reads the whole content. Raises the ModelErrors of `open_regular`, and one for more than `max_bytes`."""
    with open_regular(path) as file:
        data = file.read(max_bytes + 1)
    if len(data) > max_bytes:
        raise ModelError(f"{path.name} is larger than {max_bytes} bytes", folder=str(path.parent))
    return data


def read_text(path: Path, max_bytes: int) -> str | None:
    """Reads the whole content as text, None if there is no file. Raises ModelError as above, and if it is not UTF-8."""
    if not os.path.lexists(path):
        return None
    try:
        return read_regular(path, max_bytes).decode()
    except UnicodeDecodeError as error:
        raise ModelError(f"{path.name} is not UTF-8", folder=str(path.parent)) from error
