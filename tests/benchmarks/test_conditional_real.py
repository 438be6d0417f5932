"""Figures of the conditional mode over the better of both others, computed by hand, and the table of all traces."""

from collections import Counter
from types import SimpleNamespace

import pytest

from benchmarks import conditional_real
from benchmarks.conditional_real import IdleTime, num_good, over_the_better, reasons, row, tabulate, ttft_p90_ms
from tests.benchmarks.test_disaggregation import LIMITS, mode, record

GOOD, LATE = record(0.1, 0.5, 1.0), record(0.9, 0.95, 1.0)


def test_the_better_mode_is_that_of_all_rounds() -> None:
    """In the second round alone `never` was better; rounds of it would be others' rounds at times."""
    modes = {
        "always": mode([GOOD, GOOD, GOOD, GOOD], [GOOD, LATE, LATE, LATE]),
        "never": mode([GOOD, LATE, LATE, LATE], [GOOD, GOOD, LATE, LATE]),
        "conditional": mode([GOOD, GOOD, GOOD, LATE], [GOOD, GOOD, LATE, LATE]),
    }
    assert over_the_better(modes, num_good(LIMITS)) == "1.00 (0.75 .. 2.00) of always"


def test_the_better_time_is_the_shorter_one() -> None:
    modes = {"always": mode([GOOD]), "never": mode([LATE]), "conditional": mode([LATE])}
    assert over_the_better(modes, ttft_p90_ms(LIMITS), min) == "9.00 (9.00 .. 9.00) of always"


def test_an_idle_service_is_told_by_what_it_took_beside_its_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten seconds, of which a round took one: 1.2 s of CPU time less its own 0.3 s are 0.9 s of 2 x 9 s."""
    now_s, taken_s = iter([100.0, 110.0]), iter([5.0, 6.2])
    monkeypatch.setattr(conditional_real, "time", SimpleNamespace(monotonic=lambda: next(now_s)))
    service = SimpleNamespace(cpu_s=lambda: {"all": next(taken_s)})
    idle, one = IdleTime({"never": service}), mode([GOOD])  # type: ignore[dict-item]
    one.cpu_s = {"workers": 0.2, "others": 0.1, "client": 4.0}
    assert idle.shares({"never": one}) == pytest.approx({"never": 0.05})


def test_prompts_are_counted_by_the_reason_for_their_pool() -> None:
    kinds = [("prefill", "always", "3.0"), ("decode", "busy", "4.0"), ("prefill", "busy", "2.0")]
    lines = [f'baton_prompt_pools_total{{pool="{pool}",reason="{reason}"}} {num}' for pool, reason, num in kinds]
    assert reasons("\n".join(["# HELP baton_prompt_pools_total Prompts", *lines, "up 1"])) == {"always": 3, "busy": 6}


def test_each_trace_has_its_rows_in_one_table() -> None:
    kept = {
        trace: {
            "rows": [row(trace, "never", mode([GOOD, LATE]), LIMITS, 0.05, Counter(always=2))],
            "figures": {"load": trace},
        }
        for trace in ("code", "conv")
    }
    figures, (_, *rows) = tabulate(kept)
    assert figures == {"code: load": "code", "conv: load": "conv"}
    assert [one[:3] for one in rows] == [[trace, "never", "1 of 2, 0 lost"] for trace in ("code", "conv")]
    assert all(one[-2:] == ["5.0%", "2 always"] for one in rows)
