from dataclasses import replace

import pytest

from decode_worker.behaviour import DecodeJob
from engine.events import Event, Fetched, HeldUp, Jumped, Preempted, PromptTokens, Scheduled, Started
from engine.request import ChoiceSoFar, EngineRequest
from engine.schedule.batcher import Gate
from wire.ids import AttemptId, NamespaceRoot
from wire.pb import inference_pb2 as pb
from wire.sampling import SamplingParams
from wire.tier import Cause, Miss, MissRun
from worker.job import Job

ID = AttemptId("request")
CHOICES = (ChoiceSoFar(1), ChoiceSoFar(2))
FOUND = PromptTokens({"device": 16, "host": 20})
LACKING = PromptTokens({"device": 16}, computed=24)


def note(*events: Event) -> Job:
    """The events come a second apart, from 1 s on. The leader is choice 1."""
    job = DecodeJob(
        EngineRequest(
            attempt_id=ID, root=NamespaceRoot(bytes(32)), prompt_ids=(1,), sampling=SamplingParams(), choices=CHOICES
        ),
        0.0,
        block_size=16,
    )
    for now_s, event in enumerate(events, start=1):
        job.note(event, float(now_s))
    return job


def spans(job: Job, now_s: float) -> list[pb.Span]:
    job.journal.close(now_s)
    return list(job.end.spans)


@pytest.mark.parametrize(("tokens", "phase"), [(LACKING, "decode.compute"), (FOUND, "decode.generate")])
def test_what_is_missing_is_computed_before_the_role_has_its_turn(tokens: PromptTokens, phase: str) -> None:
    job = note(HeldUp(ID, 1, Gate.SLOT), Scheduled(ID, 1), Fetched(ID, 1, tokens), Started(ID, 1))
    assert job.tokens == tokens
    assert [span.name for span in spans(job, 5.0)] == [
        "decode.queue",
        "decode.wait_slot",
        "decode.fetch",
        "decode.wait_turn",
        phase,
    ]


def test_only_the_leader_says_where_the_prompt_came_from_and_only_once() -> None:
    job = note(Fetched(ID, 2, FOUND), Started(ID, 2), Fetched(ID, 1, LACKING), Fetched(ID, 1, FOUND))
    assert job.tokens == LACKING
    assert [span.name for span in spans(job, 5.0)] == ["decode.queue", "decode.wait_turn"]


def test_counts_blocks_by_tier_and_preemptions() -> None:
    job = note(Scheduled(ID, 1), Fetched(ID, 1, FOUND), Preempted(ID, 1))
    _, fetch, wait = spans(job, 4.0)
    assert dict(fetch.counts) == {"tokens_device": 16, "blocks_device": 1, "tokens_host": 20, "blocks_host": 2}
    assert dict(wait.counts) == {"preemptions": 1}


LEFT = PromptTokens({"host": 16}, 70, (MissRun(Miss(Cause.CHEAPER), 16, 4), MissRun(Miss(Cause.PARTIAL), 80, 1)))
KEPT = (MissRun(Miss(Cause.CHEAPER), 16, 2), MissRun(Miss(Cause.PARTIAL), 80, 1))
JUMP = Jumped(ID, 1, range(48, 80), PromptTokens({"host": 16, "redis": 32}, 38, KEPT))


def test_blocks_that_were_read_meanwhile_count_as_found_and_have_no_cause() -> None:
    job = note(Fetched(ID, 1, LEFT), Started(ID, 1), JUMP, replace(JUMP, choice=2))
    assert job.tokens == JUMP.tokens
    compute = spans(job, 5.0)[-1]
    assert compute.name == "decode.compute"
    assert dict(compute.counts) == {"tokens_computed": 38, "tokens_redis": 32, "blocks_redis": 2}


def test_what_a_preempted_choice_finds_later_is_not_counted() -> None:
    job = note(Fetched(ID, 1, LEFT), Started(ID, 1), Preempted(ID, 1), Fetched(ID, 1, LEFT), JUMP)
    assert job.tokens == LEFT


def test_a_jump_before_the_first_step_is_not_computed() -> None:
    job = note(Fetched(ID, 1, LEFT), JUMP, Started(ID, 1))
    assert spans(job, 5.0)[-1].counts["tokens_computed"] == 38


@pytest.mark.parametrize("event", [HeldUp(ID, 1, Gate.PAGES), Scheduled(ID, 1)])
def test_a_phase_that_was_passed_does_not_come_again(event: Event) -> None:
    job = note(Scheduled(ID, 1), event)
    assert [(one.name, one.start_ms) for one in spans(job, 5.0)] == [("decode.queue", 0.0), ("decode.fetch", 1000.0)]
