"""Figures of disaggregated beside co-located service, computed by hand; a trace cut into rounds; binding to a core."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.baton_service import cpu_s, pin
from benchmarks.disaggregation import Mode, best_chunk_len, compare, parse, require_ended, schedules, tabulate
from cli.bench.latency import LatencyLimits, Record

LIMITS = LatencyLimits(ttft_s=0.5, tpot_s=1.0)
THREADED = """
import threading
import time
threading.Thread(target=threading.Event().wait, daemon=True).start()
while time.process_time() < 0.1:
    pass
print("ready", flush=True)
input()
"""


def record(*times_s: float) -> Record:
    return Record(
        scheduled_s=0.0,
        sent_s=0.0,
        chunks=tuple((at_s, 1) for at_s in times_s),
        ended_s=times_s[-1],
        prompt_len=8,
        cached_len=0,
    )


def mode(*rounds: list[Record]) -> Mode:
    return Mode(list(rounds), {"workers": 2.0, "router": 0.5, "others": 0.0, "client": 0.1})


def test_ratios_of_all_rounds_and_their_spread() -> None:
    base = mode([record(0.1, 0.2, 0.4), record(0.2, 0.4, 1.0)], [record(0.1, 0.9, 1.0)])
    other = mode([record(0.1, 0.5, 0.6), record(0.9, 0.95, 1.0)], [record(0.1, 0.6, 1.0)])
    assert base.running_itl_p99_ms(slice(1, 2)) == pytest.approx(100)
    ratios = compare({"co-located": base, "disaggregated": other}, LIMITS)
    assert ratios["goodput, disaggregated / co-located"] == "0.67 (0.50 .. 1.00)"
    assert ratios["ITL p99 of running decodes, disaggregated / co-located"].endswith("(0.17 .. 4.00)")
    assert ratios["TTFT p50, disaggregated / co-located"] == "1.00 (1.00 .. 3.33)"


@pytest.mark.parametrize(
    ("goodputs", "expected"),
    [({64: 1.3948, 256: 1.3946, 512: 1.3956}, 64), ({64: 1.0, 256: 1.5, 512: 1.2}, 256), ({256: 0.0, 512: 0.0}, 256)],
)
def test_chunks_are_as_small_as_the_best_goodput_lets_them(goodputs: dict[int, float], expected: int) -> None:
    assert best_chunk_len(goodputs) == expected


def test_a_failed_request_ends_a_measurement_with_its_reason() -> None:
    require_ended([record(0.1)])
    failed = replace(record(0.1), chunks=(), error="UNAVAILABLE", reason="no worker")
    with pytest.raises(SystemExit, match="1 of 2 requests failed, the first of 8 tokens: UNAVAILABLE no worker"):
        require_ended([record(0.1), failed])


def test_no_goodput_has_no_ratio() -> None:
    late = mode([record(0.9, 1.0, 1.1)])
    assert "nan" in compare({"co-located": late, "disaggregated": late}, LIMITS)["goodput, disaggregated / co-located"]


def test_table_shows_what_takes_the_cores() -> None:
    # Two seconds of two cores.
    rows = tabulate({"co-located": mode([record(0.1, 1.0)], [record(0.1, 0.2, 1.0)])}, LIMITS)
    assert ["CPU of workers, share of both cores", "50.0%"] in rows
    assert ["CPU of client, share of both cores", "2.5%"] in rows
    assert ["goodput, requests a second", "1.00 (100%)"] in rows


def test_rounds_are_consecutive_parts_of_the_trace(tmp_path: Path) -> None:
    lines = [f"2023-11-16 18:17:{second:02}.0000000,{80 + second},16" for second in range(9)]
    path = tmp_path / "azure.csv"
    path.write_text("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *lines]))
    options = parse(["--trace", str(path), "--rate", "1.5", "--duration", "2", "--rounds", "2", "--length-factor", "1"])
    rounds = [schedule for _, schedule in schedules(options)]
    assert [[len(one.prompt) for one in schedule] for schedule in rounds] == [[80, 81, 82], [83, 84, 85], [86, 87, 88]]
    assert [[one.at_s for one in schedule] for schedule in rounds] == [[0, 1, 2]] * 3


def test_all_threads_of_a_process_are_bound() -> None:
    cpu = max(os.sched_getaffinity(0))
    command = [sys.executable, "-c", THREADED]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        pin(process.pid, cpu)
        threads = [int(path.name) for path in Path(f"/proc/{process.pid}/task").iterdir()]
        assert [os.sched_getaffinity(thread) for thread in threads] == [{cpu}] * 2
        assert cpu_s(process.pid) > 0
        process.communicate("\n", timeout=30)
    assert cpu_s(process.pid) == 0
