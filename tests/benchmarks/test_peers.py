"""Figures of the comparison with other engines, prompts, requirements, and the conversion for llama.cpp."""

import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import pytest

from benchmarks.gguf_file import interleave_halves
from benchmarks.peer_engines import Baton, TokenLog, make_prompts
from benchmarks.peer_figures import describe, num_refused, summarize
from benchmarks.peer_installs import INSTALLERS, environment_of, kernels_env, needed_requirements
from benchmarks.peer_process import Answer, EngineFailed, EngineProcess
from benchmarks.peers import PEERS, Comparison, Launcher, Point, default_cache, main, num_equal, parse, rotate
from tests.harness.checkpoints import make_checkpoint

ENGINE = """
import json, sys
print(json.dumps({"version": "1", "settings": "none"}), flush=True)
for number, line in enumerate(sys.stdin):
    batch, prompt_len, num_tokens, seed = map(int, line.split())
    if number == int(sys.argv[1]):
        sys.exit("out of patience")
    # A prompt takes three seconds the first time and one later; each further token of a request takes half a second.
    times_s = [(1.0 if number else 3.0) + at / 2 for at in range(num_tokens)]
    print(json.dumps({"token_ids": [[seed] * num_tokens] * batch, "times_s": [times_s] * batch}), flush=True)
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
    rates = {"baton": [20.0, 22.0, 21.0], "vllm": [10.0, 11.0, 10.0], "openvino-int4": [40.0, 44.0, 40.0]}
    summary = summarize(rates)
    assert summary["baton"] == {"median": 21.0, "spread": pytest.approx(0.1), "rounds": [20.0, 22.0, 21.0]}
    assert summary["baton_over"] == {"vllm": 2.0, "openvino-int4": 0.5, "best": 2.0}
    assert num_refused([summary]) == 0
    assert describe(summary) == (
        "baton 21 [20 22 21: 10%], vllm 10 (2.00) [10 11 10: 10%], openvino-int4 40 (0.50) [40 44 40: 10%]; "
        "over the best 2.00"
    )
    json.dumps(summary)


def test_a_figure_whose_rounds_differ_by_more_than_a_fifth_is_refused_with_its_ratios() -> None:
    steady, wild = [10.0, 12.0], [10.0, 12.1]
    summary = summarize({"baton": steady, "vllm": wild, "llamacpp": steady})
    assert summary["vllm"] == {"median": None, "spread": pytest.approx(0.21), "rounds": wild}
    assert summary["baton_over"] == {"llamacpp": 1.0, "best": 1.0}
    assert describe(summary) == (
        "baton 11 [10 12: 20%], vllm refused [10 12.1: 21%], llamacpp 11 (1.00) [10 12: 20%]; over the best 1.00"
    )
    without_baton = summarize({"baton": wild, "vllm": steady})
    assert without_baton["baton_over"] == {}
    assert num_refused([summary, without_baton]) == 2


def test_summary_without_peers() -> None:
    assert describe(summarize({"baton": [10.0, 10.0]})) == "baton 10 [10 10: 0%]"


def test_one_round_shows_no_spread_and_is_refused() -> None:
    assert parse(["--rounds", "2"]).rounds == 2
    with pytest.raises(SystemExit):
        parse(["--rounds", "1"])


def test_a_run_with_a_refused_figure_says_so_by_its_exit_status(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    figures = {"decode": {"1": summarize({"baton": [1.0, 2.0]})}, "prompt": {}}
    monkeypatch.setattr("benchmarks.peers.compare", lambda options, scratch: figures)
    monkeypatch.setattr("benchmarks.peers.tabulate", lambda figures: {})
    monkeypatch.setattr("benchmarks.peers.write_result", lambda *arguments: None)
    monkeypatch.setattr("benchmarks.peers.signal.signal", lambda *arguments: None)
    monkeypatch.setattr(sys, "argv", ["peers.py"])
    with pytest.raises(SystemExit, match="1 figures are refused: their rounds differ by more than 20%"):
        main()


def test_decode_speed_is_of_the_time_in_which_all_requests_decode() -> None:
    """The second prompt is done at 10 s, the first request ends at 12 s: each has a token a second between."""
    first = [1.0, 1.5, 2.0, 10.0, 11.0, 12.0]
    second = [10.0, 11.0, 12.0, 12.1, 12.2]
    assert Answer([[0] * 6, [0] * 5], [first, second]).decode_rate == pytest.approx(2.0)


def test_work_before_the_first_token_is_in_no_decode_speed() -> None:
    for start_s in (0.1, 50.0):
        times = [[start_s + at / 4 for at in range(9)] for _ in range(3)]
        assert Answer([[0] * 9] * 3, times).decode_rate == pytest.approx(12.0)


def test_without_a_time_in_which_all_decode_there_is_no_speed() -> None:
    with pytest.raises(EngineFailed, match="at no time did all requests decode together"):
        _ = Answer([[0, 0], [0, 0]], [[1.0, 2.0], [3.0, 4.0]]).decode_rate


def test_tokens_of_a_step_have_one_time_from_the_start_of_the_work(monkeypatch: pytest.MonkeyPatch) -> None:
    clock_s = iter([100.0, 101.0, 103.0])
    monkeypatch.setattr("benchmarks.peer_engines.time.perf_counter", lambda: next(clock_s))
    log = TokenLog(2)
    log.start()
    log.add_step([(0, 7), (1, 8)])
    log.add_step([(1, 9)])
    log.add(0, [5, 6], [102.0, 104.0])
    assert log.token_ids == [[7, 5, 6], [8, 9]]
    assert log.times_s == [[1.0, 2.0, 4.0], [1.0, 3.0]]


def test_batons_tokens_have_times_that_rise(tmp_path: Path) -> None:
    log = TokenLog(3)
    Baton(make_checkpoint("llama-gqa", tmp_path), 1, "float32").generate(make_prompts(3, 20, 1, 256), 5, log)
    assert [len(ids) for ids in log.token_ids] == [len(times) for times in log.times_s] == [5] * 3
    assert all(times[0] > 0 and times == sorted(set(times)) for times in log.times_s)
    assert Answer(log.token_ids, log.times_s).decode_rate > 0


def test_batons_kernels_are_the_named_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in kernels_env("torch").items():
        monkeypatch.setenv(name, value)
    assert "torch-" in Baton(make_checkpoint("llama-gqa", tmp_path), 1, "float32").settings


@pytest.mark.parametrize("isa", ["avx2", "reproducible_avx2"])
def test_beside_kernels_of_avx2_peers_are_held_to_it(isa: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert kernels_env(isa)["ONEDNN_MAX_CPU_ISA"] == "AVX2"
    assert "ONEDNN_MAX_CPU_ISA" not in kernels_env("avx512")
    assert environment_of("llamacpp", isa) != environment_of("llamacpp", "auto") == "llamacpp"
    assert environment_of("openvino", isa) == "openvino"
    flags: dict[str, str] = {}

    def run(command: Sequence[str], variables: Mapping[str, str] = flags) -> str:
        flags.update(variables)
        return ""

    monkeypatch.setattr("benchmarks.peer_installs._run", run)
    (venv := tmp_path / environment_of("llamacpp", isa)).mkdir()
    INSTALLERS[venv.name](venv)
    assert {"-DGGML_NATIVE=OFF", "-DGGML_AVX2=ON", "-DGGML_AVX512=OFF"} <= set(flags["CMAKE_ARGS"].split())


def test_the_last_line_of_a_failure_is_its_reason_not_a_destructors(tmp_path: Path) -> None:
    source = """
import atexit, sys
from benchmarks.peer_engines import end_at_once
atexit.register(lambda: print("leaked blocks", file=sys.stderr))
def work():
    raise RuntimeError("no such primitive")
end_at_once(work)
"""
    with pytest.raises(EngineFailed, match="RuntimeError: no such primitive"):
        EngineProcess("openvino", [sys.executable, "-c", source], os.environ, tmp_path / "log")


@pytest.mark.parametrize(
    "name", [pytest.param(one, marks=[] if one == "transformers" else pytest.mark.real) for one in PEERS]
)
def test_each_installed_peer_answers_one_request_and_32_at_once(tmp_path: Path, name: str) -> None:
    """Its objects are not ours: only a run shows that they have the attributes that are read."""
    kind, venvs = name.partition("-")[0], default_cache()
    if kind in INSTALLERS and not (venvs / kind / "baton-peers-complete").exists():
        pytest.skip(f"{kind} is not installed in {venvs}: benchmarks/peers.py makes its environment")
    launcher = Launcher(make_checkpoint("llama-gqa", tmp_path / "model"), venvs, 1, tmp_path)
    with launcher.start(name, "float32") as engine:
        for batch in (1, 32):
            answer = engine.ask(batch, 20, 2, seed=batch)
            assert [len(ids) for ids in answer.token_ids] == [len(times) for times in answer.times_s] == [2] * batch


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
    # A token of each of two requests in half a second; a hundred tokens of a prompt in one.
    assert rates == {points[0]: {"baton": [4.0, 4.0]}, points[1]: {"baton": [100.0, 100.0]}}


def test_first_tokens_are_compared_with_baton(tmp_path: Path) -> None:
    engines = {name: start(name, tmp_path) for name in ("baton", "vllm")}
    comparison = Comparison(engines, {})
    try:
        assert comparison.take_turns(Point("decode", 3), 5) == {"baton": 6.0, "vllm": 6.0}
    finally:
        for engine in engines.values():
            engine.end()
    assert comparison.num_first == comparison.num_equal_first["vllm"] == 3


def test_an_engine_that_does_not_load_says_why(tmp_path: Path) -> None:
    with pytest.raises(EngineFailed, match="no such model"):
        EngineProcess("vllm", [sys.executable, "-c", "raise SystemExit('no such model')"], os.environ, tmp_path / "log")


def test_an_engine_that_reads_gguf_gets_the_files_folder_and_others_the_plain_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: dict[str, Sequence[str]] = {}

    class Started:
        def __init__(self, name: str, command: Sequence[str], *_: object) -> None:
            started[name] = command

        def end(self) -> None: ...

    monkeypatch.setattr("benchmarks.peers.EngineProcess", Started)
    monkeypatch.setattr("benchmarks.peers.INSTALLERS", {"llamacpp": lambda venv: venv / "bin" / "python"})
    launcher = Launcher(tmp_path / "file", tmp_path, 2, tmp_path, tmp_path / "plain")
    for name in ("baton", "llamacpp", "baton-bfloat16", "transformers"):
        with launcher.start(name, "bfloat16"):
            pass
    folders = {name: Path(command[-3]).name for name, command in started.items()}
    assert folders == {"baton": "file", "llamacpp": "file", "baton-bfloat16": "plain", "transformers": "plain"}
