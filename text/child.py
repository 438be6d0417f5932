"""A child process's loop over tasks, with bounds on memory and processor time.

in   the first message, with "memory_bytes", then tasks
out  {}, then the answer to each task, which has a "failure" if it failed, and may name the "param" at fault

Messages are JSON on a `multiprocessing.Connection`, which is stdin; the asking process bounds its wait.
"""

import json
import os
import resource
import signal
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

MAX_CPU_S = 1.0
Handler = Callable[[dict[str, Any]], dict[str, str]]


def serve(prepare: Callable[[dict[str, Any]], Handler]) -> None:
    """Answers tasks until the other side closes. prepare: maps the first message to the function that answers tasks."""
    with suppress(EOFError):
        _serve(Connection(os.dup(0)), prepare)


def _serve(line: Connection, prepare: Callable[[dict[str, Any]], Handler]) -> None:
    given = json.loads(line.recv_bytes())
    answer = prepare(given)
    used_bytes = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used_bytes + given["memory_bytes"],) * 2)
    line.send_bytes(b"{}")
    while True:
        asked = json.loads(line.recv_bytes())
        signal.setitimer(signal.ITIMER_PROF, MAX_CPU_S)  # SIGPROF ends a process
        answered = answer(asked)
        signal.setitimer(signal.ITIMER_PROF, 0)
        line.send_bytes(json.dumps(answered).encode())
