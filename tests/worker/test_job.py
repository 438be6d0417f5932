from dataclasses import replace

import pytest

from engine.events import Event, Fetched, HeldUp, Jumped, Preempted, PromptTokens, Scheduled, Started
from engine.schedule.batcher import Gate
from wire.ids import AttemptId
from wire.journal import Kind
from wire.pools import Role
from wire.tier import Cause, Miss, MissRun
from worker.job import PromptProgress, Stopwatch

ID = AttemptId("request")
FOUND = PromptTokens({"device": 16, "host": 20})
LACKING = PromptTokens({"device": 16}, computed=24)


@pytest.fixture
def stopwatch() -> Stopwatch:
    return Stopwatch(Role.DECODE, 0.0)


def note(stopwatch: Stopwatch, *events: Event) -> PromptProgress:
    """The events come a second apart, from 1 s on."""
    progress = PromptProgress(stopwatch, leader=1, block_size=16, after=Kind.GENERATE)
    for now_s, event in enumerate(events, start=1):
        progress.note(event, float(now_s))
    return progress


@pytest.mark.parametrize(("tokens", "phase"), [(LACKING, "decode.compute"), (FOUND, "decode.generate")])
def test_what_is_missing_is_computed_before_the_role_has_its_turn(
    stopwatch: Stopwatch, tokens: PromptTokens, phase: str
) -> None:
    progress = note(stopwatch, HeldUp(ID, 1, Gate.SLOT), Scheduled(ID, 1), Fetched(ID, 1, tokens), Started(ID, 1))
    assert progress.tokens == tokens
    assert [span.name for span in stopwatch.spans(5.0)] == [
        "decode.queue",
        "decode.wait_slot",
        "decode.fetch",
        "decode.wait_turn",
        phase,
    ]


def test_only_the_leader_says_where_the_prompt_came_from_and_only_once(stopwatch: Stopwatch) -> None:
    progress = note(stopwatch, Fetched(ID, 2, FOUND), Started(ID, 2), Fetched(ID, 1, LACKING), Fetched(ID, 1, FOUND))
    assert progress.tokens == LACKING
    assert [span.name for span in stopwatch.spans(5.0)] == ["decode.queue", "decode.wait_turn"]


def test_counts_blocks_by_tier_and_preemptions(stopwatch: Stopwatch) -> None:
    note(stopwatch, Scheduled(ID, 1), Fetched(ID, 1, FOUND), Preempted(ID, 1))
    _, fetch, wait = stopwatch.spans(4.0)
    assert dict(fetch.counts) == {"tokens_device": 16, "blocks_device": 1, "tokens_host": 20, "blocks_host": 2}
    assert dict(wait.counts) == {"preemptions": 1}


LEFT = PromptTokens({"host": 16}, 70, (MissRun(Miss(Cause.CHEAPER), 16, 4), MissRun(Miss(Cause.PARTIAL), 80, 1)))
KEPT = (MissRun(Miss(Cause.CHEAPER), 16, 2), MissRun(Miss(Cause.PARTIAL), 80, 1))
JUMP = Jumped(ID, 1, range(48, 80), PromptTokens({"host": 16, "redis": 32}, 38, KEPT))


def test_blocks_that_were_read_meanwhile_count_as_found_and_have_no_cause(stopwatch: Stopwatch) -> None:
    progress = note(stopwatch, Fetched(ID, 1, LEFT), Started(ID, 1), JUMP, replace(JUMP, choice=2))
    assert progress.tokens == JUMP.tokens
    compute = stopwatch.spans(5.0)[-1]
    assert compute.name == "decode.compute"
    assert dict(compute.counts) == {"tokens_computed": 38, "tokens_redis": 32, "blocks_redis": 2}


def test_what_a_preempted_choice_finds_later_is_not_counted(stopwatch: Stopwatch) -> None:
    progress = note(stopwatch, Fetched(ID, 1, LEFT), Started(ID, 1), Preempted(ID, 1), Fetched(ID, 1, LEFT), JUMP)
    assert progress.tokens == LEFT


def test_a_jump_before_the_first_step_is_not_computed(stopwatch: Stopwatch) -> None:
    note(stopwatch, Fetched(ID, 1, LEFT), JUMP, Started(ID, 1))
    assert stopwatch.spans(5.0)[-1].counts["tokens_computed"] == 38
