"""A real Redis or Valkey server that a test may kill, stop and start again in the same place."""

import signal
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

import redis

from deploy.local.redis_server import find_program

_START_TIMEOUT_S = 20.0


class RedisProcess:
    """Listens on a Unix socket in `folder`, keeps nothing on disk; `options` are the server's own."""

    def __init__(self, folder: Path, options: Sequence[str] = (), password: str = "") -> None:
        self._folder = folder
        self._options = [*options, *(["--requirepass", password] if password else [])]
        self._path = folder / "redis.sock"
        self._process: subprocess.Popen[bytes] | None = None
        self._password = password
        self.url = f"unix://{':' + password + '@' if password else ''}{self._path}"

    def start(self) -> None:
        """Returns when the server answers."""
        settings = ["--port", "0", "--unixsocket", str(self._path), "--save", "", "--dir", str(self._folder)]
        with (self._folder / "redis.log").open("ab") as log:
            self._process = subprocess.Popen([find_program(), *settings, *self._options], stdout=log, stderr=log)
        deadline = time.monotonic() + _START_TIMEOUT_S
        while not self._answers():
            assert self._process.poll() is None, (self._folder / "redis.log").read_text()
            assert time.monotonic() < deadline, "the server does not answer"
            time.sleep(0.02)

    def kill(self) -> None:
        """Ends the server with SIGKILL, and waits for that."""
        if self._process is not None:
            self._process.kill()
            self._process.wait(timeout=10)
            self._process = None

    def stop(self) -> None:
        """Stops the server with SIGSTOP: connections are accepted and never answered."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)

    def client(self) -> redis.Redis:
        """A connection of the test's own; to be closed."""
        return redis.Redis.from_url(self.url, socket_timeout=5.0)

    def _answers(self) -> bool:
        try:
            with self.client() as client:
                return bool(client.ping())
        except redis.RedisError:
            return False
