from hypothesis import given

from decode_worker.lifecycle import DecodeLifecycle
from engine.events import Emitted, Event, Failed, Fetched, Finished, HeldUp, Preempted, Scheduled, Started, TierTokens
from engine.request import ChoiceSoFar, EngineRequest
from engine.schedule.batcher import Gate
from tests.worker.engine_events import ID, Script, assert_ends_once, assert_spans_tile, decodes, outputs, run, updates
from wire.errors import BatonError, Cancelled
from wire.ids import NamespaceRoot
from wire.sampling import FinishReason, Logprobs, SamplingParams
from worker.instructions import AbortInEngine, AddToEngine, Close, ReleaseHold, Send
from worker.lifecycle import Withdrawn
from worker.stopwatch import Span
from worker.update import ChoiceTokens, Update

FETCHED = TierTokens({"host": 40})
LACKING = TierTokens({"host": 32}, computed=8)


def request(num_choices: int = 1) -> EngineRequest:
    choices = tuple(ChoiceSoFar(index, (90, 91)) for index in range(num_choices))
    return EngineRequest(ID, NamespaceRoot(bytes(32)), tuple(range(40)), SamplingParams(), choices)


def lifecycle(num_choices: int = 1) -> DecodeLifecycle:
    return DecodeLifecycle(request(num_choices), arrived_s=0.0, block_size=16)


def test_streams_all_that_is_ready_and_ends_with_the_spans() -> None:
    logprobs = Logprobs(-0.5, ())
    steps: list[list[Event]] = [
        [Scheduled(ID, 0)],
        [Fetched(ID, 0, FETCHED), Started(ID, 0), Emitted(ID, 0, 2, 7, logprobs)],
        [Emitted(ID, 0, 3, 8, logprobs), Finished(ID, 0, FinishReason.STOP, 8)],
    ]
    spans = (
        Span("decode.queue", 0.0, 1000.0),
        Span("decode.fetch", 1000.0, 1000.0, {"tokens_host": 40, "blocks_host": 3}),
        Span("decode.wait_turn", 2000.0, 0.0),
        Span("decode.generate", 2000.0, 1000.0, {"tokens": 2}),
    )
    assert run(lifecycle(), steps) == [
        AddToEngine(request()),
        Send(Update((ChoiceTokens(0, 2, (7,), (logprobs,)),), prompt=FETCHED)),
        ReleaseHold(ID),
        Send(Update((ChoiceTokens(0, 3, (8,), (logprobs,), FinishReason.STOP, 8),), spans=spans)),
        Close(),
    ]


def test_waiting_and_computing_are_phases_of_their_own() -> None:
    steps: list[list[Event]] = [
        [HeldUp(ID, 0, Gate.PAGES)],
        [Scheduled(ID, 0)],
        [Fetched(ID, 0, LACKING)],
        [Started(ID, 0)],
        [Emitted(ID, 0, 2, 7, None), Finished(ID, 0, FinishReason.LENGTH)],
        [],
    ]
    (_, last) = updates(run(lifecycle(), steps))
    assert [(span.name, span.duration_ms) for span in last.spans] == [
        ("decode.queue", 1000.0),
        ("decode.wait_pages", 1000.0),
        ("decode.fetch", 1000.0),
        ("decode.wait_turn", 1000.0),
        ("decode.compute", 1000.0),
        ("decode.generate", 0.0),
    ]
    assert dict(last.spans[4].counts) == {"tokens_computed": 8}


def test_tells_that_all_is_fetched_once_and_then_releases_the_hold() -> None:
    steps: list[list[Event]] = [
        [Scheduled(ID, 0), Fetched(ID, 0, LACKING)],
        [Scheduled(ID, 1), Fetched(ID, 1, FETCHED)],
        [Preempted(ID, 1), Scheduled(ID, 1), Fetched(ID, 1, FETCHED)],
    ]
    assert run(lifecycle(2), steps) == [AddToEngine(request(2)), Send(Update(prompt=LACKING)), ReleaseHold(ID)]


def test_withdrawn_request_leaves_its_hold_to_the_router() -> None:
    error = Cancelled("gone")
    todo = run(lifecycle(), [[Scheduled(ID, 0)], [Withdrawn(error)], [Fetched(ID, 0, FETCHED)]])
    assert todo == [AddToEngine(request()), AbortInEngine(ID), Close(error)]


def test_failed_request_is_closed_after_the_tokens_it_had() -> None:
    error = BatonError("no number")
    todo = run(lifecycle(), [[Emitted(ID, 0, 2, 7, None), Failed(ID, error)]])
    assert todo == [AddToEngine(request()), Send(Update((ChoiceTokens(0, 2, (7,)),))), Close(error)]


@given(decodes())
def test_whatever_the_engine_reports_there_is_one_end(script: Script) -> None:
    todo = run(lifecycle(script.num_choices), script.steps)
    assert_ends_once(todo)
    assert outputs(todo) == script.outputs
    told = [update for update in updates(todo) if update.prompt is not None]
    assert len(told) == todo.count(ReleaseHold(ID)) <= 1
    if todo[-1] == Close():
        assert_spans_tile(updates(todo)[-1], end_s=len(script.steps))
        assert len(told) == 1
