"""A file that outlives the process that writes it, for the one that takes its place."""

import logging
import os
from pathlib import Path

log = logging.getLogger(__name__)


class Record:
    """One text, replaced in one step."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def write(self, text: str) -> bool:
        """Whether the disk has taken it; else what was there before is there still. No reason to stop work."""
        temporary = self._path.with_suffix(".new")
        try:
            temporary.write_text(text)
            os.replace(temporary, self._path)
        except OSError as error:
            log.warning("%s cannot be written: %s", self._path, error)
            return False
        return True

    def read(self) -> str | None:
        """None if there is none."""
        return self._path.read_text() if self._path.exists() else None
