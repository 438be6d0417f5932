"""The job of one attempt at a request: the engine's news in, updates for the router out. Each role has its own.

A job writes the very messages that go to the router. Its Stopwatch divides the attempt's time into spans.
"""

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from itertools import repeat
from typing import Any

from engine.events import Event, Fetched, Finished, HeldUp, Jumped, Preempted, PromptTokens, Scheduled, Scored, Started
from engine.request import EngineRequest
from engine.schedule.batcher import Batcher, Gate
from wire.convert import logprobs_to_pb, misses_to_pb, reason_to_pb, tiers_to_pb
from wire.errors import BatonError
from wire.journal import Kind
from wire.pb import inference_pb2, worker_pb2
from wire.pools import Role
from worker.convert import ended_with

News = Event | worker_pb2.Update
"""An event of the engine, or an update with tokens that one choice has gained."""


_WAIT_FOR = {Gate.SLOT: Kind.WAIT_SLOT, Gate.PAGES: Kind.WAIT_PAGES}
_ORDER = tuple(Kind)


class Stopwatch:
    """A division of an attempt's time into spans without a gap. It has no clock: callers pass readings."""

    def __init__(self, role: Role, arrived_s: float) -> None:
        """Starts the queue at `arrived_s`; any other span may be missing. Spans carry the role's name."""
        self._role = role
        self._arrived_s = arrived_s
        self._starts_s = {Kind.QUEUE: arrived_s}
        self._counts: dict[Kind, Counter[str]] = {span: Counter() for span in Kind}

    @property
    def span(self) -> Kind:
        """The span that runs."""
        return next(reversed(self._starts_s))

    def begin_span(self, span: Kind, now_s: float) -> None:
        """Ends the running span and begins a later one. Does nothing for the running span and earlier ones."""
        if _ORDER.index(span) > _ORDER.index(self.span):
            self._starts_s[span] = now_s

    def count(self, **amounts: int) -> None:
        """Adds to the counts of the running span."""
        self._counts[self.span].update(amounts)

    def spans(self, end_s: float) -> list[inference_pb2.Span]:
        """Lists the spans so far, the running one with `end_s` as its end; without counts of zero."""
        starts = list(self._starts_s.items())
        ends_s = [start_s for _, start_s in starts[1:]] + [end_s]
        return [self._message(span, start_s, end) for (span, start_s), end in zip(starts, ends_s, strict=True)]

    def _message(self, span: Kind, start_s: float, end_s: float) -> inference_pb2.Span:
        return inference_pb2.Span(
            name=span.at(self._role.value),
            start_ms=(start_s - self._arrived_s) * 1000,
            duration_ms=(end_s - start_s) * 1000,
            counts={name: amount for name, amount in self._counts[span].items() if amount},
        )


class PromptProgress:
    """The way of a prompt to its KV, as a stopwatch that the engine's events drive, up to computing missing tokens.

    after: the span that follows. leader: the choice that gets the prompt's KV for all.
    """

    def __init__(self, stopwatch: Stopwatch, leader: int, block_size: int, after: Kind) -> None:
        self._stopwatch = stopwatch
        self._leader = leader
        self._block_size = block_size
        self._after = after
        self.tokens: PromptTokens | None = None
        """The prompt's tokens by where their KV came from, as the leader first found them."""
        self._is_first = True

    @property
    def source(self) -> worker_pb2.PromptSource | None:
        if self.tokens is None:
            return None
        found, computed = tiers_to_pb(self.tokens.found), self.tokens.computed
        misses = misses_to_pb(self.tokens.misses)
        return worker_pb2.PromptSource(cached_tokens=found, computed_tokens=computed, misses=misses)

    def note(self, event: News, now_s: float) -> None:
        """Takes every event of the attempt, and passes over events that do not concern the prompt."""
        match event:
            case HeldUp(gate=gate):
                self._stopwatch.begin_span(_WAIT_FOR[gate], now_s)
            case Scheduled():
                self._stopwatch.begin_span(Kind.FETCH, now_s)
            case Fetched(choice=choice, tokens=tokens) if choice == self._leader and self.tokens is None:
                self._take(tokens)
                self._stopwatch.begin_span(Kind.WAIT_TURN, now_s)
            case Started(choice=choice) if choice == self._leader and self.tokens is not None:
                self._stopwatch.begin_span(Kind.COMPUTE if self.tokens.computed else self._after, now_s)
                self._stopwatch.count(tokens_computed=self.tokens.computed)
            case Jumped(choice=choice) if choice == self._leader and self.tokens is not None and self._is_first:
                self._take(event.tokens)
                if self._stopwatch.span is Kind.COMPUTE:
                    self._stopwatch.count(tokens_computed=-event.num_found)
            case Preempted():
                self._stopwatch.count(preemptions=1)
                self._is_first = False

    def _take(self, tokens: PromptTokens) -> None:
        """Takes the sources of the prompt's tokens, and counts the found ones that are new by tier."""
        before = Counter(self.tokens.found if self.tokens else ())
        for tier, num_tokens in (Counter(tokens.found) - before).items():
            num_blocks = -(-num_tokens // self._block_size)
            self._stopwatch.count(**{f"tokens_{tier}": num_tokens, f"blocks_{tier}": num_blocks})
        self.tokens = tokens


class Job(ABC):
    """An attempt in progress. Pure: times are readings of one monotonic clock. An update with an end is the last."""

    def __init__(self, request: EngineRequest, role: Role, arrived_s: float, block_size: int, after: Kind) -> None:
        """after: the span behind the prompt's KV. block_size: tokens of a block, for the timeline."""
        self.request = request
        self._stopwatch = Stopwatch(role, arrived_s)
        leader = min(choice.index for choice in request.choices)
        self._prompt = PromptProgress(self._stopwatch, leader, block_size, after)

    @abstractmethod
    def take(self, news: News, now_s: float) -> worker_pb2.Update | None:
        """Takes news of the engine about this attempt; returns the update for the router, if there is one."""

    @abstractmethod
    def releases_hold(self, update: worker_pb2.Update) -> bool:
        """Tells whether the attempt's hold on blocks is over with this update."""

    def withdraw(self, error: BatonError) -> worker_pb2.Update:
        """Ends the attempt with an error of the worker: aborted, out of time, ousted, drained, or a failed step."""
        return ended_with(self.request.attempt_id, error)

    def _update(self, **fields: Any) -> worker_pb2.Update:
        return worker_pb2.Update(id=self.request.attempt_id, **fields)

    def _scored(self, event: Scored) -> worker_pb2.Update:
        """Passes scores on without their tokens: the router knows its prompt."""
        logprobs = logprobs_to_pb(repeat(0, len(event.logprobs)), event.logprobs)
        return self._update(scores=worker_pb2.PromptScores(first_position=event.first_position, logprobs=logprobs))


def end_choice(tokens: worker_pb2.ChoiceTokens, event: Finished) -> worker_pb2.ChoiceTokens:
    """Writes the end of a choice into its last tokens; returns them."""
    tokens.finish_reason = reason_to_pb(event.reason)
    if event.stop_token_id is not None:
        tokens.stop_token_id = event.stop_token_id
    return tokens


NewJob = Callable[[EngineRequest, float], Job]
"""Makes the job of a request that arrived at a reading of the clock."""


@dataclass(frozen=True)
class Behaviour:
    """The difference between a prefill and a decode worker: batcher, class of requests, and jobs."""

    role: Role
    batcher: Batcher
    request_class: type[EngineRequest]
    new_job: NewJob
