"""The journal that a worker appends to; tests/router/test_timeline.py has the router's."""

from hypothesis import given
from hypothesis import strategies as st

from tests.worker.engine_events import span
from wire.journal import Journal, Kind, row_of
from wire.pb import worker_pb2


def journal(end: worker_pb2.End, arrived_s: float = 0.0) -> Journal:
    return Journal(end.spans, Kind.QUEUE, "decode", arrived_s)


def test_spans_follow_one_another_in_milliseconds_since_arrival() -> None:
    end = worker_pb2.End()
    told = journal(end, 100.0)
    told.begin(Kind.FETCH, 100.5)
    told.count(blocks=3, bytes=0)
    told.begin(Kind.COMPUTE, 100.75)
    told.count(tokens=1)
    told.count(tokens=2)
    told.close(102.0)
    assert list(end.spans) == [
        span("decode.queue", 0.0, 500.0),
        span("decode.fetch", 500.0, 250.0, {"blocks": 3}),
        span("decode.compute", 750.0, 1250.0, {"tokens": 3}),
    ]


def test_a_span_that_began_later_than_it_ended_takes_no_time() -> None:
    end = worker_pb2.End()
    told = journal(end)
    told.begin(Kind.FETCH, 2.0)
    told.begin(Kind.COMPUTE, 1.5)
    told.close(3.0)
    assert [(one.start_ms, one.duration_ms) for one in end.spans] == [(0.0, 2000.0), (2000.0, 0.0), (2000.0, 1000.0)]


@given(st.lists(st.tuples(st.sampled_from(Kind), st.integers(0, 9))))
def test_spans_leave_no_gap(reached: list[tuple[Kind, int]]) -> None:
    end, now_s = worker_pb2.End(), 0.0
    told = journal(end)
    for kind, passed_s in reached:
        now_s += passed_s
        told.begin(kind, now_s)
    told.close(now_s + 1)
    ends = [one.start_ms + one.duration_ms for one in end.spans]
    assert [one.start_ms for one in end.spans] == [0.0, *ends[:-1]]
    assert ends[-1] == (now_s + 1) * 1000


def test_a_name_of_another_version_has_no_words() -> None:
    assert row_of("decode.compute") is Kind.RECOMPUTE
    assert (row_of("decode.dream").unit, row_of("decode.dream").cause) == ("", "was at {worker}")
