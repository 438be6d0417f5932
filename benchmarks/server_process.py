"""A script of ours that prints its addresses, and serves until its input ends."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_END_TIMEOUT_S = 60.0


@contextmanager
def server_process(script: str, *arguments: str) -> Iterator[tuple[str, ...]]:
    """Its process id and its addresses. script: in this folder."""
    command = [sys.executable, str(Path(__file__).with_name(script)), *arguments]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        yield str(process.pid), *process.stdout.readline().split()
        process.stdin.close()
        process.wait(_END_TIMEOUT_S)
