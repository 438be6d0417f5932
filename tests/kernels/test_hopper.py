"""The compiled code of attention by warp groups: the order of its waits and products, and that it fits a processor."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from kernels.attention import prompts
from kernels.backend import AttentionVariant, KVPages
from kernels.tiles import choose_group_tile

CUDA = torch.device("cuda")
ROOT = Path(__file__).parents[2]
COMPILATION_S = 300
pytestmark = pytest.mark.timeout(COMPILATION_S)
EVENTS = {"p": r"\bHGMMA\.", "e": r"\bMUFU\.EX2", "0": r"DEPBAR\.LE gsb0, 0x0", "1": r"DEPBAR\.LE gsb0, 0x1"}
"""Products, exponentials, and waits until so many groups of products are under way."""


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    env |= {"PYTHONPATH": str(ROOT), "TRITON_CACHE_DIR": str(tmp_path_factory.mktemp("triton"))}
    command = [sys.executable, "-m", "tests.kernels.hopper_code"]
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
    assert {head_dim: one["num_signatures"] for head_dim, one in compiled.items()} == {"64": 1, "128": 1}


PLAIN: dict[str, Any] = {"head_dim": 128, "block_size": 16, "dtype": torch.bfloat16, "window": None, "version": "3.6.0"}


@pytest.mark.parametrize(
    ("change", "is_taken"),
    [
        ({}, True),
        ({"head_dim": 64, "dtype": torch.float16, "block_size": 8}, True),
        ({"version": "3.6.1"}, True),
        ({"version": "3.9.0"}, False),
        ({"window": 100}, False),
        ({"dtype": torch.float32}, False),
        ({"head_dim": 96}, False),
        ({"head_dim": 256}, False),
        ({"block_size": 24}, False),
    ],
    ids=str,
)
def test_warp_groups_attend_where_a_device_has_run_them_and_descriptors_load_what_they_read(
    change: dict[str, Any], is_taken: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = PLAIN | change
    monkeypatch.setattr("triton.__version__", given["version"])
    monkeypatch.setattr(prompts, "choose_group_tile", lambda _, head_dim: choose_group_tile(CUDA, head_dim))
    monkeypatch.setattr("kernels.tiles.architecture_of", lambda _: "sm_90")
    head_dim, dtype = given["head_dim"], given["dtype"]
    queries = torch.empty(5, 48, head_dim, dtype=dtype)[:, :32]
    pages = KVPages(torch.empty(3, 2, 2, 8, given["block_size"], head_dim, dtype=dtype)[:, 1])
    tile = prompts.choose_groups(queries, pages, AttentionVariant(0.1, given["window"]))
    assert (tile is not None) is is_taken
    assert choose_group_tile(torch.device("cpu"), head_dim) is None
