"""The compiled code of attention by warp groups: the order of its waits and products, and that it fits a processor."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
COMPILATION_S = 300
pytestmark = pytest.mark.timeout(COMPILATION_S)
EVENTS = {"p": r"\bHGMMA\.", "e": r"\bMUFU\.EX2", "0": r"DEPBAR\.LE gsb0, 0x0", "1": r"DEPBAR\.LE gsb0, 0x1"}
"""Products, exponentials, and waits until so many groups of products are under way."""


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    env |= {"PYTHONPATH": str(ROOT), "TRITON_CACHE_DIR": str(tmp_path_factory.mktemp("triton"))}
    command = [sys.executable, "-m", "tests.kernels.hopper_code", "128", "64"]
    done = subprocess.run(
        command, env=env, cwd=ROOT, capture_output=True, text=True, timeout=COMPILATION_S, check=False
    )
    assert done.returncode == 0, done.stderr
    tiles: dict[str, dict[str, Any]] = json.loads(done.stdout)
    return tiles


def events_of(code: str) -> str:
    """Writes events as letters, in the order of the code, the same in a row once."""
    found = re.finditer("|".join(f"(?P<_{name}>{text})" for name, text in EVENTS.items()), code)
    return re.sub(r"(.)\1+", r"\1", "".join(str(one.lastgroup)[1:] for one in found))


def test_a_warp_group_weighs_a_tile_while_the_sum_of_the_tile_before_is_under_way(
    compiled: dict[str, dict[str, Any]],
) -> None:
    """Both products of a tile are issued before a wait, which leaves one under way; exponentials come before its end.

    Two warp groups have a loop with a mask and one without.
    """
    for tile in compiled.values():
        events = events_of(tile["code"])
        assert (events.count("p1e0"), events.count("1")) == (4, 4)


def test_nothing_is_spilled_and_a_processor_holds_the_program(compiled: dict[str, dict[str, Any]]) -> None:
    for tile in compiled.values():
        assert tile["spilled"] == 0
        assert tile["shared_bytes"] <= 227 << 10
        assert {"56", "224"} <= set(tile["registers"])


def test_steps_of_any_size_launch_one_kernel(compiled: dict[str, dict[str, Any]]) -> None:
    """A launch that is noted is one that its signature compiles, whatever the rows, sequences and blocks."""
    assert [one["num_signatures"] for one in compiled.values()] == [1, 1]
