"""The one command for a machine with a GPU, which has torch, Triton and pytest, and little else."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from benchmarks import gpu
from benchmarks.gpu_plan import Step, choose
from benchmarks.gpu_tests import PYTEST, ROOT, TESTS

ABSENT = ("ray", "redis", "cryptography")
HEAD = {"device": "a device", "date": "2026-11-27 01:00", "commit": "0123abcd", "torch": "2"}
FIGURE = "from benchmarks.gpu_figures import Figure, record; record(Figure('step', '1 x 1', {value}, 'us'))"


def test_its_tests_load_without_ray_redis_and_cryptography(tmp_path: Path) -> None:
    for name in ABSENT:
        (tmp_path / f"{name}.py").write_text(f"raise ModuleNotFoundError('no {name} here')\n")
    command = [sys.executable, "-m", "pytest", *PYTEST, "--collect-only", *TESTS]
    env = os.environ | {"PYTHONPATH": str(tmp_path)}
    collected = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=100, check=False)
    assert collected.returncode == 0, collected.stdout + collected.stderr
    assert "tests/kernels/test_paged_decode.py" in collected.stdout


def run(folder: Path, *stages: tuple[Step, ...], seconds: float = 60.0) -> tuple[int, dict[str, object]]:
    status = gpu.Run(HEAD, stages, seconds, folder).run()
    return status, json.loads((folder / "gpu.json").read_text())


def step(name: str, code: str, limit_s: float = 30.0, least_s: float = 0.1, grace_s: float = 0.2) -> Step:
    return Step(name, (sys.executable, "-u", "-c", code), least_s, limit_s, grace_s)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("OUT", str(tmp_path))
    return tmp_path


def test_a_step_that_fails_crashes_or_hangs_takes_no_other_along(
    folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    hangs = f"{FIGURE.format(value=2)}; import time; print('on my way'); time.sleep(60)"
    status, kept = run(
        folder,
        (step("fails", "raise SystemExit(3)"),),
        (step("crashes", "import os; os.abort()"),),
        (step("hangs", hangs, limit_s=3.0),),
        (step("works", FIGURE.format(value=8)),),
    )
    assert status == 1
    how = {name: words.partition(" after ")[0] for name, words in kept["steps"].items()}  # type: ignore[attr-defined]
    abort = f"failed with -{signal.SIGABRT.value}"
    assert how == {"fails": "failed with 3", "crashes": abort, "hangs": "stopped at its limit", "works": "ended"}
    assert [one["value"] for one in kept["figures"]] == [2, 8]  # type: ignore[attr-defined]
    assert kept["commit"] == "0123abcd"
    told = capfd.readouterr().out
    assert "on my way" in told
    assert told.index("on my way") < told.index("##### works")


def test_a_step_for_which_no_time_is_left_is_skipped_and_says_so(
    folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    status, kept = run(folder, (step("long", "", least_s=99),), (step("short", "print('ran')"),), seconds=20.0)
    assert status == 0
    assert "SKIPPED for time: long" in capfd.readouterr().out
    steps = kept["steps"]
    assert isinstance(steps, dict)
    assert steps["long"].startswith("skipped: ")
    assert steps["short"].startswith("ended after ")


def test_what_a_stopped_step_has_started_is_ended_with_it(folder: Path) -> None:
    """A child in the step's session is killed, and its `after` ends what is in a session of its own."""
    child = folder / "pid"
    code = (
        "import signal, subprocess, sys, time; signal.signal(signal.SIGTERM, signal.SIG_IGN);"
        f"p = subprocess.Popen(['sleep', '60']); open({str(child)!r}, 'w').write(str(p.pid)); time.sleep(60)"
    )
    after = (sys.executable, "-c", f"open({str(folder / 'after')!r}, 'w').write('done')")
    stubborn = Step("stubborn", (sys.executable, "-c", code), 0.1, 3.0, 0.2, after)
    begun_s = time.monotonic()
    assert run(folder, (stubborn,))[0] == 1
    assert time.monotonic() - begun_s < 20
    assert (folder / "after").read_text() == "done"
    pid = int(child.read_text())
    assert not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


INTERRUPTED = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background has it ignored
from pathlib import Path
from benchmarks import gpu
from benchmarks.gpu_plan import Step
here = Path(sys.argv[1])
own = f"import os, time; open('{here / 'pid'}', 'w').write(str(os.getpid())); time.sleep(60)"
codes = {"sleeps": own, "never begins": f"open('{here / 'begun'}', 'w')"}
steps = [Step(name, (sys.executable, "-u", "-c", code), 0.1, 30.0, 0.2) for name, code in codes.items()]
gpu.Run({}, [(step,) for step in steps], 60.0, here).run()
"""


def test_an_interrupted_run_ends_its_steps(folder: Path) -> None:
    """The run is a process of its own: this one's threads have other uses for a signal."""
    command = [sys.executable, "-c", INTERRUPTED, str(folder)]
    with subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True) as running:
        while not (folder / "pid").exists() or not (folder / "pid").read_text():
            assert running.poll() is None
            time.sleep(0.01)
        running.send_signal(signal.SIGINT)
        _, told = running.communicate(timeout=20)
    assert running.returncode == -signal.SIGINT
    assert "KeyboardInterrupt" in told
    assert not psutil.pid_exists(int((folder / "pid").read_text()))
    assert not (folder / "begun").exists()


def test_steps_of_a_stage_run_side_by_side_and_say_which_they_are(
    folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Each waits for the other's file."""
    code = (
        "import pathlib, sys, time; here = pathlib.Path({folder!r}); (here / '{own}').touch()\n"
        "while not (here / '{other}').exists(): time.sleep(0.01)\nprint('met {other}')"
    )
    pair = [step(own, code.format(folder=str(folder), own=own, other=other)) for own, other in ("ab", "ba")]
    assert run(folder, tuple(pair))[0] == 0
    told = capfd.readouterr().out
    assert "a: met b" in told
    assert "b: met a" in told


def test_without_a_device_the_command_says_so_and_ends_well(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(gpu, "read_head", lambda: HEAD | {"device": ""})
    monkeypatch.setattr(sys, "argv", ["gpu.py", "--minutes", "1"])
    assert gpu.main() == 0
    assert capsys.readouterr().out == "no CUDA device here: nothing to measure\n"


def test_a_step_that_there_is_not_is_refused_by_name(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(gpu, "read_head", lambda: HEAD)
    monkeypatch.setattr(sys, "argv", ["gpu.py", "--steps", "tests, pool"])
    with pytest.raises(SystemExit, match="2"):
        gpu.main()
    assert "no step is called 'pool': there are tests, model, killed float32" in capsys.readouterr().err


def test_commands_of_steps_are_scripts_that_there_are() -> None:
    """Whatever is asked of the scripts in the default order, they know."""
    for rehearsed in ([], ["--rehearse"]):
        options = gpu.make_parser().parse_args(rehearsed)
        known = gpu.make_steps(options, Path("/tmp"))
        for stage in choose(known, gpu.ORDER):
            for one in stage:
                assert Path(one.command[2]).is_file()
                assert one.least_s <= one.limit_s
