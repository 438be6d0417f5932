"""Log files of a cluster's processes on this machine: found by the process's name, and read in whole lines."""

import os
from contextlib import suppress
from pathlib import Path

from deploy.local.run_dir import ray_logs
from deploy.processes.process import recorded, recorded_living, recorded_names

MAX_READ_BYTES = 1 << 18
"""Bytes of a log that one read takes; a longer line comes in parts."""
OWN_LOGS = ("ray", "redis")


def find_logs(folder: Path) -> dict[str, Path]:
    """Returns the log of each process that a cluster has or had on this machine, by name; living processes first."""
    logs, of_ray = {name: folder / f"{name}.log" for name in OWN_LOGS}, _find_ray_logs(folder)
    processes = {name: recorded(folder, name) for name in recorded_names(folder)}
    for name, process in sorted(processes.items(), key=lambda one: (not (one[1] and one[1].is_alive), one[0])):
        logs[name] = next(of_ray.glob(f"worker-*-{process.pid}.err"), folder) if process else folder
    return {name: path for name, path in logs.items() if path.is_file()}


def _find_ray_logs(folder: Path) -> Path:
    """Returns the folder in which Ray collects the logs; of a joined Ray it is known by any living process."""
    for process in recorded_living(folder) if not ray_logs(folder).exists() else ():
        with suppress(OSError):  # it has ended meanwhile
            return Path(os.readlink(f"/proc/{process.pid}/fd/2")).parent
    return ray_logs(folder)


class LogReader:
    """A log file, read from its last lines on as it grows; from its start if it was cut."""

    def __init__(self, path: Path, num_lines: int) -> None:
        """num_lines: the last lines that the first `new` returns, within MAX_READ_BYTES. Raises OSError."""
        self._path = path
        self._offset = max(0, path.stat().st_size - MAX_READ_BYTES)
        before, *last = self._read().rsplit(b"\n", num_lines + 1)
        self._offset += len(before) + 1 if len(last) > num_lines else 0

    def new(self) -> list[str]:
        """Returns the whole lines since the last call, within MAX_READ_BYTES. Raises OSError."""
        if self._path.stat().st_size < self._offset:
            self._offset = 0
        content = self._read()
        content = content[: content.rfind(b"\n") + 1] or content[: len(content) // MAX_READ_BYTES * MAX_READ_BYTES]
        self._offset += len(content)
        return content.decode(errors="backslashreplace").removesuffix("\n").split("\n") if content else []

    def _read(self) -> bytes:
        with self._path.open("rb") as file:
            file.seek(self._offset)
            return file.read(MAX_READ_BYTES)
