"""The share of the suite that `bash tests/run.sh --changed` would have run at each of the last commits.

python benchmarks/changed_tests.py --commits 300

Each commit without merges is compared with its parent. A test file counts with the CPU seconds of its folder in a whole
run (docs/decisions/0021), divided equally among the folder's files.
"""

import argparse
import subprocess
import sys
from collections import Counter
from functools import lru_cache
from pathlib import Path
from statistics import mean, median

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tests.changed import Source, Sources, to_run

FOLDER_TO_CPU_S = {
    "cluster": 751,
    "engine": 219,
    "exactness": 218,
    "simulated_gpu": 210,
    "kernels": 164,
    "faults": 109,
    "simulator": 99,
    "local_cluster": 60,
    "others": 250,
}
"""CPU seconds of a whole run, Ray's processes included, on two cores with AVX-512, 26 November 2026."""
NOT_RUN = {"clients", "image", "page"}
ENVIRONMENT = ""


class History:
    """The digests of test files at commits."""

    def __init__(self) -> None:
        command = ["git", "cat-file", "--batch"]
        self._git = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self._parsed: dict[str, Source] = {}

    @lru_cache(8)  # noqa: B019
    def digests(self, commit: str) -> dict[str, str]:
        """Returns the digest of each test file that a plain run runs."""
        rows = (row.partition("\t") for row in git("ls-tree", "-r", commit))
        blobs = {name: described.split()[2] for described, _, name in rows}
        sources = Sources(blobs, lambda name: self._read(blobs[name]), self._parsed)
        return {test: sources.digest(test, ENVIRONMENT) for test in sources.tests if _folder(test) not in NOT_RUN}

    def _read(self, blob: str) -> bytes:
        assert self._git.stdin is not None
        assert self._git.stdout is not None
        self._git.stdin.write(f"{blob}\n".encode())
        self._git.stdin.flush()
        num_bytes = int(self._git.stdout.readline().split()[2])
        return self._git.stdout.read(num_bytes + 1)[:-1]


def git(*arguments: str) -> list[str]:
    return subprocess.check_output(["git", *arguments], cwd=ROOT, text=True).splitlines()


def share(now: dict[str, str], before: dict[str, str]) -> float:
    """Returns the share of a whole run's CPU seconds that the changed tests take."""
    num_files = Counter(_row(test) for test in now)
    seconds = {test: FOLDER_TO_CPU_S[_row(test)] / num_files[_row(test)] for test in now}
    return sum(seconds[test] for test in to_run(now, before)) / sum(seconds.values())


def _folder(test: str) -> str:
    return test.split("/")[1]


def _row(test: str) -> str:
    return _folder(test) if _folder(test) in FOLDER_TO_CPU_S else "others"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--commits", type=int, default=300)
    num_commits = parser.parse_args().commits
    history, shares = History(), []
    for commit in git("rev-list", "--no-merges", f"-n{num_commits}", "HEAD"):
        (parent,) = git("rev-parse", f"{commit}^")
        shares.append(share(history.digests(commit), history.digests(parent)))
    whole = sum(one > 0.98 for one in shares)
    print(f"{len(shares)} commits: mean {mean(shares):.2f}, median {median(shares):.2f}, all tests {whole} times")


if __name__ == "__main__":
    main()
