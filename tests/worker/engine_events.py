"""Orders in which an engine may report on one request, and what every job must make of any of them."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from hypothesis import strategies as st

from engine.events import (
    Event,
    Failed,
    Fetched,
    Finished,
    HandedOff,
    HeldUp,
    Preempted,
    Scheduled,
    Started,
    TierTokens,
)
from engine.schedule.batcher import Gate
from wire.errors import BatonError, Cancelled
from wire.ids import AttemptId
from wire.sampling import FinishReason
from worker.job import Job
from worker.update import NOTHING_NEW, ChoiceTokens, End, Update

ID = AttemptId("request")
TIERS = TierTokens({"device": 16, "host": 20}, computed=4)


@dataclass(frozen=True)
class Withdrawn:
    """Stands among events for the attempt's end before its time."""

    error: BatonError


News = Event | ChoiceTokens | Withdrawn
Steps = Sequence[Sequence[News]]


@dataclass(frozen=True)
class Script:
    """What happens to a request step by step, its early end included, and the tokens emitted up to there by choice."""

    num_choices: int
    steps: list[list[News]]
    outputs: dict[int, list[int]] = field(default_factory=dict)


@st.composite
def hand_offs(draw: st.DrawFn) -> Script:
    """Up to three choices with one token each; those that do not end with it are handed off together."""
    num_choices = draw(st.integers(1, 3))
    events: list[News] = []
    finished = 0
    for choice in range(num_choices):
        events += _scheduled(draw, choice)
        events += [ChoiceTokens(choice, 0, (100 + choice,))]
        if draw(st.booleans()):
            finished += 1
            events.append(Finished(ID, choice, FinishReason.LENGTH))
    if finished < num_choices:
        events.append(HandedOff(ID, 3))
    return _interrupted(draw, num_choices, events)


@st.composite
def decodes(draw: st.DrawFn) -> Script:
    """Up to three choices that go on from two tokens each, taking turns, preempted now and then."""
    num_choices = draw(st.integers(1, 3))
    left = {choice: draw(st.integers(1, 4)) for choice in range(num_choices)}
    position = dict.fromkeys(left, 2)
    events: list[News] = [event for choice in left for event in _scheduled(draw, choice)]
    while left:
        choice = draw(st.sampled_from(sorted(left)))
        if draw(st.integers(0, 5)) == 0:
            events += [Preempted(ID, choice), *_scheduled(draw, choice)]
        events.append(ChoiceTokens(choice, position[choice], (10 * choice + position[choice],)))
        position[choice] += 1
        left[choice] -= 1
        if not left[choice]:
            events.append(Finished(ID, choice, FinishReason.LENGTH))
            del left[choice]
    return _interrupted(draw, num_choices, events)


def run(job: Job, steps: Steps) -> list[Update]:
    """What is new after each step that brings something, the steps being a second apart from 1 s on, up to the end."""
    told: list[Update] = []
    for now_s, events in enumerate(steps, start=1):
        update = NOTHING_NEW
        for event in events:
            assert update.end is None, "nothing is asked of a job after its end"
            update = update.followed_by(_answer(job, event, float(now_s)))
        if update != NOTHING_NEW:
            told.append(update)
    return told


def outputs(updates: Sequence[Update]) -> dict[int, list[int]]:
    """Tokens that were told; those of a choice must follow one another."""
    told: dict[int, list[int]] = {}
    next_position: dict[int, int] = {}
    for update in updates:
        for choice in update.choices:
            assert choice.first_position == next_position.get(choice.choice, choice.first_position)
            next_position[choice.choice] = choice.first_position + len(choice.token_ids)
            told.setdefault(choice.choice, []).extend(choice.token_ids)
    return told


def end_of(updates: Sequence[Update]) -> End:
    """The end, which is in the last update and in no other."""
    (end,) = (update.end for update in updates if update.end is not None)
    assert updates[-1].end is end
    return end


def assert_spans_tile(end: End, end_s: float) -> None:
    ends = [span.start_ms + span.duration_ms for span in end.spans]
    assert [span.start_ms for span in end.spans] == [0.0, *ends[:-1]]
    assert ends[-1] == end_s * 1000


def _answer(job: Job, event: News, now_s: float) -> Update:
    match event:
        case Withdrawn(error=error):
            return job.withdraw(error)
        case ChoiceTokens():
            return job.gain(event, now_s)
    return job.take(event, now_s)


def _scheduled(draw: st.DrawFn, choice: int) -> list[News]:
    tiers = draw(st.sampled_from([TIERS, TierTokens({"host": 40})]))
    gates = draw(st.lists(st.sampled_from(Gate), max_size=2))
    held_up = [HeldUp(ID, choice, gate) for gate in gates]
    return [*held_up, Scheduled(ID, choice), Fetched(ID, choice, tiers), Started(ID, choice)]


def _interrupted(draw: st.DrawFn, num_choices: int, events: list[News]) -> Script:
    """Cuts events into steps; maybe ends them early. A Finished stays with its token."""
    cut = draw(st.integers(0, len(events) - 1))
    ending: News | None = draw(
        st.sampled_from([None, Failed(ID, BatonError("no number")), Withdrawn(Cancelled("gone"))])
    )
    taken = events if ending is None else events[:cut]
    steps: list[list[News]] = [[]]
    for event in taken:
        if not isinstance(event, Finished) and draw(st.booleans()):
            steps.append([])
        steps[-1].append(event)
    if ending is not None:
        steps.append([ending])
    emitted: dict[int, list[int]] = {}
    for event in taken:
        if isinstance(event, ChoiceTokens):
            emitted.setdefault(event.choice, []).extend(event.token_ids)
    return Script(num_choices, steps, emitted)
