"""A process that forks others: torch, and all that the processes of a cluster import, is in it, and nothing has begun.

    python -m tests.harness.fork_server SOCKET ...     ends with its standard input, and its children with it

It has one thread, no channel, no Ray that runs and no pool of OpenMP. Each connection to its socket asks for one
process: a Job and three descriptors go in; out come the pid and, once the process has ended, its exit status.
"""

import ctypes
import gc
import importlib
import json
import os
import pkgutil
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import IO, Any, NoReturn

import pytest

from deploy.processes.process import ProcessRef

PRELOADED = (
    "cli.__main__",
    "deploy.actors.node",
    "deploy.actors.worker",
    "deploy.controller.controller",
    "deploy.local.startup",
    "engine.engine",
    "gateway.actor",
    "router.actor",
    "tests.harness.fork_head",
    "torch",
)
"""Modules of actors and commands; those of each command are added."""
HEAD = "tests.harness.fork_head:main"
ON_FORKS, ON_RAY = "tests.harness.fork_server:run_command", "cli.__main__:main"
"""Commands whose cluster, if they start one, is forked, or has a real Ray."""
ROOM_FOR_TITLE = "-" * 200
START_S = 60.0
NUMBER = struct.Struct("!i")
MAX_JOB_BYTES = 128 << 10
MAX_FILES = 4096
PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class Job:
    """A call in a process of its own. target: MODULE:FUNCTION. leads: a session."""

    target: str
    arguments: Sequence[str]
    env: Mapping[str, str] = field(default_factory=dict)
    leads: bool = False


class ForkServer:
    """The server, from outside. Its socket and its log lie in `folder`."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "fork"
        command = [sys.executable, "-m", "tests.harness.fork_server", str(self.path), ROOM_FOR_TITLE]
        env = {**os.environ, "PYTHONWARNINGS": "default", "GRPC_VERBOSITY": "ERROR", "OMP_NUM_THREADS": "1"}
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(command, env=env, stdin=pipe, stdout=pipe)
        assert self._process.stdout is not None
        assert self._process.stdout.readline(), "the server has not begun"

    @property
    def pid(self) -> int:
        return self._process.pid

    def close(self) -> None:
        self._process.communicate(timeout=START_S)


class Forked:
    """A process that the server at `path` has made. files: its standard streams, which stay the caller's."""

    def __init__(self, path: Path, job: Job, files: tuple[int, int, int]) -> None:
        self._line = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._line.settimeout(START_S)
        self._line.connect(str(path))
        socket.send_fds(self._line, [json.dumps(asdict(job)).encode()], files)
        self.pid: int = NUMBER.unpack(self._line.recv(NUMBER.size))[0]

    def wait(self, timeout_s: float | None) -> int:
        """Returns the exit status, as a Popen's. Raises TimeoutError."""
        self._line.settimeout(timeout_s)
        code: int = NUMBER.unpack(self._line.recv(NUMBER.size))[0]
        return code

    def close(self) -> None:
        self._line.close()


class ForkedCommand:
    """A command of `baton` in a forked process, with what tests use of a Popen."""

    def __init__(self, server: ForkServer, target: str, arguments: Sequence[str], env: Mapping[str, str]) -> None:
        """target: ON_FORKS or ON_RAY."""
        self.args = list(arguments)
        self.returncode: int | None = None
        (out, its_out), (error, its_error) = os.pipe(), os.pipe()
        with open(os.devnull, "rb") as nothing:
            self._forked = Forked(server.path, Job(target, self.args, env), (nothing.fileno(), its_out, its_error))
        os.close(its_out)
        os.close(its_error)
        self.pid = self._forked.pid
        self.stdout, self.stderr = open(out), open(error)  # noqa: SIM115

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """Returns the rest of both streams at their end. Raises subprocess.TimeoutExpired."""
        texts = {}

        def read(stream: IO[str]) -> None:
            texts[stream] = stream.read()

        readers = [threading.Thread(target=read, args=[one], daemon=True) for one in (self.stdout, self.stderr)]
        for reader in readers:
            reader.start()
        try:
            self._wait(timeout)
        except TimeoutError:
            raise subprocess.TimeoutExpired(self.args, timeout or 0.0) from None
        for reader in readers:
            reader.join()
        return texts[self.stdout], texts[self.stderr]

    def send_signal(self, number: int) -> None:
        if self.returncode is None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def close(self) -> None:
        self.kill()
        self._wait(START_S)
        for one in (self._forked, self.stdout, self.stderr):
            one.close()

    def _wait(self, timeout_s: float | None) -> None:
        if self.returncode is None:
            self.returncode = self._forked.wait(timeout_s)


def run_command(arguments: Sequence[str]) -> int:
    """Runs a command whose cluster, if it starts one, is forked, too."""
    from cli.__main__ import main

    spawn = partial(_spawn_head, Path(sys.argv[1]))
    pytest.MonkeyPatch().setattr("deploy.local.ray_process.spawn_leader", spawn)
    return main(arguments)


def _spawn_head(path: Path, command: list[str], log: Path, env: Mapping[str, str], stdin: int) -> ProcessRef:
    """Forks the head of a cluster, where `up` starts a process for Ray."""
    _, _, module, *arguments = command
    assert (module, len(arguments)) == ("deploy.controller.ray_head", 1), "it joins no Ray"
    with log.open("ab") as output:
        job = Job(HEAD, arguments, {**os.environ, **env}, leads=True)
        return ProcessRef.of(Forked(path, job, (stdin, output.fileno(), output.fileno())).pid)


def serve(path: str) -> None:
    """Forks what is asked for, until the end of standard input."""
    children: dict[int, tuple[int, socket.socket]] = {}
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(path)
        listener.listen(64)
        sys.stdout.write("ready\n")
        sys.stdout.flush()
        while True:
            found, _, _ = select.select([0, listener.fileno(), *children], [], [])
            if 0 in found:
                break
            for ended in children.keys() & found:
                pid, line = children.pop(ended)
                _, status = os.waitpid(pid, 0)
                os.close(ended)
                with line, suppress(OSError):  # nobody asks for the status of a head
                    line.send(NUMBER.pack(os.waitstatus_to_exitcode(status)))
            if listener.fileno() in found:
                _begin(listener, children)
    for _, line in children.values():
        line.close()


def _begin(listener: socket.socket, children: dict[int, tuple[int, socket.socket]]) -> None:
    line, _ = listener.accept()
    content, files, _, _ = socket.recv_fds(line, MAX_JOB_BYTES, 3)
    job = Job(**json.loads(content))
    pid = fork(partial(_run, job, files))
    for file in files:
        os.close(file)
    children[os.pidfd_open(pid)] = pid, line
    line.send(NUMBER.pack(pid))


def fork(run: Callable[[], int | None]) -> int:
    """Forks this process, which has one thread; returns the child's pid. The child runs, and ends with its parent."""
    parent = os.getpid()
    assert len(os.listdir("/proc/self/task")) == 1, "a thread has begun before the fork"
    pid = os.fork()
    if pid == 0:
        _end_with(parent, run)
    return pid


def _end_with(parent: int, run: Callable[[], int | None]) -> NoReturn:
    code = 1
    try:
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() == parent:
            code = run() or 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1
    except BaseException:
        traceback.print_exc()
    with suppress(OSError, ValueError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)


def _run(job: Job, files: list[int]) -> int | None:
    take_streams(*files)
    if job.leads:
        os.setsid()
    os.environ.clear()
    os.environ.update(job.env)
    entitle(" ".join((job.target, *job.arguments)))
    call: Any = pkgutil.resolve_name(job.target)
    result: int | None = call(job.arguments)
    return result


def take_streams(*files: int, keep: Sequence[int] = ()) -> None:
    """Makes these the standard streams, and closes all else but `keep`."""
    for number, file in enumerate(files):
        os.dup2(file, number)
    for name in os.listdir("/proc/self/fd"):
        if int(name) > 2 and int(name) not in keep:
            with suppress(OSError):  # the listing's own
                os.close(int(name))


def entitle(title: str) -> None:
    """Changes the command line that others see of this process."""
    begin, end = map(int, Path("/proc/self/stat").read_text().rpartition(")")[2].split()[45:47])
    ctypes.memmove(begin, title.encode()[: end - begin - 1].ljust(end - begin, b"\0"), end - begin)


def main() -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for name in PRELOADED:
        importlib.import_module(name)
    from cli.__main__ import make_parser

    make_parser()
    gc.collect()
    gc.freeze()  # else a collection would copy all pages in each child
    serve(sys.argv[1])


if __name__ == "__main__":
    main()
