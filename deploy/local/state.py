"""The command line's files: the state of each cluster, and the server's secret. Private to their user."""

import os
import secrets
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from deploy.plan.config import check_name
from deploy.processes.atomic_file import AtomicFile
from deploy.processes.process import ProcessRef, recorded_living
from wire.errors import ConfigError
from wire.settings import from_json, to_json

VERSION = 2
SECRET_BYTES = 32


class ClusterPhase(Enum):
    """The progress of a cluster."""

    STARTING = "starting"
    RUNNING = "running"


@dataclass(frozen=True)
class ClusterState:
    """A cluster: its addresses, and the processes and files that end with it.

    command: the `baton up` that is or was at work. head: leads the session of all processes of the Ray cluster that
    Baton started; None on one that it joined. token: opens the operator's port.
    """

    name: str
    phase: ClusterPhase
    command: ProcessRef
    run_dir: str
    token: str
    model: str = ""
    address: str = ""
    operator_address: str = ""
    metrics_address: str = ""
    ray_address: str = ""
    arena_path: str = ""
    head: ProcessRef | None = None
    redis: ProcessRef | None = None
    version: int = VERSION

    @property
    def is_alive(self) -> bool:
        """True while any process that the state knows of runs."""
        known = [self.head, self.redis, *recorded_living(Path(self.run_dir))]
        known += [self.command] if self.phase is ClusterPhase.STARTING else []
        return any(one.is_alive for one in known if one is not None)

    @property
    def ports(self) -> list[int]:
        """The ports that are free when the cluster is gone: Ray's too, where Ray is the cluster's own."""
        own = [self.address, self.operator_address, self.metrics_address, self.ray_address if self.head else ""]
        return [int(address.rpartition(":")[2]) for address in own if address]


class StateFile:
    """The place of one cluster's state: $XDG_STATE_HOME/baton/NAME.json, by default under ~/.local/state."""

    def __init__(self, name: str) -> None:
        """Raises ConfigError for an impossible name."""
        self.name = check_name(name)
        self.path = state_dir() / f"{name}.json"
        self._file = AtomicFile(self.path)

    def read(self) -> ClusterState | None:
        """Returns None if there is no such cluster. Raises ConfigError for a file that cannot be understood."""
        try:
            content = self._file.read()
            state = None if content is None else from_json(ClusterState, content.decode(), "state")
            if state is not None and state.version != VERSION:
                raise ConfigError("state of another version")
        except (OSError, ValueError, ConfigError) as error:
            raise ConfigError(f"{self.path} cannot be read as the state of a cluster: {error}") from error
        return state

    def claim(self, state: ClusterState) -> bool:
        """Writes the first state of a cluster. Returns False, and writes nothing, if there is one already."""
        return self._file.create(to_json(state).encode())

    def write(self, state: ClusterState) -> None:
        """Replaces the state in one step."""
        self._file.write(to_json(state).encode())

    def remove(self) -> None:
        self.path.unlink(missing_ok=True)


def state_dir() -> Path:
    """Returns the folder of states and secret, readable for its owner only; makes it if need be."""
    root = os.environ.get("XDG_STATE_HOME") or "~/.local/state"
    folder = Path(root).expanduser() / "baton"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    return folder


def load_secret() -> bytes:
    """Returns the server's secret, under which all keys of blocks are made. Raises ConfigError.

    It is made at first use, and outlives restarts, so that Redis stays warm; commands that start at once get the same.
    """
    path = state_dir() / "secret"
    if not path.exists():
        AtomicFile(path).create(secrets.token_bytes(SECRET_BYTES))
    if path.stat().st_size != SECRET_BYTES or path.stat().st_mode & 0o077:
        raise ConfigError(f"{path} must hold {SECRET_BYTES} bytes that only you can read: remove it to get a new one")
    return path.read_bytes()
