"""One text file of a model folder, read with suspicion: links resolved, regular files only, bounded size."""

import stat
from pathlib import Path

from wire.errors import ModelError


def read_model_file(folder: Path, name: str, max_bytes: int) -> str | None:
    """The file's text, or None if there is no such file. Raises ModelError if it is not one to read."""
    try:
        path = (folder / name).resolve(strict=True)
        status = path.stat()
    except FileNotFoundError:
        return None
    except (OSError, RuntimeError) as error:
        raise ModelError(f"{name}: cannot be opened") from error
    if not stat.S_ISREG(status.st_mode):
        raise ModelError(f"{name}: not a regular file")
    if status.st_size > max_bytes:
        raise ModelError(f"{name}: {status.st_size} bytes, at most {max_bytes} are read")
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ModelError(f"{name}: cannot be read as UTF-8") from error
