import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.worker.engine_events import span
from wire.journal import Kind
from wire.pools import Role
from worker.job import Stopwatch

PHASES = [kind for kind in Kind if "decode" in kind.places]


def test_phases_follow_one_another_in_milliseconds_since_arrival() -> None:
    stopwatch = Stopwatch(Role.DECODE, 100.0)
    stopwatch.begin_span(Kind.FETCH, 100.5)
    stopwatch.count(blocks=3, bytes=0)
    stopwatch.begin_span(Kind.COMPUTE, 100.75)
    stopwatch.count(tokens=1)
    stopwatch.count(tokens=2)
    assert stopwatch.spans(102.0) == [
        span("decode.queue", 0.0, 500.0),
        span("decode.fetch", 500.0, 250.0, {"blocks": 3}),
        span("decode.compute", 750.0, 1250.0, {"tokens": 3}),
    ]


def test_a_phase_may_be_skipped() -> None:
    stopwatch = Stopwatch(Role.DECODE, 0.0)
    stopwatch.begin_span(Kind.COMPUTE, 1.0)
    assert [span.name for span in stopwatch.spans(2.0)] == ["decode.queue", "decode.compute"]


@pytest.mark.parametrize("name", [Kind.QUEUE, Kind.FETCH])
def test_a_phase_that_was_passed_does_not_come_again(name: Kind) -> None:
    stopwatch = Stopwatch(Role.DECODE, 0.0)
    stopwatch.begin_span(Kind.FETCH, 1.0)
    stopwatch.begin_span(name, 1.5)
    assert [(span.name, span.start_ms) for span in stopwatch.spans(2.0)] == [
        ("decode.queue", 0.0),
        ("decode.fetch", 1000.0),
    ]


@given(st.lists(st.tuples(st.sampled_from(PHASES), st.integers(0, 9))))
def test_spans_leave_no_gap(reached: list[tuple[Kind, int]]) -> None:
    stopwatch, now_s = Stopwatch(Role.DECODE, 0.0), 0.0
    for phase, passed_s in reached:
        now_s += passed_s
        stopwatch.begin_span(phase, now_s)
    spans = stopwatch.spans(now_s + 1)
    ends = [span.start_ms + span.duration_ms for span in spans]
    assert [span.start_ms for span in spans] == [0.0, *ends[:-1]]
    assert ends[-1] == (now_s + 1) * 1000
