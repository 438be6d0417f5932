"""The progress of a worker that is warming, in a file beside its node's socket, for the command that starts it."""

import os
from contextlib import suppress
from pathlib import Path
from types import TracebackType

SUFFIX = ".warming"


class Progress:
    """A file with the part that is warmed, its count done and its count in all; present while the worker is warming.

    A disk that is full hides the progress, and stops no worker.
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    @classmethod
    def beside(cls, socket: Path, worker_id: str) -> "Progress":
        """Returns the progress of a worker in the folder of its node's socket. Its name tells the process, too."""
        return cls(socket.with_name(f"{worker_id}.{os.getpid()}{SUFFIX}"))

    def __enter__(self) -> "Progress":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        with suppress(OSError):
            self._path.unlink(missing_ok=True)

    def note(self, part: str, num_done: int, num_all: int) -> None:
        with suppress(OSError):
            self._path.write_text(f"{part} {num_done} of {num_all}")
