"""One text file of a model folder, read with care: links are followed, only a regular file of bounded size is read."""

import os
import stat
from pathlib import Path

from wire.errors import ModelError


def read_model_file(folder: Path, name: str, max_bytes: int) -> str | None:
    """The file's text, or None if there is no such file. Raises ModelError if it is not one to read."""
    try:
        # Opening a pipe that has no writer would block for ever.
        descriptor = os.open(folder / name, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ModelError(f"{name}: cannot be opened") from error
    with os.fdopen(descriptor, "rb") as file:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise ModelError(f"{name}: not a regular file")
        data = file.read(max_bytes + 1)
    if len(data) > max_bytes:
        raise ModelError(f"{name}: larger than {max_bytes} bytes")
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise ModelError(f"{name}: not UTF-8") from error
