"""Child processes for tasks that may take too long or too much memory; a process that ended is replaced.

A model's chat template and a request's grammar are untrusted programs.
"""

import asyncio
import json
import os
import subprocess
import sys
import threading
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from multiprocessing import Pipe
from typing import Any

from wire.errors import InvalidRequest, Unavailable

START_TIMEOUT_S = 30.0
MAX_WAIT_S = 5.0
"""Bound on the wait for a task, longer than child.MAX_CPU_S: the process may be stopped, or starved of CPU."""


@dataclass(frozen=True)
class Task:
    """A kind of task: the module that processes run, its first message, and its words in errors.

    verb: names the work. param: the request's field that the task is about. too_long: the message about a slow task.
    """

    module: str
    first: Mapping[str, Any]
    verb: str
    param: str
    too_long: str


class ChildProcesses:
    """Processes for one kind of task, started at the first task, and threads that wait for them."""

    def __init__(self, task: Task, num_processes: int) -> None:
        self._children = [Child(task) for _ in range(num_processes)]
        self._idle = list(self._children)
        self._threads = ThreadPoolExecutor(num_processes, task.param)

    def start(self) -> None:
        """Starts the processes before the first task, without waiting."""
        for child in self._children:
            self._threads.submit(child.start)

    async def ask(self, asked: Mapping[str, Any]) -> dict[str, str]:
        """Returns a process's answer. Raises InvalidRequest if the task fails, Unavailable without a process."""
        return await asyncio.wrap_future(self._threads.submit(self._ask, asked))

    async def close(self) -> None:
        """Ends the processes; a task under way has MAX_WAIT_S to finish."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        await asyncio.to_thread(self._end)

    def _ask(self, asked: Mapping[str, Any]) -> dict[str, str]:
        child = self._idle.pop()  # there are as many as threads
        try:
            return child.ask(asked)
        finally:
            self._idle.append(child)

    def _end(self) -> None:
        for child in self._children:
            child.end()


class Child:
    """A process for tasks. If it ends, or is ended after MAX_WAIT_S, a new process replaces it."""

    def __init__(self, task: Task) -> None:
        self._task = task
        self._process: subprocess.Popen[bytes] | None = None
        self._turn = threading.Lock()
        self._is_over = False

    def start(self) -> None:
        """Starts a process if there is none, and blocks until it is ready. Raises Unavailable."""
        with self._turn:
            self._ready()

    def ask(self, asked: Mapping[str, Any]) -> dict[str, str]:
        """Returns a task's answer. Blocks. Raises InvalidRequest if it fails, takes too long, or ends the process.

        Raises Unavailable if there is no answer after MAX_WAIT_S.
        """
        with self._turn:
            answer = self._exchange(self._ready(), asked, MAX_WAIT_S)
        if answer is None:
            raise InvalidRequest(self._task.param, self._task.too_long)
        if "failure" in answer:
            raise InvalidRequest(answer.get("param", self._task.param), answer["failure"])
        return answer

    def end(self) -> None:
        """Ends the process once it is idle; nothing replaces it."""
        self._is_over = True
        with self._turn:
            self._kill()

    def _ready(self) -> "subprocess.Popen[bytes]":
        if self._is_over:
            raise Unavailable(f"no process {self._task.verb} any more")
        if self._process is not None and self._process.poll() is not None:
            self._kill()
        if self._process is None:
            environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
            command, silent = [sys.executable, "-m", self._task.module], subprocess.DEVNULL
            self._line, theirs = Pipe()
            with theirs:
                self._process = subprocess.Popen(
                    command, env=environment, stdin=theirs.fileno(), stdout=silent, stderr=silent
                )
            if self._exchange(self._process, self._task.first, START_TIMEOUT_S) is None:
                raise Unavailable(f"no process {self._task.verb}")
        return self._process

    def _exchange(
        self, process: "subprocess.Popen[bytes]", message: Mapping[str, Any], timeout_s: float
    ) -> dict[str, str] | None:
        """Returns the answer, None if the process ended meanwhile. Raises Unavailable, and ends a late process."""
        is_late = threading.Event()
        timer = threading.Timer(timeout_s, _end_late, [process, is_late])
        timer.start()
        try:
            self._line.send_bytes(json.dumps(dict(message)).encode())
            answer: dict[str, str] | None = json.loads(self._line.recv_bytes())
        except (OSError, EOFError):
            answer = None
        finally:
            timer.cancel()
        if answer is None:
            self._kill()
            if is_late.is_set():
                raise Unavailable(f"the process that {self._task.verb} did not answer in time: ask again")
        return answer

    def _kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._line.close()
            self._process = None


def _end_late(process: "subprocess.Popen[bytes]", is_late: threading.Event) -> None:
    is_late.set()
    process.kill()
