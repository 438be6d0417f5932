"""The file of a cluster's keys: NAME.keys.json beside its state, private to its user. It outlives the cluster."""

from contextlib import suppress
from pathlib import Path

from deploy.local.state import explained_path, state_dir
from deploy.processes.atomic_file import AtomicFile
from wire.errors import ConfigError
from wire.trust.key_ring import NO_CALLER, NO_KEYS, KeyList
from wire.typed_reader import from_json, to_json


class KeyFile:
    """The keys on disk. Commands change the file under the lock of the state; the controller only reads it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = AtomicFile(path)

    @classmethod
    def of(cls, cluster: str) -> "KeyFile":
        """Returns a cluster's file. Raises ConfigError if its folder cannot be made."""
        return cls(state_dir() / f"{cluster}.keys.json")

    def read(self) -> KeyList:
        """Returns the keys, none without a file. Raises ConfigError if the file is broken or open to others."""
        with explained_path(self.path):
            content = self._file.read()
            is_private = content is None or not self.path.stat().st_mode & 0o077
        if not is_private:
            raise ConfigError(f"{self.path} must be readable by you only: `chmod 600` it")
        if content is None:
            return NO_KEYS
        listed = from_json(KeyList, content.decode(errors="replace"), str(self.path))
        if not listed.keys:
            raise ConfigError(f"{self.path} has no keys: remove it where calls need none")
        return listed

    def write(self, listed: KeyList) -> None:
        """Replaces the keys atomically. Raises ConfigError, and then leaves them unchanged."""
        with explained_path(self.path):
            self._file.write(to_json(listed).encode())


class LastKeys:
    """The keys that a controller uses: the file's, recorded in the run folder for its successor."""

    def __init__(self, file: KeyFile, record: AtomicFile) -> None:
        self._file = file
        self._record = record

    def read(self) -> KeyList:
        """Returns the keys of the file. Raises the ConfigError of `KeyFile.read`."""
        listed = self._file.read()
        if not self._record.try_write(to_json(listed).encode()):
            with suppress(OSError):  # it may have keys that were revoked since
                self._record.path.unlink()
        return listed

    def recall(self) -> KeyList:
        """Returns the keys that were read last; without a record, keys that admit no caller."""
        return self._record.recall(lambda text: from_json(KeyList, text, "keys")) or NO_CALLER
