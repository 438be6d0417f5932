"""What distinguishes one model from another as far as its KV goes."""

import hashlib
from collections.abc import Iterable
from pathlib import Path

from engine.digest_cache import DigestCache


def fingerprint(files: Iterable[Path], dtype: str, backend_version: str, cache: DigestCache) -> bytes:
    """32 bytes: SHA-256 over the names and contents of a model's files, what it computes in, and with which kernels.

    files: configuration (rope is in it), weights and tokenizer; their order does not matter. Blocks for as long as it
    takes to read those that `cache` does not know. Raises ModelError for a file that cannot be read.
    """
    total = hashlib.sha256()
    for file in sorted(files, key=lambda path: path.name):
        total.update(f"{file.name}\0{cache.digest(file)}\0".encode())
    total.update(f"{dtype}\0{backend_version}".encode())
    return total.digest()
