"""How a run on a GPU divides its time, and its figures."""

import json
from pathlib import Path

import pytest

from benchmarks.gpu_figures import FILE, Figure, read_figures, read_last, record, write_run
from benchmarks.gpu_plan import Stage, Step, choose, seconds_for_first


def stage(least_s: float, limit_s: float) -> Stage:
    return (Step("a", ("true",), least_s, limit_s),)


@pytest.mark.parametrize(
    ("stages", "left_s", "seconds"),
    [
        pytest.param([(60, 100)], 480, 100, id="its limit"),
        pytest.param([(60, 100)], 70, 70, id="all that is left"),
        pytest.param([(60, 100)], 59, 0, id="too little is left"),
        pytest.param([(60, 100), (30, 90)], 100, 70, id="the next has its least"),
        pytest.param([(60, 100), (30, 90), (20, 20)], 100, 70, id="for the third there is no time"),
        pytest.param(
            [(60, 100), (50, 90), (20, 20)], 100, 80, id="for the second there is none, for the third there is"
        ),
    ],
)
def test_the_first_stage_takes_what_later_ones_do_not_need(
    stages: list[tuple[float, float]], left_s: float, seconds: float
) -> None:
    assert seconds_for_first([stage(*one) for one in stages], left_s) == seconds


def test_a_stage_lasts_as_long_as_its_longest_step() -> None:
    both = (*stage(10, 20), *stage(40, 50))
    assert seconds_for_first([both], 39) == 0
    assert seconds_for_first([both], 100) == 50


def test_an_order_is_read() -> None:
    known = {name: Step(name, ("true",), 1, 2) for name in ("tests", "model", "lab pages")}
    assert choose(known, "tests+ model ,lab pages") == [(known["tests"], known["model"]), (known["lab pages"],)]
    known["pools"] = Step("pools", ("true",), 1, 2, wants="model")
    assert choose(known, "tests, pools") == [(known["tests"],), (known["model"],), (known["pools"],)]
    assert choose(known, "model+tests,pools") == [(known["model"], known["tests"]), (known["pools"],)]
    for wrong, why in (("tests,,model", "no step is called"), ("tests,tests", "twice"), ("pages", "there are tests")):
        with pytest.raises(ValueError, match=why):
            choose(known, wrong)


def test_figures_survive_a_step_that_is_killed_amid_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(FILE, str(tmp_path / "figures"))
    whole = Figure("step 8B", "16 x 1024", 5675.0, "us", "read", 0.7, "cuBLAS", 1.1)
    record(whole)
    with (tmp_path / "figures").open("a") as lines:
        lines.write('{"name": "half')
    assert read_figures(tmp_path / "figures") == [whole]
    assert read_figures(tmp_path / "none") == []


def test_a_run_is_told_beside_the_last_one(tmp_path: Path) -> None:
    before = Figure("step 8B", "16 x 1024", 5000.0, "us")
    write_run(tmp_path / "gpu.json", {"device": "a device"}, {"engine": "ended"}, [before])
    last = read_last(tmp_path / "gpu.json")
    assert last["head"] == {"device": "a device"}
    line = Figure("step 8B", "16 x 1024", 4000.0, "us", "read", 0.91).describe(last["values"][before.key])
    assert line.split() == ["step", "8B", "16", "x", "1024", "4000", "us", "0.80", "0.91", "read"]
    assert read_last(tmp_path / "none") == {"head": {}, "values": {}}


def test_the_last_run_that_was_kept_can_be_read() -> None:
    last = read_last()
    assert last["head"]["device"]
    assert last["values"]["step 8B", "16 x 1024", "us"] > 0
    assert json.dumps(last["head"])
