from hypothesis import given

from engine.events import (
    Failed,
    Fetched,
    Finished,
    HandedOff,
    HeldUp,
    Preempted,
    PromptTokens,
    Scheduled,
    Started,
)
from engine.request import ChoiceSoFar, HandOff
from engine.schedule.batcher import Gate
from prefill_worker.behaviour import PrefillJob
from tests.worker.engine_events import (
    ID,
    Script,
    Told,
    Withdrawn,
    assert_spans_tile,
    end_of,
    hand_offs,
    outputs,
    run,
    source,
    span,
    tokens,
    update,
)
from wire.errors import BatonError, DeadlineExceeded
from wire.ids import NamespaceRoot
from wire.pb import inference_pb2 as pb
from wire.pb import worker_pb2
from wire.sampling import FinishReason, SamplingParams
from worker.convert import ended_with

TIERS = PromptTokens({"device": 16, "host": 20}, computed=4)


def request(num_choices: int = 1) -> HandOff:
    choices = tuple(ChoiceSoFar(index) for index in range(num_choices))
    return HandOff(
        attempt_id=ID,
        root=NamespaceRoot(bytes(32)),
        prompt_ids=tuple(range(40)),
        sampling=SamplingParams(),
        choices=choices,
    )


def job(num_choices: int = 1) -> PrefillJob:
    return PrefillJob(request(num_choices), arrived_s=0.0, block_size=16)


def test_answers_with_the_first_token_once_the_blocks_are_held() -> None:
    (answer,) = run(
        job(),
        [
            [Scheduled(ID, 0)],
            [Fetched(ID, 0, TIERS)],
            [Started(ID, 0)],
            [tokens(0, 0, 77)],
            [],
            [HandedOff(ID, 3)],
        ],
    )
    spans = (
        span("prefill.queue", 0.0, 1000.0),
        span(
            "prefill.fetch",
            1000.0,
            1000.0,
            {"tokens_device": 16, "blocks_device": 1, "tokens_host": 20, "blocks_host": 2},
        ),
        span("prefill.wait_turn", 2000.0, 1000.0),
        span("prefill.compute", 3000.0, 1000.0, {"tokens_computed": 4}),
        span("prefill.publish", 4000.0, 2000.0, {"blocks": 3}),
    )
    assert answer == update(
        choices=[tokens(0, 0, 77)], prompt=source(TIERS), num_held_blocks=3, end=worker_pb2.End(spans=spans)
    )


def test_answers_at_once_if_every_choice_ends_with_its_first_token() -> None:
    steps: list[list[Told]] = [
        [Scheduled(ID, 0), Fetched(ID, 0, TIERS), Started(ID, 0)],
        [tokens(0, 0, 7), Finished(ID, 0, FinishReason.STOP, 7)],
        [Scheduled(ID, 1), Fetched(ID, 1, PromptTokens({"device": 40})), Started(ID, 1)],
        [tokens(1, 0, 8), Finished(ID, 1, FinishReason.LENGTH)],
    ]
    (answer,) = run(job(2), steps)
    assert list(answer.choices) == [
        tokens(0, 0, 7, finish_reason=pb.FINISH_REASON_STOP, stop_token_id=7),
        tokens(1, 0, 8, finish_reason=pb.FINISH_REASON_LENGTH),
    ]
    assert answer.num_held_blocks == 0
    phases = ["prefill.queue", "prefill.fetch", "prefill.wait_turn", "prefill.compute"]
    assert [span.name for span in end_of([answer]).spans] == phases


def test_names_the_gate_at_which_it_waited() -> None:
    steps: list[list[Told]] = [
        [HeldUp(ID, 0, Gate.SLOT)],
        [],
        [HeldUp(ID, 0, Gate.PAGES)],
        [HeldUp(ID, 0, Gate.SLOT)],
        [Scheduled(ID, 0), Fetched(ID, 0, TIERS)],
        [Started(ID, 0), tokens(0, 0, 7)],
        [HandedOff(ID, 3)],
    ]
    end = end_of(run(job(), steps))
    assert [(span.name, span.duration_ms) for span in end.spans] == [
        ("prefill.queue", 1000.0),
        ("prefill.wait_slot", 2000.0),
        ("prefill.wait_pages", 2000.0),
        ("prefill.fetch", 0.0),
        ("prefill.wait_turn", 1000.0),
        ("prefill.compute", 0.0),
        ("prefill.publish", 1000.0),
    ]


def test_usage_is_what_the_leader_first_found() -> None:
    steps: list[list[Told]] = [
        [Scheduled(ID, 0), Fetched(ID, 0, TIERS), Started(ID, 0), Preempted(ID, 0)],
        [Scheduled(ID, 0), Fetched(ID, 0, PromptTokens({"device": 40})), tokens(0, 0, 7)],
        [Scheduled(ID, 1), Fetched(ID, 1, PromptTokens({"device": 40})), tokens(1, 0, 8)],
        [HandedOff(ID, 3)],
    ]
    (answer,) = run(job(2), steps)
    assert answer.prompt == source(TIERS)
    assert dict(end_of([answer]).spans[3].counts) == {"tokens_computed": 4, "preemptions": 1}


def test_a_withdrawn_request_tells_no_token_and_holds_nothing() -> None:
    error = DeadlineExceeded("too late")
    told = run(job(), [[Scheduled(ID, 0)], [tokens(0, 0, 77)], [Withdrawn(error)]])
    assert told == [ended_with(ID, error)]


def test_a_failed_request_ends_with_the_engines_error_and_holds_nothing() -> None:
    error = BatonError("no number")
    assert run(job(), [[Failed(ID, error)]]) == [ended_with(ID, error)]


@given(hand_offs())
def test_whatever_the_engine_reports_there_is_one_update_and_it_is_the_end(script: Script) -> None:
    asked = job(script.num_choices)
    (answer,) = run(asked, script.steps)
    end = end_of([answer])
    assert asked.releases_hold(answer) == end.HasField("error")
    if not end.HasField("error"):
        assert outputs([answer]) == script.outputs
        assert_spans_tile(end, end_s=len(script.steps))
