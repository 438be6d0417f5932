"""Orders in which an engine may report on one request, and what every job must make of any of them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hypothesis import strategies as st

from engine.events import (
    Event,
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
from engine.schedule.batcher import Gate
from wire.convert import tiers_to_pb
from wire.errors import BatonError, Cancelled
from wire.ids import AttemptId
from wire.pb import inference_pb2, worker_pb2
from wire.sampling import FinishReason
from worker.job import Job
from worker.line import join

ID = AttemptId("request")
TIERS = PromptTokens({"device": 16, "host": 20}, computed=4)


@dataclass(frozen=True)
class Withdrawn:
    """Stands among events for the attempt's end before its time."""

    error: BatonError


Told = Event | worker_pb2.ChoiceTokens | Withdrawn
Steps = Sequence[Sequence[Told]]


@dataclass(frozen=True)
class Script:
    """What happens to a request step by step, its early end included, and the tokens emitted up to there by choice."""

    num_choices: int
    steps: list[list[Told]]
    outputs: dict[int, list[int]] = field(default_factory=dict)


@st.composite
def hand_offs(draw: st.DrawFn) -> Script:
    """Up to three choices with one token each; those that do not end with it are handed off together."""
    num_choices = draw(st.integers(1, 3))
    events: list[Told] = []
    finished = 0
    for choice in range(num_choices):
        events += _scheduled(draw, choice)
        events += [tokens(choice, 0, 100 + choice)]
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
    events: list[Told] = [event for choice in left for event in _scheduled(draw, choice)]
    while left:
        choice = draw(st.sampled_from(sorted(left)))
        if draw(st.integers(0, 5)) == 0:
            events += [Preempted(ID, choice), *_scheduled(draw, choice)]
        events.append(tokens(choice, position[choice], 10 * choice + position[choice]))
        position[choice] += 1
        left[choice] -= 1
        if not left[choice]:
            events.append(Finished(ID, choice, FinishReason.LENGTH))
            del left[choice]
    return _interrupted(draw, num_choices, events)


def tokens(choice: int, position: int, *token_ids: int, **fields: Any) -> worker_pb2.ChoiceTokens:
    """Makes tokens of a choice, from its `position`-th on."""
    return worker_pb2.ChoiceTokens(index=choice, first_position=position, token_ids=token_ids, **fields)


def span(name: str, start_ms: float, duration_ms: float, counts: Mapping[str, int] | None = None) -> inference_pb2.Span:
    return inference_pb2.Span(name=name, start_ms=start_ms, duration_ms=duration_ms, counts=counts)


def update(**fields: Any) -> worker_pb2.Update:
    return worker_pb2.Update(id=ID, **fields)


def source(tiers: PromptTokens) -> worker_pb2.PromptSource:
    return worker_pb2.PromptSource(cached_tokens=tiers_to_pb(tiers.found), computed_tokens=tiers.computed)


def run(job: Job, steps: Steps) -> list[worker_pb2.Update]:
    """What is new after each step that brings something, the steps being a second apart from 1 s on, up to the end."""
    told: list[worker_pb2.Update] = []
    for now_s, events in enumerate(steps, start=1):
        new = update()
        for event in events:
            assert not new.HasField("end"), "nothing is asked of a job after its end"
            if (news := _answer(job, event, float(now_s))) is not None:
                join(new, news)
        if new != update():
            told.append(new)
    return told


def outputs(updates: Sequence[worker_pb2.Update]) -> dict[int, list[int]]:
    """Tokens that were told; those of a choice must follow one another."""
    told: dict[int, list[int]] = {}
    next_position: dict[int, int] = {}
    for update in updates:
        for choice in update.choices:
            assert choice.first_position == next_position.get(choice.index, choice.first_position)
            next_position[choice.index] = choice.first_position + len(choice.token_ids)
            told.setdefault(choice.index, []).extend(choice.token_ids)
    return told


def end_of(updates: Sequence[worker_pb2.Update]) -> worker_pb2.End:
    """The end, which is in the last update and in no other."""
    assert [update.HasField("end") for update in updates] == [False] * (len(updates) - 1) + [True]
    end: worker_pb2.End = updates[-1].end
    return end


def assert_spans_tile(end: worker_pb2.End, end_s: float) -> None:
    ends = [span.start_ms + span.duration_ms for span in end.spans]
    assert [span.start_ms for span in end.spans] == [0.0, *ends[:-1]]
    assert ends[-1] == end_s * 1000


def _answer(job: Job, event: Told, now_s: float) -> worker_pb2.Update | None:
    if isinstance(event, Withdrawn):
        return job.withdraw(event.error, now_s)
    return job.take(update(choices=[event]) if isinstance(event, worker_pb2.ChoiceTokens) else event, now_s)


def _scheduled(draw: st.DrawFn, choice: int) -> list[Told]:
    tiers = draw(st.sampled_from([TIERS, PromptTokens({"host": 40})]))
    gates = draw(st.lists(st.sampled_from(Gate), max_size=2))
    held_up = [HeldUp(ID, choice, gate) for gate in gates]
    return [*held_up, Scheduled(ID, choice), Fetched(ID, choice, tiers), Started(ID, choice)]


def _interrupted(draw: st.DrawFn, num_choices: int, events: list[Told]) -> Script:
    """Cuts events into steps; maybe ends them early. A Finished stays with its token."""
    cut = draw(st.integers(0, len(events) - 1))
    ending: Told | None = draw(
        st.sampled_from([None, Failed(ID, BatonError("no number")), Withdrawn(Cancelled("gone"))])
    )
    taken = events if ending is None else events[:cut]
    steps: list[list[Told]] = [[]]
    for event in taken:
        if not isinstance(event, Finished) and draw(st.booleans()):
            steps.append([])
        steps[-1].append(event)
    if ending is not None:
        steps.append([ending])
    emitted: dict[int, list[int]] = {}
    for event in taken:
        if isinstance(event, worker_pb2.ChoiceTokens):
            emitted.setdefault(event.index, []).extend(event.token_ids)
    return Script(num_choices, steps, emitted)
