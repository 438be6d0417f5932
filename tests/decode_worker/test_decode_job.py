from hypothesis import given

from decode_worker.behaviour import DecodeJob
from engine.events import Drafted, Failed, Fetched, Finished, HeldUp, Preempted, PromptTokens, Scheduled, Started
from engine.request import ChoiceSoFar, EngineRequest
from engine.schedule.batcher import Gate
from tests.worker.engine_events import (
    ID,
    Script,
    Told,
    Withdrawn,
    assert_spans_tile,
    decodes,
    end_of,
    outputs,
    run,
    source,
    span,
    tokens,
    update,
)
from wire.errors import BatonError, Cancelled
from wire.ids import NamespaceRoot
from wire.pb import inference_pb2 as pb
from wire.pb import worker_pb2
from wire.sampling import FinishReason, SamplingParams
from worker.convert import ended_with

FETCHED = PromptTokens({"host": 40})
LACKING = PromptTokens({"host": 32}, computed=8)


def request(num_choices: int = 1) -> EngineRequest:
    choices = tuple(ChoiceSoFar(index, (90, 91)) for index in range(num_choices))
    return EngineRequest(
        attempt_id=ID,
        root=NamespaceRoot(bytes(32)),
        prompt_ids=tuple(range(40)),
        sampling=SamplingParams(),
        choices=choices,
    )


def job(num_choices: int = 1) -> DecodeJob:
    return DecodeJob(request(num_choices), arrived_s=0.0, block_size=16)


def test_streams_all_that_is_ready_and_ends_with_the_spans() -> None:
    steps: list[list[Told]] = [
        [Scheduled(ID, 0)],
        [Fetched(ID, 0, FETCHED), Started(ID, 0), tokens(0, 2, 7)],
        [tokens(0, 3, 8), Finished(ID, 0, FinishReason.STOP, 8)],
    ]
    spans = (
        span("decode.queue", 0.0, 1000.0),
        span("decode.fetch", 1000.0, 1000.0, {"tokens_host": 40, "blocks_host": 3}),
        span("decode.wait_turn", 2000.0, 0.0),
        span("decode.generate", 2000.0, 1000.0, {"tokens": 2}),
    )
    assert run(job(), steps) == [
        update(choices=[tokens(0, 2, 7)], prompt=source(FETCHED)),
        update(
            choices=[tokens(0, 3, 8, finish_reason=pb.FINISH_REASON_STOP, stop_token_id=8)],
            end=worker_pb2.End(spans=spans),
        ),
    ]


def test_waiting_and_computing_are_phases_of_their_own() -> None:
    steps: list[list[Told]] = [
        [HeldUp(ID, 0, Gate.PAGES)],
        [Scheduled(ID, 0)],
        [Fetched(ID, 0, LACKING)],
        [Started(ID, 0)],
        [tokens(0, 2, 7), Finished(ID, 0, FinishReason.LENGTH)],
        [],
    ]
    end = end_of(run(job(), steps))
    assert [(span.name, span.duration_ms) for span in end.spans] == [
        ("decode.queue", 1000.0),
        ("decode.wait_pages", 1000.0),
        ("decode.fetch", 1000.0),
        ("decode.wait_turn", 1000.0),
        ("decode.compute", 1000.0),
        ("decode.generate", 0.0),
    ]
    assert dict(end.spans[4].counts) == {"tokens_computed": 8}


def test_tells_that_all_is_fetched_once_and_then_releases_the_hold() -> None:
    steps: list[list[Told]] = [
        [Scheduled(ID, 0), Fetched(ID, 0, LACKING)],
        [Scheduled(ID, 1), Fetched(ID, 1, FETCHED)],
        [Preempted(ID, 1), Scheduled(ID, 1), Fetched(ID, 1, FETCHED)],
    ]
    assert run(job(2), steps) == [update(prompt=source(LACKING))]


def test_counts_what_was_guessed_and_what_of_it_came_true() -> None:
    steps: list[list[Told]] = [
        [Scheduled(ID, 0), Fetched(ID, 0, FETCHED), Started(ID, 0)],
        [tokens(0, 0, 6), tokens(0, 1, 7, 8), Drafted(ID, 0, 5, 1), Drafted(ID, 0, 2, 2)],
        [Finished(ID, 0, FinishReason.LENGTH)],
    ]
    end = run(job(), steps)[-1].end
    assert (end.spans[-1].counts["tokens_guessed"], end.spans[-1].counts["tokens_accepted"]) == (7, 3)


def test_a_withdrawn_request_leaves_its_hold_to_the_router() -> None:
    error = Cancelled("gone")
    assert run(job(), [[Scheduled(ID, 0)], [Withdrawn(error)]]) == [ended_with(ID, error)]


def test_a_failed_request_ends_after_the_tokens_it_had() -> None:
    error = BatonError("no number")
    told = run(job(), [[tokens(0, 2, 7), Failed(ID, error)]])
    assert told == [update(choices=[tokens(0, 2, 7)], end=ended_with(ID, error).end)]


@given(decodes())
def test_whatever_the_engine_reports_there_is_one_end(script: Script) -> None:
    asked = job(script.num_choices)
    told = run(asked, script.steps)
    end = end_of(told)
    assert outputs(told) == script.outputs
    fetched = [update for update in told if update.HasField("prompt")]
    assert len(fetched) <= 1
    assert fetched == [update for update in told if asked.releases_hold(update)]
    if not end.HasField("error"):
        assert_spans_tile(end, end_s=len(script.steps))
        assert len(fetched) == 1
