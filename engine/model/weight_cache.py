"""Packed weights in files of the user's cache: packed once, and mapped by all workers of a node.

A file's name is a digest of the inputs that determine its bytes: the model's fingerprint (content, compute dtype,
order of sums, version of the kernels, width of weights), the backend's name (instruction sets of the same sums lay
panels out differently), and the sources that read, pack and lay out tensors.
"""

import hashlib
import logging
import os
from collections.abc import Callable
from contextlib import suppress
from functools import cache, partial
from io import FileIO
from pathlib import Path

import torch

from engine.checkpoint.checkpoint import Checkpoint
from engine.checkpoint.fingerprint import DigestCache
from engine.model.weight_file import WeightFile, WeightWriter
from engine.model.weights import DecoderWeights, WeightLoader, count_bytes, load_private
from kernels.backend import Backend
from kernels.user_cache import OTHER_CACHE, locked, own_folder
from wire.errors import ModelError

FOLDER = "weights"
SUFFIX = ".weights"
PART = "part"
"""The temporary file of the process that holds the folder's lock; overwrites a killed process's file."""
LOCK_TIMEOUT_S = 600.0
_ROOT = Path(__file__).parents[2]
RULES = (
    *("engine/checkpoint", "engine/model/weights.py", "engine/model/weight_file.py"),
    *("kernels/cpu/backend.py", "kernels/cpu/packed.py", "kernels/torch_backend.py"),
    *("kernels/quantized/codebook.py", "kernels/quantized/matrix.py"),
)
"""Sources that determine the bytes of packed weights."""

logger = logging.getLogger(__name__)


class WeightCache:
    """This user's files of packed weights, at most `max_bytes` in all; evicts the least recently loaded file."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self.mapped_bytes = 0

    def load(
        self, checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device, backend: Backend
    ) -> DecoderWeights:
        """Maps a model's packed weights on a CPU. The first worker of a node packs them; the others wait for its lock.

        Calls `load_private` on other devices, with a bound of 0 and, with a warning, where the cache cannot be used.
        Blocks. Raises the ModelErrors of `load_private`, and one for model files that change meanwhile.
        """
        if device.type != "cpu" or not self._max_bytes:
            return load_private(checkpoint, dtype, device, backend)
        loader = partial(WeightLoader, checkpoint, dtype, device, backend)
        name = _name(checkpoint, dtype, backend)

        def write(file: WeightWriter) -> None:
            loader(file.put).load()
            if _name(checkpoint, dtype, backend) != name:
                raise ModelError("the model folder changed while it was read", folder=str(checkpoint.folder))

        try:
            path = own_folder(FOLDER) / name
            file = WeightFile.open(path) or self._make(path, count_bytes(checkpoint, dtype, backend), write)
        except OSError as error:
            way_out = f"{OTHER_CACHE}, or model.weight_cache_bytes to another bound, 0 for no cache"
            logger.warning(
                "this worker has packed weights of its own, in memory that no other shares: %s (%s)", error, way_out
            )
            return load_private(checkpoint, dtype, device, backend)
        with suppress(OSError):  # a read-only folder keeps the former time
            os.utime(path)
        self.mapped_bytes += file.num_bytes
        return loader(file.find).load()

    def _make(self, path: Path, num_bytes: int, write: Callable[[WeightWriter], None]) -> WeightFile:
        """Writes a file, unless another process has done so meanwhile. Raises OSError if it cannot be written."""
        part = path.with_name(PART)
        with locked(path.parent, LOCK_TIMEOUT_S):
            if (made := WeightFile.open(path)) is not None:
                return made
            self._make_room(path.parent, num_bytes)
            try:
                with FileIO(part, "w", opener=_open_private) as file:
                    os.posix_fallocate(file.fileno(), 0, num_bytes)  # a full disk fails before anything is packed
                    write(writer := WeightWriter(file))
                    writer.finish()
                part.replace(path)
            finally:
                part.unlink(missing_ok=True)
            _sync(path.parent)
            if (made := WeightFile.open(path)) is None:
                raise OSError(f"{path} fails its digest right after it was written")
        return made

    def _make_room(self, folder: Path, num_bytes: int) -> None:
        """Evicts files until `num_bytes` fit. Raises OSError if they exceed the cache's bound."""
        if num_bytes > self._max_bytes:
            raise OSError(f"weights of {num_bytes} bytes exceed the cache's bound of {self._max_bytes}")
        kept = sorted((path.stat().st_mtime_ns, path.stat().st_size, path) for path in folder.glob(f"*{SUFFIX}"))
        excess = num_bytes + sum(size for _, size, _ in kept) - self._max_bytes
        for _, size, path in kept:
            if excess <= 0:
                break
            path.unlink()  # a worker that has it mapped keeps its bytes
            excess -= size


def _name(checkpoint: Checkpoint, dtype: torch.dtype, backend: Backend) -> str:
    name = str(dtype).removeprefix("torch.")
    fingerprint = checkpoint.fingerprint(name, backend.version, DigestCache.of_user())
    return hashlib.sha256(fingerprint + backend.name.encode() + _rules()).hexdigest()[:32] + SUFFIX


@cache
def _rules() -> bytes:
    """Digests the sources of RULES."""
    digest = hashlib.sha256()
    for place in RULES:
        for source in sorted((_ROOT / place).rglob("*.py")) or [_ROOT / place]:
            digest.update(source.read_bytes())
    return digest.digest()


def _open_private(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW, 0o600)


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
