import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.observe.journal import RequestJournal
from wire.ids import QualifiedId, WorkerId
from wire.journal import Kind
from wire.pb import inference_pb2 as pb
from wire.pb import worker_pb2
from wire.pools import Role

P0, D0 = WorkerId("p0"), WorkerId("d0")


def span(name: str, start_ms: float, duration_ms: float, **counts: int) -> pb.Span:
    return pb.Span(name=name, worker="w", start_ms=start_ms, duration_ms=duration_ms, counts=counts)


def rows(timeline: pb.Timeline) -> list[tuple[str, str, float, float]]:
    return [
        (one.name, one.worker, round(one.start_ms, 3), round(one.start_ms + one.duration_ms, 3))
        for one in timeline.spans
    ]


def journal_of(arrived_s: float = 0.0) -> RequestJournal:
    return RequestJournal(QualifiedId("r"), arrived_s)


def ended(journal: RequestJournal, now_s: float) -> pb.Timeline:
    journal.end(pb.Complete(), now_s)
    return journal.timeline


def test_a_request_through_both_pools() -> None:
    journal = journal_of(100.0)
    journal.begin(Kind.TOKENIZE, 100.001)
    journal.begin_attempt(100.003)
    journal.call(Role.PREFILL, P0, 100.004)
    journal.end_call(100.010, [span("prefill.compute", 0.0, 5.0)])
    journal.begin(Kind.WAIT_DECODE, 100.011)
    journal.leave(100.012)
    journal.call(Role.DECODE, D0, 100.012)
    journal.end_call(100.022, [span("decode.fetch", 0.0, 1.0), span("decode.run", 1.0, 8.0)])
    timeline = ended(journal, 100.023)
    assert rows(timeline) == [
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
    assert timeline.total_ms == pytest.approx(23)
    assert (timeline.prefill_worker, timeline.decode_worker) == (P0, D0)
    assert journal.attempts_ms == pytest.approx([3])


def test_counts_come_along() -> None:
    journal = journal_of()
    journal.call(Role.DECODE, D0, 0.0)
    [fetch] = journal.end_call(0.001, [span("decode.fetch", 0.0, 1.0, blocks_host=3)])
    assert dict(fetch.counts) == {"blocks_host": 3}
    assert journal.total("blocks_host") == 3


def test_a_call_whose_worker_was_lost_stands_as_one() -> None:
    journal = journal_of()
    journal.begin_attempt(0.0)
    journal.call(Role.DECODE, D0, 0.001)
    [call] = journal.end_call(0.005, error="UNAVAILABLE")
    assert call.error == "UNAVAILABLE"
    assert journal.at == "decode.call", "what follows a call is no step"
    assert rows(ended(journal, 0.006))[1:] == [
        ("router", "router", 0, 1),
        ("decode.call", "d0", 1, 5),
        ("router", "router", 5, 6),
    ]


def test_the_last_span_of_a_lost_worker_has_its_error() -> None:
    journal = journal_of()
    journal.call(Role.DECODE, D0, 0.0)
    journal.end_call(0.005, [span("decode.queue", 0.0, 1.0), span("decode.fetch", 1.0, 2.0)], "CANCELLED")
    named = [(one.name, one.error) for one in ended(journal, 0.006).spans if one.worker == D0]
    assert named == [("decode.queue", ""), ("decode.fetch", "CANCELLED")]


def test_a_request_that_ends_at_a_gate_shows_it() -> None:
    journal = journal_of()
    journal.begin_attempt(0.001)
    journal.begin(Kind.WAIT_ROOM, 0.002)
    timeline = ended(journal, 0.009)
    assert rows(timeline) == [("router.check", "router", 0, 1), ("router.wait_room", "router", 1, 9)]
    assert journal.at == "router.wait_room"
    assert journal.waits_s == pytest.approx({"router.wait_room": 0.008})


def test_a_step_that_was_none_leaves_its_time_to_the_next() -> None:
    journal = journal_of()
    journal.begin(Kind.GRAMMAR, 0.001)
    journal.pass_on()
    journal.begin(Kind.WAIT_TOKENIZER, 0.002)
    assert rows(ended(journal, 0.003))[1:] == [("router.wait_tokenizer", "router", 1, 3)]


def test_a_call_that_is_open_ends_with_the_request() -> None:
    journal = journal_of()
    journal.call(Role.DECODE, D0, 0.0)
    assert rows(ended(journal, 0.004))[1:] == [("decode.call", "d0", 0, 4)]


def test_a_worker_cannot_have_taken_longer_than_its_call() -> None:
    journal = journal_of()
    journal.call(Role.DECODE, D0, 0.0)
    journal.end_call(0.002, [span("decode.run", 1.0, 50.0), span("late", 70.0, 1.0)])
    timeline = ended(journal, 0.003)
    assert max(end for *_, end in rows(timeline)) == 3
    assert ("decode.run", "d0", 1, 2) in rows(timeline)


def test_a_prompt_that_is_computed_anew_forgets_what_was_found() -> None:
    journal = journal_of()
    journal.plan("always")
    journal.call(Role.PREFILL, P0, 0.0)
    journal.source = worker_pb2.PromptSource(cached_tokens=[pb.TierTokens(tier="host", tokens=32)])
    assert (journal.cached, journal.timeline.prefill_worker) == ({"host": 32}, P0)
    journal.plan("no_prefill_worker")
    assert (journal.cached, journal.timeline.prefill_worker) == ({}, "")


MS = st.floats(0, 50)


@settings(deadline=None)
@given(st.lists(st.tuples(MS, MS, st.lists(st.tuples(MS, MS), max_size=4)), max_size=4), MS)
def test_every_millisecond_is_covered(
    calls: list[tuple[float, float, list[tuple[float, float]]]], after: float
) -> None:
    journal, now_ms = journal_of(), 0.0
    for before_ms, length_ms, spans in calls:
        journal.call(Role.DECODE, D0, (now_ms + before_ms) / 1000)
        now_ms += before_ms + length_ms
        journal.end_call(now_ms / 1000, [span("s", start, length) for start, length in spans])
    timeline = ended(journal, (now_ms + after) / 1000)
    reached_ms = 0.0
    for one in timeline.spans:
        assert one.start_ms == pytest.approx(reached_ms, abs=1e-6), "neither a gap nor an overlap"
        reached_ms = one.start_ms + one.duration_ms
    assert reached_ms == pytest.approx(timeline.total_ms, abs=1e-6)
