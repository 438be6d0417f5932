"""References to processes that outlive their command: pid, start time and boot, for pids are reused."""

import os
import signal
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

import psutil

from deploy.processes.atomic_file import AtomicFile
from wire.errors import ConfigError
from wire.typed_reader import from_json, to_json

POLL_S = 0.02
ORPHANS_GRACE_S = 1.0
KILL_TIMEOUT_S = 10.0
MAX_PID = 2**31 - 1
SUFFIX = ".process"
GATEWAY = "gateway"


@dataclass(frozen=True)
class ProcessRef:
    """A process: its pid, its start time in seconds since 1970, and its machine's boot id.

    Raises ConfigError for a pid with a special meaning: a group, all processes, or init.
    """

    pid: int
    started: float
    boot: str

    def __post_init__(self) -> None:
        if not 1 < self.pid <= MAX_PID:
            raise ConfigError("pid: not the number of a process that Baton starts")

    @classmethod
    def of(cls, pid: int) -> "ProcessRef":
        """Refers to a running process. Raises psutil.NoSuchProcess."""
        return cls(pid, psutil.Process(pid).create_time(), _boot())

    @property
    def is_alive(self) -> bool:
        """Whether the process runs; false for a zombie, and for a later process with its pid."""
        return self._is_same() and _runs(self.pid)

    def session(self) -> list[int]:
        """Returns the living processes of the session that this process leads or led, itself among them.

        The system does not reuse a pid while its session has members: a later process with the pid means that the
        session is empty.
        """
        if self.boot != _boot() or (psutil.pid_exists(self.pid) and not self._is_same()):
            return []
        return [pid for pid in psutil.pids() if _session_of(pid) == self.pid and _runs(pid)]

    def _is_same(self) -> bool:
        with suppress(psutil.NoSuchProcess):
            return self.boot == _boot() and abs(psutil.Process(self.pid).create_time() - self.started) < 0.1
        return False


def record_own(run_dir: Path, name: str) -> None:
    """Records this process as the actor with a name, in the cluster's folder."""
    record(run_dir, name, ProcessRef.of(os.getpid()))


def record(run_dir: Path, name: str, process: ProcessRef) -> None:
    """Records a process under a name."""
    AtomicFile(run_dir / f"{name}{SUFFIX}").try_write(to_json(process).encode())


def recorded(run_dir: Path, name: str) -> ProcessRef | None:
    """Returns the last process with a name, None without a record or for a damaged record."""
    return AtomicFile(run_dir / f"{name}{SUFFIX}").recall(lambda text: from_json(ProcessRef, text, name))


def recorded_names(run_dir: Path) -> list[str]:
    """Returns the names of all actors that this machine has had, alive or not."""
    return [path.stem for path in run_dir.glob(f"*{SUFFIX}")]


def recorded_living(run_dir: Path) -> list[ProcessRef]:
    """Returns the recorded processes that are alive."""
    known = [recorded(run_dir, name) for name in recorded_names(run_dir)]
    return [process for process in known if process is not None and process.is_alive]


def recorded_gateways(run_dir: Path) -> dict[str, ProcessRef]:
    """Returns the last process of each gateway, by its name, in order."""
    names = [name for name in recorded_names(run_dir) if name.startswith(f"{GATEWAY}-")]
    known = {name: recorded(run_dir, name) for name in sorted(names, key=lambda name: (len(name), name))}
    return {name: process for name, process in known.items() if process is not None}


def spawn_leader(
    command: list[str], log: Path, env: Mapping[str, str] = MappingProxyType({}), stdin: int | None = None
) -> ProcessRef:
    """Starts a program from PATH that leads a new session and outlives its parent. Its output goes to `log`.

    env: variables to add to this process's. stdin: the program's standard input, by default /dev/null.
    """
    with log.open("ab") as output, open(os.devnull, "rb") as nothing:
        files = (nothing.fileno() if stdin is None else stdin, output.fileno(), output.fileno())
        copied = [(os.POSIX_SPAWN_DUP2, fd, number) for number, fd in enumerate(files)]
        actions = [*copied, *((os.POSIX_SPAWN_CLOSE, fd) for fd in _inherited())]
        pid = os.posix_spawnp(command[0], command, {**os.environ, **env}, file_actions=actions, setsid=True)
    return ProcessRef.of(pid)


def _inherited() -> list[int]:
    """Lists the caller's open files that a child would inherit: it would hold their locks as long as it lives."""
    found = []
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # the listing's own is closed by now
            if int(name) > 2 and os.get_inheritable(int(name)):
                found.append(int(name))
    return found


def end_session(leader: ProcessRef, grace_s: float) -> None:
    """Ends a session: SIGTERM to its leader; once that has ended, or after the grace, SIGKILL to the rest. Blocks.

    Raises TimeoutError if something survives SIGKILL for 10 s.
    """
    if leader.is_alive:
        _signal(leader.pid, signal.SIGTERM)
        wait_for_end(leader.pid, grace_s)
        wait_until(lambda: not leader.session(), ORPHANS_GRACE_S)
    for pid in leader.session():
        _signal(pid, signal.SIGKILL)
    if not wait_until(lambda: not leader.session(), KILL_TIMEOUT_S):
        raise TimeoutError(f"processes {leader.session()} cannot be ended")


def wait_or_kill(process: ProcessRef, grace_s: float) -> bool:
    """Waits for a process that was asked to end, and kills it after the grace; returns whether it is gone.

    Ends a stopped process (SIGSTOP) too.
    """
    if wait_for_end(process.pid, grace_s) or not process.is_alive:
        return True
    _signal(process.pid, signal.SIGKILL)
    return wait_for_end(process.pid, grace_s)


def wait_for_end(pid: int, timeout_s: float) -> bool:
    """Waits for a process; returns whether it is gone."""
    return wait_until(lambda: not _runs(pid), timeout_s)


def wait_until(holds: Callable[[], bool], timeout_s: float) -> bool:
    """Blocks until a condition holds; returns False if it does not in time."""
    deadline = time.monotonic() + timeout_s
    while not (is_held := holds()) and time.monotonic() <= deadline:
        time.sleep(POLL_S)
    return is_held


def _signal(pid: int, number: signal.Signals) -> None:
    with suppress(ProcessLookupError, PermissionError):  # another user's is seen to go on
        os.kill(pid, number)


def _runs(pid: int) -> bool:
    """Returns whether a process runs; false for a zombie, for which psutil's own wait would wait on."""
    with suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).status() not in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
    return False


def _session_of(pid: int) -> int | None:
    with suppress(ProcessLookupError):
        return os.getsid(pid)
    return None


def _boot() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
