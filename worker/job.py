"""The job of an attempt at a request: the engine's events in, updates for the router out. Each role has its own.

A job writes the messages for the router; its journal divides the attempt's time into spans.
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
from wire.journal import Journal, Kind
from wire.pb import worker_pb2
from wire.pools import Role
from worker.convert import ended_with

News = Event | worker_pb2.Update
"""An event of the engine, or an update with gained tokens of one choice."""


_WAIT_FOR = {Gate.SLOT: Kind.WAIT_SLOT, Gate.PAGES: Kind.WAIT_PAGES}
_ORDER = tuple(Kind)


class Job(ABC):
    """A running attempt. Pure: times are readings of one monotonic clock. An update with an end is the last.

    `journal` appends to the spans of `end`, the last message.
    """

    def __init__(self, request: EngineRequest, role: Role, arrived_s: float, block_size: int, after: Kind) -> None:
        """after: the span that follows the prompt's KV. block_size: tokens of a block, for the timeline."""
        self.request = request
        self.end = worker_pb2.End()
        self.journal = Journal(self.end.spans, Kind.QUEUE, role.value, arrived_s)
        self.tokens: PromptTokens | None = None
        """The prompt's tokens by the tier of their KV, as the leader first found them."""
        self._leader = min(choice.index for choice in request.choices)
        self._block_size = block_size
        self._after = after
        self._is_first = True

    @abstractmethod
    def take(self, news: News, now_s: float) -> worker_pb2.Update | None:
        """Takes an event of the engine about this attempt; returns the update for the router, if any."""

    @abstractmethod
    def releases_hold(self, update: worker_pb2.Update) -> bool:
        """Tells whether the attempt's hold ends with this update."""

    def withdraw(self, error: BatonError, now_s: float) -> worker_pb2.Update:
        """Ends the attempt with an error of the worker: aborted, out of time, replaced, drained, or a failed step.

        The running span ends now: it is the phase in which the error came.
        """
        update = ended_with(self.request.attempt_id, error)
        update.end.MergeFrom(self._ended(now_s))
        return update

    @property
    def source(self) -> worker_pb2.PromptSource | None:
        """The sources of the prompt's KV, for the router; None before they are known."""
        if self.tokens is None:
            return None
        found, misses = tiers_to_pb(self.tokens.found), misses_to_pb(self.tokens.misses)
        return worker_pb2.PromptSource(cached_tokens=found, computed_tokens=self.tokens.computed, misses=misses)

    def note(self, event: News, now_s: float) -> None:
        """Writes events about the prompt's KV into the journal, up to its computation; ignores other events.

        The leader is the choice that gets the prompt's KV for all.
        """
        match event:
            case HeldUp(gate=gate):
                self._begin(_WAIT_FOR[gate], now_s)
            case Scheduled():
                self._begin(Kind.FETCH, now_s)
            case Fetched(choice=choice, tokens=tokens) if choice == self._leader and self.tokens is None:
                self._note_tokens(tokens)
                self._begin(Kind.WAIT_TURN, now_s)
            case Started(choice=choice) if choice == self._leader and self.tokens is not None:
                self._begin(Kind.COMPUTE if self.tokens.computed else self._after, now_s)
                self.journal.count(tokens_computed=self.tokens.computed)
            case Jumped(choice=choice) if choice == self._leader and self.tokens is not None and self._is_first:
                self._note_tokens(event.tokens)
                if self.journal.kind is Kind.COMPUTE:
                    self.journal.count(tokens_computed=-event.num_found)
            case Preempted():
                self.journal.count(preemptions=1)
                self._is_first = False

    def _begin(self, kind: Kind, now_s: float) -> None:
        """Begins a later phase. Does nothing for the running phase or an earlier one."""
        if _ORDER.index(kind) > _ORDER.index(self.journal.kind):
            self.journal.begin(kind, now_s)

    def _note_tokens(self, tokens: PromptTokens) -> None:
        """Notes the sources of the prompt's tokens, and counts newly found tokens by tier."""
        before = Counter(self.tokens.found if self.tokens else ())
        for tier, num_tokens in (Counter(tokens.found) - before).items():
            num_blocks = -(-num_tokens // self._block_size)
            self.journal.count(**{f"tokens_{tier}": num_tokens, f"blocks_{tier}": num_blocks})
        self.tokens = tokens

    def _ended(self, now_s: float) -> worker_pb2.End:
        self.journal.close(now_s)
        return self.end

    def _update(self, **fields: Any) -> worker_pb2.Update:
        return worker_pb2.Update(id=self.request.attempt_id, **fields)

    def _scored(self, event: Scored) -> worker_pb2.Update:
        """Passes scores on, without tokens: the router knows the prompt."""
        logprobs = logprobs_to_pb(repeat(0, len(event.logprobs)), event.logprobs)
        return self._update(scores=worker_pb2.PromptScores(first_position=event.first_position, logprobs=logprobs))


def end_choice(tokens: worker_pb2.ChoiceTokens, event: Finished) -> worker_pb2.ChoiceTokens:
    """Writes the end of a choice into its last tokens, which it returns."""
    tokens.finish_reason = reason_to_pb(event.reason)
    if event.stop_token_id is not None:
        tokens.stop_token_id = event.stop_token_id
    return tokens


NewJob = Callable[[EngineRequest, float], Job]
"""A function that makes the job of a request that arrived at a reading of the clock."""


@dataclass(frozen=True)
class Behaviour:
    """The differences of prefill and decode workers: batcher, class of requests, jobs. block_size: in tokens."""

    role: Role
    batcher: Batcher
    request_class: type[EngineRequest]
    new_job: NewJob
    block_size: int
