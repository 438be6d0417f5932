"""What the command line knows of a cluster that runs: a file for each, private to its user."""

import json
import os
import tempfile
from dataclasses import asdict, dataclass
from enum import Enum
from pathlib import Path

from deploy.plan.config import check_name
from deploy.processes import process_record
from deploy.processes.process import ProcessRef
from wire.errors import ConfigError

VERSION = 2


class ClusterPhase(Enum):
    """How far a cluster has come."""

    STARTING = "starting"
    RUNNING = "running"


@dataclass(frozen=True)
class ClusterState:
    """A cluster: where it answers, and everything that has to go when it ends.

    command: the `baton up` that is or was at work. head: leads the session of all processes of the Ray cluster that
    Baton started; None on one that it joined. token: what the operator's port asks for.
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

    @property
    def is_alive(self) -> bool:
        """Whether anything of it runs that the state knows of."""
        known = [self.head, self.redis, *process_record.living(Path(self.run_dir))]
        known += [self.command] if self.phase is ClusterPhase.STARTING else []
        return any(one.is_alive for one in known if one is not None)

    def encode(self) -> str:
        return json.dumps({"version": VERSION, **asdict(self), "phase": self.phase.value}, indent=1)

    @classmethod
    def decode(cls, text: str) -> "ClusterState":
        """Raises ValueError, KeyError or TypeError for what is no state of this version."""
        fields = json.loads(text)
        if fields.pop("version") != VERSION:
            raise ValueError("state of another version")
        processes = {key: ProcessRef(**fields[key]) for key in ("command", "head", "redis") if fields[key] is not None}
        return cls(**fields | processes | {"phase": ClusterPhase(fields["phase"])})


class StateFile:
    """The place of one cluster's state: $XDG_STATE_HOME/baton/NAME.json, by default under ~/.local/state."""

    def __init__(self, name: str) -> None:
        """Raises ConfigError for a name that is none."""
        self.name = check_name(name)
        self.path = state_dir() / f"{name}.json"

    def read(self) -> ClusterState | None:
        """None if there is no such cluster. Raises ConfigError for a file that cannot be understood."""
        try:
            return ClusterState.decode(self.path.read_text())
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ConfigError(f"{self.path} cannot be read as the state of a cluster: {error}") from error

    def claim(self, state: ClusterState) -> bool:
        """Writes the first state of a cluster. False, and nothing is written, if there is one already."""
        temporary = self._write_temporary(state)
        try:
            os.link(temporary, self.path)
        except FileExistsError:
            return False
        finally:
            temporary.unlink()
        return True

    def write(self, state: ClusterState) -> None:
        """Replaces the state in one step."""
        os.replace(self._write_temporary(state), self.path)

    def remove(self) -> None:
        self.path.unlink(missing_ok=True)

    def _write_temporary(self, state: ClusterState) -> Path:
        descriptor, path = tempfile.mkstemp(dir=state_dir(), prefix=".")
        with os.fdopen(descriptor, "w") as file:
            file.write(state.encode())
        return Path(path)


def state_dir() -> Path:
    """The folder of states and of the server's secret, made if need be, readable for its owner only."""
    root = os.environ.get("XDG_STATE_HOME") or "~/.local/state"
    folder = Path(root).expanduser() / "baton"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    return folder
