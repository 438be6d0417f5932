"""The supervisor of Ray's head on this machine: starts it, and starts it again whenever it ends.

python -m deploy.local.head_supervisor PORT COMMAND...        as deploy/head.sh --supervise does

Ray writes its tables of nodes and actors to files that only this user can read: they hold code. A head that is started
again reads them, takes back the nodes that have outlived it, and restarts the controllers that ran on it. SIGTERM ends
the head and removes the tables: a later head begins anew.
"""

import logging
import os
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from deploy.actors.liveness import backoff_s
from deploy.local.client import connection_problem
from deploy.local.run_dir import log_tail
from deploy.local.state import explained_path, state_dir
from deploy.processes.interrupts import Interrupts
from deploy.processes.logs import start_logging
from deploy.processes.process import ProcessRef, end_session, record, recorded, spawn_leader
from kernels.user_cache import try_lock
from router.config import LOOPBACK
from wire.errors import ConfigError

HEAD = "head"
RAY_GRACE_S = 15.0
LOOK_EVERY_S = 0.2
STEADY_S = 60.0
"""Life of a head after which its end is the first failure again."""

log = logging.getLogger(__name__)


class HeadSupervisor:
    """The supervisor of the head at one port. command: starts the head, and lives as long as it.

    folder: private to this user; holds the lock, the head's process, its output, and Ray's tables.
    """

    def __init__(self, folder: Path, port: str, command: Sequence[str]) -> None:
        self._folder = folder
        self._port = port
        self._command = [*command]
        self._output = folder / "head.log"
        self._tables = folder / "tables"
        self._interrupts = Interrupts()
        self._num_failures = 0

    def run(self) -> None:
        """Keeps a head until SIGTERM, then ends it. Raises ConfigError if another process has its place."""
        with self._interrupts, self._locked():
            head = self._adopt() or self._start()
            try:
                while True:
                    self._wait_for_end(head)
                    head = self._start()
            except KeyboardInterrupt:
                log.info("the supervisor was told to end, and ends Ray's head")
            end_session(head, RAY_GRACE_S)
            shutil.rmtree(self._tables, ignore_errors=True)

    @contextmanager
    def _locked(self) -> Iterator[None]:
        with explained_path(self._folder):
            self._folder.mkdir(mode=0o700, exist_ok=True)
            descriptor = os.open(self._folder / "lock", os.O_CREAT | os.O_RDONLY, 0o600)
        try:
            if not try_lock(descriptor):
                raise ConfigError(f"another supervisor keeps the head at port {self._port}: end that one first")
            yield
        finally:
            os.close(descriptor)

    def _adopt(self) -> ProcessRef | None:
        """Returns the living head of an earlier supervisor. Raises ConfigError if another process has the port."""
        head = recorded(self._folder, HEAD)
        if head is not None and head.is_alive:
            log.info("the head of an earlier supervisor, process %d, lives: it goes on", head.pid)
            return head
        if head is not None:
            end_session(head, 0)
        if connection_problem(f"{LOOPBACK}:{self._port}") is None:
            advice = "end it (`ray stop`), or give another --port"
            raise ConfigError(f"a process that is not supervised listens on port {self._port}: {advice}")
        return None

    def _start(self) -> ProcessRef:
        """Starts a head, and records its process."""
        self._output.unlink(missing_ok=True)
        head = spawn_leader(self._command, self._output, {"RAY_gcs_storage_path": str(self._tables)})
        record(self._folder, HEAD, head)
        log.info("Ray's head starts at port %s, process %d", self._port, head.pid)
        return head

    def _wait_for_end(self, head: ProcessRef) -> None:
        """Waits for a head's end, ends its remains, and backs off. Raises KeyboardInterrupt at SIGTERM."""
        began_s = time.monotonic()
        with self._interrupts.awaited():
            while head.is_alive:
                time.sleep(LOOK_EVERY_S)
        with suppress(ChildProcessError):  # an earlier supervisor's
            os.waitpid(head.pid, os.WNOHANG)
        end_session(head, 0)
        lived_s = time.monotonic() - began_s
        self._num_failures = 1 if lived_s > STEADY_S else self._num_failures + 1
        pause_s, reason = backoff_s(self._num_failures), log_tail(self._output, 5)
        log.error("Ray's head ended after %.0f s, and starts again in %.0f s: %s", lived_s, pause_s, reason)
        with self._interrupts.awaited():
            time.sleep(pause_s)


def main(port: str, *command: str) -> int:
    start_logging("head-supervisor")
    try:
        HeadSupervisor(state_dir() / f"head-{port}", port, command).run()
    except (ConfigError, TimeoutError) as error:
        sys.stderr.write(f"head: {error}\n")
        return ConfigError.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
