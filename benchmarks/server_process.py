"""A server of stream_server.py in its own process, which prints its addresses, and serves until its input ends."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

_SCRIPT = Path(__file__).with_name("stream_server.py")
_END_TIMEOUT_S = 60.0


@dataclass(frozen=True)
class ServerProcess:
    """A server that serves."""

    pid: int
    addresses: tuple[str, ...]


@contextmanager
def server_process(*arguments: str) -> Iterator[ServerProcess]:
    """arguments: as stream_server.py takes them. Raises RuntimeError if the server does not start."""
    command = [sys.executable, str(_SCRIPT), *arguments]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            addresses = tuple(process.stdout.readline().split())
            if not addresses:
                raise RuntimeError(f"{_SCRIPT.name} {' '.join(arguments)} did not start")
            yield ServerProcess(process.pid, addresses)
        finally:
            process.stdin.close()
            _wait_or_kill(process)


def _wait_or_kill(process: subprocess.Popen[str]) -> None:
    try:
        process.wait(_END_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
