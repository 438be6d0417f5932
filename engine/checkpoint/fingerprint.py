"""The fingerprint of a model, over digests of the files that determine its KV."""

import hashlib
import json
import logging
import os
import tempfile
from collections.abc import Iterable
from io import FileIO
from pathlib import Path
from typing import Any

from kernels.user_cache import OTHER_CACHE, user_cache
from text.model_file import open_regular
from wire.errors import ModelError

logger = logging.getLogger(__name__)


class DigestCache:
    """SHA-256 of large files, computed again only if a file's path, size or time changes.

    The digests are in a JSON file; if it is lost or damaged, the files are read again. It also says whether weights
    have NaN or infinity.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    @classmethod
    def of_user(cls) -> "DigestCache":
        """Opens digests.json among the user's caches."""
        return cls(user_cache() / "digests.json")

    def digest(self, file: Path) -> str:
        """Computes or recalls the hex SHA-256 of a file's content.

        Raises ModelError if it cannot be read, or is a .safetensors file with NaN or infinity.
        """
        with open_regular(file) as content:
            name, stamp = str(file.resolve()), _stamp(content)
            match self._load().get(name):
                case [size, mtime_ns, str(digest), str() | None as flawed] if [size, mtime_ns] == stamp:
                    pass
                case _:
                    digest, flawed = _digest(file, content)
                    if _stamp(content) == stamp:
                        self._store(name, [*stamp, digest, flawed])
        if flawed is not None:
            raise ModelError(f"{file.name}: tensor {flawed[:128]} has NaN or infinity")
        return digest

    def _load(self) -> dict[str, Any]:
        try:
            with open_regular(self.path) as file:
                known = json.loads(file.read())
        except (OSError, ValueError, RecursionError, ModelError):
            return {}
        return known if isinstance(known, dict) else {}

    def _store(self, name: str, entry: list[int | str | None]) -> None:
        """Replaces the file in one step: a reader sees the old file or the new one."""
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            descriptor, temporary = tempfile.mkstemp(dir=self.path.parent)
            with os.fdopen(descriptor, "w") as file:
                json.dump(self._load() | {name: entry}, file)
            os.replace(temporary, self.path)
        except OSError as error:
            logger.warning("digests of the weights cannot be kept: %s (%s)", error, OTHER_CACHE)


def fingerprint(files: Iterable[Path], dtype: str, backend_version: str, cache: DigestCache) -> bytes:
    """Digests a model's files, compute dtype and kernel version into 32 bytes (SHA-256).

    files: configuration (rope is in it), weights and tokenizer; their order does not matter. Blocks while it reads the
    files that `cache` does not know. Raises ModelError for a file that cannot be read.
    """
    total = hashlib.sha256()
    for file in sorted(files, key=lambda path: path.name):
        total.update(f"{file.name}\0{cache.digest(file)}\0".encode())
    total.update(f"{dtype}\0{backend_version}".encode())
    return total.digest()


def _digest(file: Path, content: FileIO) -> tuple[str, str | None]:
    if file.suffix == ".safetensors":
        from engine.checkpoint.tensor_file import TensorFile  # which imports torch; `baton pull` wants none

        return TensorFile(file).digest()
    return hashlib.file_digest(content, "sha256").hexdigest(), None


def _stamp(file: FileIO) -> list[int]:
    found = os.fstat(file.fileno())
    return [found.st_size, found.st_mtime_ns]
