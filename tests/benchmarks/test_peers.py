"""Figures of the comparison with other engines, prompts, requirements, and the conversion for llama.cpp."""

import json
import os
import sys
from pathlib import Path

import numpy as np
import pytest

from benchmarks.peer_engines import interleave_halves, make_prompts
from benchmarks.peers import (
    Comparison,
    EngineFailed,
    EngineProcess,
    Point,
    describe,
    needed_requirements,
    num_equal,
    rotate,
    summarize,
)

ENGINE = """
import json, sys
print(json.dumps({"version": "1", "settings": "none"}), flush=True)
for number, line in enumerate(sys.stdin):
    batch, prompt_len, num_tokens, seed = map(int, line.split())
    if number == int(sys.argv[1]):
        sys.exit("out of patience")
    print(json.dumps({"seconds": float(num_tokens), "token_ids": [[seed] * num_tokens] * batch}), flush=True)
"""


def start(name: str, folder: Path, dies_at: int = -1) -> EngineProcess:
    command = [sys.executable, "-c", ENGINE, str(dies_at)]
    return EngineProcess(name, command, os.environ, folder / f"{name}.log")


def test_prompts_are_the_same_in_every_process_and_no_two_are_alike() -> None:
    prompts = make_prompts(3, 20, seed=7, vocab_size=100)
    assert prompts == make_prompts(3, 20, seed=7, vocab_size=100)
    assert [len(one) for one in prompts] == [20] * 3
    drawn = prompts + make_prompts(3, 20, seed=8, vocab_size=100)
    assert len({tuple(one) for one in drawn}) == 6
    assert all(0 <= token < 100 for one in drawn for token in one)


def test_rotated_rows_are_the_pairs_of_gguf() -> None:
    rows = np.arange(8, dtype=np.float32)[:, None] * np.ones((1, 3), dtype=np.float32)
    assert interleave_halves(rows, num_heads=2)[:, 0].tolist() == [0, 2, 1, 3, 4, 6, 5, 7]
    assert interleave_halves(rows[:, 0], num_heads=1).tolist() == [0, 4, 1, 5, 2, 6, 3, 7]


@pytest.mark.parametrize(
    ("requirement", "is_needed"),
    [
        ("numpy", True),
        ("torch_geometric>=2", True),
        ('numba==0.65.0; python_version > "3.9"', True),
        ("fastapi[standard]<0.137.0,>=0.133.0", True),
        ('torch==2.13.0+cpu; platform_machine == "x86_64"', False),
        ("torchvision", False),
        ("torchcodec>=0.14", False),
        ('pandas; extra == "bench"', False),
    ],
)
def test_requirements_of_vllm(requirement: str, is_needed: bool) -> None:
    assert needed_requirements([requirement]) == [requirement] * is_needed


def test_summary_of_rounds() -> None:
    rates = {"baton": [10.0, 30.0, 20.0], "vllm": [5.0, 10.0, 5.0], "llamacpp": [10.0, 10.0, 40.0]}
    summary = summarize(rates)
    assert summary["baton"] == {"median": 20.0, "rounds": [10.0, 30.0, 20.0]}
    assert summary["baton_over"] == {"vllm": 3.0, "llamacpp": 1.0, "best": 1.0}
    assert describe(summary) == "baton 20, vllm 5 (3.00), llamacpp 10 (1.00); over the best 1.00"
    json.dumps(summary)


def test_summary_without_peers() -> None:
    assert describe(summarize({"baton": [10.0]})) == "baton 10"


def test_each_engine_is_first_in_turn() -> None:
    names = ["a", "b", "c"]
    assert [rotate(names, steps) for steps in (0, 1, 2, 3)] == [names, ["b", "c", "a"], ["c", "a", "b"], names]


@pytest.mark.parametrize(("others", "expected"), [([1, 2, 3], 3), ([1, 9, 3], 1), ([9, 2, 3], 0), ([1, 2], 2)])
def test_equal_tokens_end_at_the_first_difference(others: list[int], expected: int) -> None:
    assert num_equal([1, 2, 3], others) == expected


def test_a_peer_that_ends_is_left_out(tmp_path: Path) -> None:
    engines = {"baton": start("baton", tmp_path), "vllm": start("vllm", tmp_path, dies_at=3)}
    left_out: dict[str, str] = {}
    points = [Point("decode", 2), Point("prompt", 100)]
    try:
        rates = Comparison(engines, left_out).run(points, num_tokens=11, num_rounds=2)
    finally:
        for engine in engines.values():
            engine.end()
    assert left_out == {"vllm": "out of patience"}
    # Ten further tokens of two requests in ten seconds; a hundred tokens of a prompt in one.
    assert rates == {points[0]: {"baton": [2.0, 2.0]}, points[1]: {"baton": [100.0, 100.0]}}


def test_first_tokens_are_compared_with_baton(tmp_path: Path) -> None:
    engines = {name: start(name, tmp_path) for name in ("baton", "vllm")}
    comparison = Comparison(engines, {})
    try:
        assert comparison.take_turns(Point("decode", 3), 5) == {"baton": 3.0, "vllm": 3.0}
    finally:
        for engine in engines.values():
            engine.end()
    assert comparison.num_first == comparison.num_equal_first["vllm"] == 6


def test_an_engine_that_does_not_load_says_why(tmp_path: Path) -> None:
    with pytest.raises(EngineFailed, match="no such model"):
        EngineProcess("vllm", [sys.executable, "-c", "raise SystemExit('no such model')"], os.environ, tmp_path / "log")
