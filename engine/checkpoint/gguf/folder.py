"""The folder of a GGUF file in the user's cache: made once, in a process of its own, named by a digest of the file.

The process that reads a file, which may be hostile, has bounded memory and time. Its output is checked, then renamed to
the folder, so that a folder is whole or absent. Where two processes make the same folder, the first wins.
"""

import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from engine.checkpoint.fingerprint import DigestCache
from engine.checkpoint.gguf import SUFFIX, VERSION, require_gguf
from kernels.user_cache import OTHER_CACHE, user_cache
from wire.errors import ModelError

CONVERSION = "engine.checkpoint.gguf.conversion"
MAX_PARTS = 512
TIMEOUT_S = 600.0
_PART = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf")


def find_parts(path: Path) -> list[Path]:
    """Finds all parts of a model by the given part's name, not by what a link in a hub's cache points to.

    Raises ModelError for a part that is missing or no GGUF file.
    """
    names, match = [path.name], _PART.fullmatch(path.name)
    if match is not None:
        stem, _, count = match.groups()
        if not 0 < int(count) <= MAX_PARTS:
            raise ModelError(f"{path.name}: a model of {int(count)} parts, expected 1 to {MAX_PARTS}")
        names = [f"{stem}-{part + 1:05}-of-{count}{SUFFIX}" for part in range(int(count))]
    parts = [path.parent.resolve() / name for name in names]
    for part in parts:
        require_gguf(part)
    return parts


def folder_of(path: Path) -> Path:
    """Finds the folder of a GGUF file, or makes it. Blocks as long as reading the file twice takes.

    Raises ModelError, naming file, tensor and reason, for a file that cannot be served.
    """
    parts, cache = find_parts(path), DigestCache.of_user()
    content = [[str(part), cache.digest(part)] for part in parts]
    digest = hashlib.sha256(json.dumps([VERSION, content]).encode()).hexdigest()
    folder = user_cache() / "models" / f"{path.stem[:64]}-{digest[:16]}"
    if not folder.is_dir():
        try:
            _make(folder, parts)
        except OSError as error:
            problem = f"{path.name}: its folder cannot be written: {error.strerror}: {OTHER_CACHE}"
            raise ModelError(problem, folder=str(folder)) from error
    return folder


def _make(folder: Path, parts: Sequence[Path]) -> None:
    folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".making-", ignore_cleanup_errors=True) as scratch:
        made = Path(scratch, "folder")
        made.mkdir()
        _run_child(made, parts)
        try:
            made.rename(folder)
        except OSError:
            if not folder.is_dir():  # which another process has made
                raise


def _run_child(made: Path, parts: Sequence[Path]) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, "-m", CONVERSION, str(made), *map(str, parts)]
    try:
        done = subprocess.run(command, env=environment, capture_output=True, timeout=TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired as error:
        raise ModelError(f"{parts[0].name}: not read after {TIMEOUT_S:.0f} s") from error
    if done.returncode:
        try:
            failure = str(json.loads(done.stdout)["failure"])
        except (ValueError, KeyError, TypeError):
            lines = done.stderr.decode(errors="replace").splitlines()
            failure = f"{parts[0].name}: the process that read it ended: {(lines or ['without a word'])[-1][:256]}"
        raise ModelError(failure)
