"""The command line's files: each cluster's state, the server's secret, and the namespaces served under it.

Only their user can read them.
"""

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import astuple, dataclass, field
from enum import Enum
from functools import partial
from pathlib import Path

from deploy.local import run_dir
from deploy.plan.config import check_name
from deploy.processes.atomic_file import AtomicFile
from deploy.processes.process import ProcessRef, recorded_living, wait_until
from kernels.user_cache import substitute_home, try_lock, user_folder
from wire.errors import ConfigError, Unavailable
from wire.pools import Addresses
from wire.served_model import ServedNamespace
from wire.trust.certificates import TlsFiles
from wire.typed_reader import from_json, to_json

VERSION = 4
SECRET_BYTES = 32
MAX_SERVED = 8
NEW_SECRET = f"make one with `(umask 077; head -c {SECRET_BYTES} /dev/urandom > FILE)`"
OTHER_HOME = "mend that, or set XDG_STATE_HOME to another folder"


class ClusterPhase(Enum):
    """The progress of a cluster."""

    STARTING = "starting"
    RUNNING = "running"


@dataclass(frozen=True, kw_only=True)
class ClusterState:
    """A cluster: its addresses, and the processes and files that end with it.

    command: the process of `baton up`. head: leads the session of all processes of a Ray cluster that Baton started;
    None for a joined Ray cluster. token: opens the operator's port. tls: files of the certificate of the clients'
    ports.
    """

    name: str
    phase: ClusterPhase
    command: ProcessRef
    run_dir: str
    token: str
    model: str = ""
    ray_address: str = ""
    addresses: Addresses = field(default_factory=Addresses)
    tls: TlsFiles | None = None
    head: ProcessRef | None = None
    redis: ProcessRef | None = None
    version: int = VERSION

    @property
    def http_url(self) -> str:
        """Returns the base URL for OpenAI's clients; "" without a gateway."""
        http = self.addresses.http
        return f"http{'s' if self.tls else ''}://{http}/v1" if http else ""

    @property
    def is_alive(self) -> bool:
        """True while any process of the cluster runs, `baton up` apart."""
        known = [self.head, self.redis, *recorded_living(Path(self.run_dir))]
        return any(one.is_alive for one in known if one is not None)

    @property
    def crash(self) -> str | None:
        """The end of the cluster's own Ray, in words, though workers and router may live on; None while Ray runs."""
        if self.head is None or self.phase is ClusterPhase.STARTING:
            return None
        known = run_dir.crash(Path(self.run_dir))
        return known or (None if self.head.is_alive else "(the process of its Ray has ended)")

    @property
    def lost_folder(self) -> Path | None:
        """The part of the cluster's folder that was removed, if any: without it no dead actor can be replaced."""
        return run_dir.find_loss(Path(self.run_dir), has_ray=self.head is not None)

    @property
    def ports(self) -> list[int]:
        """The ports that are free once the cluster is gone; Ray's, too, if the cluster started it."""
        own = [*",".join(astuple(self.addresses)).split(","), self.ray_address if self.head else ""]
        return [int(address.rpartition(":")[2]) for address in own if address]


class StateFile:
    """The place of one cluster's state: $XDG_STATE_HOME/baton/NAME.json, by default under ~/.local/state.

    A command writes or removes it only under the lock, after it has read it under the lock.
    """

    def __init__(self, name: str) -> None:
        """Finds a cluster's file. Raises ConfigError for a name that no file can have."""
        self.name = check_name(name)
        self.path = state_dir() / f"{name}.json"
        self._file = AtomicFile(self.path)

    @contextmanager
    def lock(self, timeout_s: float) -> Iterator[None]:
        """Locks a cluster's name: no other command starts or stops it. The end of the process unlocks it, too.

        Raises Unavailable if another command has the lock until the timeout, ConfigError if its file cannot be opened.
        """
        with explained_path(self.path.with_suffix(".lock")) as path:
            descriptor = os.open(path, os.O_CREAT | os.O_RDONLY | os.O_NONBLOCK, 0o600)
        try:
            if not wait_until(lambda: try_lock(descriptor), timeout_s):
                raise Unavailable(f"another `baton up` or `baton down` of {self.name} is at work: wait for its end")
            yield
        finally:
            os.close(descriptor)

    def read(self) -> ClusterState | None:
        """Returns the state, None if there is no such cluster. Raises ConfigError for a malformed file."""
        try:
            return self._parse()
        except ConfigError as error:
            raise ConfigError(f"{error.message}: `{command_line('down', self.name)}` sets it aside") from error

    def set_aside(self) -> str | None:
        """Renames a malformed file to NAME.json.broken and returns the reason; None for a well-formed file.

        Raises the errors of `lock`.
        """
        try:
            self._parse()
        except ConfigError as error:
            with self.lock(0), explained_path(self.path) as path:
                path.replace(path.with_suffix(".json.broken"))
            return error.message
        return None

    def write(self, state: ClusterState) -> None:
        """Replaces the state atomically. Raises ConfigError, and then leaves it unchanged."""
        with explained_path(self.path):
            self._file.write(to_json(state).encode())

    def remove(self) -> None:
        self.path.unlink(missing_ok=True)

    def _parse(self) -> ClusterState | None:
        try:
            content = self._file.read()
            state = None if content is None else from_json(ClusterState, content.decode(errors="replace"), "state")
        except OSError as error:
            raise self._broken(error.strerror) from error
        except ConfigError as error:
            raise self._broken(error.message) from error
        if state is not None and (state.version, state.name) != (VERSION, self.name):
            raise self._broken("of another version or name")
        if state is not None and not run_dir.is_of(self.name, Path(state.run_dir)):
            raise self._broken("run_dir: not the folder of a cluster of this name")
        return state

    def _broken(self, reason: str | None) -> ConfigError:
        return ConfigError(f"{self.path} is not the state of a cluster ({reason})")


def command_line(verb: str, name: str) -> str:
    """Returns a command as the user types it."""
    return f"baton {verb}" if name == "default" else f"baton {verb} --name {name}"


def state_dir() -> Path:
    """Returns the folder of states and secret, made if missing, for its owner only. Raises ConfigError."""
    with explained_path(substitute_home()):
        folder = user_folder("XDG_STATE_HOME", ".local/state")
    with explained_path(folder):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    return folder


def secret_path(given: str | None) -> Path:
    """Returns the path of the server's secret, by default the user's own. Raises ConfigError."""
    return state_dir() / "secret" if given is None else Path(given)


def load_secret(given: str | None = None) -> bytes:
    """Returns the server's secret, from which keys of blocks and MACs of frames are made. Raises ConfigError.

    given: the path of a secret that clusters share, so that they find each other's blocks. Without it, the user's own
    secret is made at first use and outlives restarts; concurrent commands get the same secret.
    """
    path = secret_path(given)
    with explained_path(path, OTHER_HOME if given is None else NEW_SECRET):
        if given is None and not os.path.lexists(path):
            AtomicFile(path).create(secrets.token_bytes(SECRET_BYTES))
        content, mode = AtomicFile(path).read(), path.stat().st_mode
    if content is None or len(content) != SECRET_BYTES or mode & 0o077:
        advice = "remove it to get a new one" if given is None else NEW_SECRET
        raise ConfigError(f"{path} must hold {SECRET_BYTES} bytes that only you can read: {advice}")
    return content


@contextmanager
def explained_path(path: Path, advice: str = OTHER_HOME) -> Iterator[Path]:
    """Turns an OSError into a ConfigError that names the path and the way out."""
    try:
        yield path
    except OSError as error:
        raise ConfigError(f"{path} cannot be read or written ({error.strerror}): {advice}") from error


@dataclass(frozen=True)
class _Served:
    """The latest namespaces, the last first."""

    namespaces: tuple[ServedNamespace, ...] = ()


class ServedFile:
    """The namespaces served under a secret, in SECRET.served beside it, for causes of uncached blocks.

    Clusters serve without it, too. Concurrent commands may lose each other's entry; the next start of that model
    restores it.
    """

    def __init__(self, secret: Path) -> None:
        self._file = AtomicFile(secret.with_name(f"{secret.name}.served"))

    def others(self, now: ServedNamespace) -> tuple[ServedNamespace, ...]:
        """Returns the namespaces except this, the latest first; none from a damaged file."""
        known = self._file.recall(partial(from_json, _Served, where="served")) or _Served()
        return tuple(one for one in known.namespaces if _parts(one) != _parts(now))

    def note(self, now: ServedNamespace) -> bool:
        """Puts a namespace first, and drops the oldest beyond MAX_SERVED; returns whether the file was written."""
        latest = (now, *self.others(now))[:MAX_SERVED]
        return self._file.try_write(to_json(_Served(latest)).encode())


def _parts(namespace: ServedNamespace) -> tuple[str, str]:
    return namespace.fingerprint_hex, namespace.layout_hex
