import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.observe.timeline import TimelineRecorder
from wire.ids import WorkerId
from wire.journal import Kind
from wire.pb import inference_pb2 as pb

P0, D0 = WorkerId("p0"), WorkerId("d0")


def span(name: str, start_ms: float, duration_ms: float, **counts: int) -> pb.Span:
    return pb.Span(name=name, worker="w", start_ms=start_ms, duration_ms=duration_ms, counts=counts)


def rows(timeline: pb.Timeline) -> list[tuple[str, str, float, float]]:
    return [
        (one.name, one.worker, round(one.start_ms, 3), round(one.start_ms + one.duration_ms, 3))
        for one in timeline.spans
    ]


def test_a_request_through_both_pools() -> None:
    timeline = TimelineRecorder(100.0)
    timeline.record_span(Kind.CHECK, 100.001)
    timeline.record_span(Kind.TOKENIZE, 100.003)
    call = timeline.sent("prefill", P0, 100.004)
    timeline.ended(call, 100.010, [span("prefill.compute", 0.0, 5.0)])
    timeline.record_span(Kind.WAIT_DECODE, 100.012)
    call = timeline.sent("decode", D0, 100.012)
    timeline.ended(call, 100.022, [span("decode.fetch", 0.0, 1.0), span("decode.run", 1.0, 8.0)])
    finished = timeline.finish(100.023)
    assert rows(finished) == [
        ("router.check", "router", 0, 1),
        ("router.tokenize", "router", 1, 3),
        ("router", "router", 3, 4),
        ("prefill.compute", "p0", 4, 9),
        ("network", "router", 9, 10),
        ("router.wait_decode", "router", 10, 12),
        ("decode.fetch", "d0", 12, 13),
        ("decode.run", "d0", 13, 21),
        ("network", "router", 21, 22),
        ("router", "router", 22, 23),
    ]
    assert finished.total_ms == pytest.approx(23)


def test_counts_come_along() -> None:
    timeline = TimelineRecorder(0.0)
    timeline.ended(timeline.sent("decode", D0, 0.0), 0.001, [span("decode.fetch", 0.0, 1.0, blocks_host=3)])
    assert dict(timeline.finish(0.001).spans[0].counts) == {"blocks_host": 3}


def test_a_call_whose_worker_was_lost_stands_as_one() -> None:
    timeline = TimelineRecorder(0.0)
    timeline.ended(timeline.sent("decode", D0, 0.001), 0.005)
    assert rows(timeline.finish(0.006)) == [
        ("router", "router", 0, 1),
        ("decode.call", "d0", 1, 5),
        ("router", "router", 5, 6),
    ]


def test_a_call_that_is_open_ends_with_the_request() -> None:
    timeline = TimelineRecorder(0.0)
    timeline.sent("decode", D0, 0.0)
    assert rows(timeline.finish(0.004)) == [("decode.call", "d0", 0, 4)]


def test_a_worker_cannot_have_taken_longer_than_its_call() -> None:
    timeline = TimelineRecorder(0.0)
    timeline.ended(timeline.sent("decode", D0, 0.0), 0.002, [span("decode.run", 1.0, 50.0), span("late", 70.0, 1.0)])
    finished = timeline.finish(0.003)
    assert max(end for *_, end in rows(finished)) == 3
    assert ("decode.run", "d0", 1, 2) in rows(finished)


def test_a_gap_over_the_end_of_a_call_is_cut_there() -> None:
    timeline = TimelineRecorder(0.0)
    timeline.ended(timeline.sent("prefill", P0, 0.0), 0.003, [span("prefill.compute", 0.0, 1.0)])
    assert rows(timeline.finish(0.005))[1:] == [("network", "router", 1, 3), ("router", "router", 3, 5)]


MS = st.floats(0, 50)


@settings(deadline=None)
@given(st.lists(st.tuples(MS, MS, st.lists(st.tuples(MS, MS), max_size=4)), max_size=4), MS)
def test_every_millisecond_is_covered(
    calls: list[tuple[float, float, list[tuple[float, float]]]], after: float
) -> None:
    timeline, now_ms = TimelineRecorder(0.0), 0.0
    for before_ms, length_ms, spans in calls:
        call = timeline.sent("decode", D0, (now_ms + before_ms) / 1000)
        now_ms += before_ms + length_ms
        timeline.ended(call, now_ms / 1000, [span("s", start, length) for start, length in spans])
    finished = timeline.finish((now_ms + after) / 1000)
    covered_ms = 0.0
    for one in finished.spans:
        assert one.start_ms <= covered_ms + 1e-6
        covered_ms = max(covered_ms, one.start_ms + one.duration_ms)
    assert covered_ms == pytest.approx(finished.total_ms, abs=1e-6)
