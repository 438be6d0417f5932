"""Seeds of tests that draw: half of them fixed, half drawn from a digest of the sources that the tests exercise.

Another commit of the same sources repeats the same seeds. One that fails joins the fixed ones: FAILED_ONCE of its test.
BATON_SEEDS=1000 tries as many in place of the usual number, BATON_SEED=7 that one alone.
"""

import hashlib
import os
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from tests.pairs import RUNS_ALL

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("engine", "kv_store", "prefill_worker", "decode_worker", "router", "text", "wire", "worker")
"""What a cluster in memory is made of."""
NUM_OF_ALL = 1000
MAX_SEED = 1_000_000


def seeds(num: int, failed_once: Sequence[int]) -> list[int]:
    """Returns `num` seeds, and those that failed once."""
    if alone := os.environ.get("BATON_SEED"):
        return [int(alone)]
    num = int(os.environ.get("BATON_SEEDS", NUM_OF_ALL if RUNS_ALL else num))
    drawn = random.Random(digest_of(PACKAGES)).sample(range(num, MAX_SEED), num - num // 2)
    return sorted({*range(1, num // 2 + 1), *failed_once, *drawn})


def digest_of(folders: Sequence[str]) -> bytes:
    """Returns a digest of all Python sources in folders of the repository."""
    digest = hashlib.sha256()
    for path in sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py")):
        digest.update(path.relative_to(ROOT).as_posix().encode() + b"\0" + path.read_bytes())
    return digest.digest()


@contextmanager
def repeated_by(command: str, seed: int) -> Iterator[None]:
    """Adds the command that repeats a seed to whatever fails under it."""
    try:
        yield
    except BaseException as error:
        error.add_note(f"to repeat it: BATON_SEED={seed} {command}; add {seed} to FAILED_ONCE")
        raise
