import pytest

from engine.events import Event, Fetched, HeldUp, Preempted, PromptTokens, Scheduled, Started
from engine.schedule.batcher import Gate
from wire.ids import AttemptId
from wire.pools import Role
from worker.job import PromptProgress, SpanName, Stopwatch

ID = AttemptId("request")
FOUND = PromptTokens({"device": 16, "host": 20})
LACKING = PromptTokens({"device": 16}, computed=24)


@pytest.fixture
def stopwatch() -> Stopwatch:
    return Stopwatch(Role.DECODE, 0.0)


def note(stopwatch: Stopwatch, *events: Event) -> PromptProgress:
    """The events come a second apart, from 1 s on."""
    progress = PromptProgress(stopwatch, leader=1, block_size=16, after=SpanName.GENERATE)
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
