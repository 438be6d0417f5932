"""The server's secret, under which all keys of blocks are made. It outlives restarts, so that Redis stays warm."""

import os
import secrets
import tempfile
from pathlib import Path

from deploy.local.state import state_dir
from wire.errors import ConfigError

NUM_BYTES = 32


def load_secret() -> Path:
    """The file with the secret, made at first use: 32 bytes that only its owner can read. Raises ConfigError."""
    path = state_dir() / "secret"
    if not path.exists():
        _create(path)
    if path.stat().st_size != NUM_BYTES or path.stat().st_mode & 0o077:
        raise ConfigError(f"{path} must hold {NUM_BYTES} bytes that only you can read: remove it to get a new one")
    return path


def _create(path: Path) -> None:
    """In one step, so that of two commands that start at once both use the same."""
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=".")
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(secrets.token_bytes(NUM_BYTES))
        os.link(temporary, path)
    except FileExistsError:
        return
    finally:
        os.unlink(temporary)
