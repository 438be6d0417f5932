"""The job of one attempt at a request: the engine's events in, updates for the router out. Each role has its own."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from engine.events import Event, Fetched, HeldUp, Preempted, Scheduled, Started, TierTokens
from engine.request import EngineRequest
from engine.schedule.batcher import Batcher, Gate
from wire.errors import BatonError
from wire.pools import Role
from worker.stopwatch import Phase, Stopwatch
from worker.update import ChoiceTokens, Update

_WAIT_FOR = {Gate.SLOT: Phase.WAIT_SLOT, Gate.PAGES: Phase.WAIT_PAGES}


class Job(Protocol):
    """An attempt in progress. Pure: `now_s` and the time of arrival are readings of one monotonic clock.

    An update with an end is the last; the loop drops the job with it.
    """

    @property
    def request(self) -> EngineRequest: ...

    def take(self, event: Event, now_s: float) -> Update:
        """Takes an event of the engine about this attempt; returns the update for the router."""
        ...

    def gain(self, tokens: ChoiceTokens, now_s: float) -> Update:
        """Takes tokens that a choice has gained; returns the update for the router."""
        ...

    def withdraw(self, error: BatonError) -> Update:
        """Ends the attempt with an error of the worker: aborted, out of time, ousted, drained, or a failed step."""
        ...


NewJob = Callable[[EngineRequest, float], Job]
"""Makes the job of a request that arrived at a reading of the clock."""


@dataclass(frozen=True)
class Behaviour:
    """The difference between a prefill and a decode worker: batcher, class of requests, and jobs."""

    role: Role
    batcher: Batcher
    request_class: type[EngineRequest]
    new_job: NewJob


class PromptProgress:
    """The way of a prompt to its KV, as a stopwatch that the engine's events drive, up to computing missing tokens.

    after: the phase that follows. leader: the choice that gets the prompt's KV for all.
    """

    def __init__(self, stopwatch: Stopwatch, leader: int, block_size: int, after: Phase) -> None:
        self._stopwatch = stopwatch
        self._leader = leader
        self._block_size = block_size
        self._after = after
        self.tokens: TierTokens | None = None
        """The prompt's tokens by where their KV came from, as the leader first found them."""

    def note(self, event: Event, now_s: float) -> None:
        """Takes every event of the request, and passes over events that do not concern the prompt."""
        match event:
            case HeldUp(gate=gate):
                self._stopwatch.begin_phase(_WAIT_FOR[gate], now_s)
            case Scheduled():
                self._stopwatch.begin_phase(Phase.FETCH, now_s)
            case Fetched(choice=choice, tokens=tokens) if choice == self._leader and self.tokens is None:
                self.tokens = tokens
                self._count_tiers(tokens)
                self._stopwatch.begin_phase(Phase.WAIT_TURN, now_s)
            case Started(choice=choice) if choice == self._leader and self.tokens is not None:
                self._stopwatch.begin_phase(Phase.COMPUTE if self.tokens.computed else self._after, now_s)
                self._stopwatch.count(tokens_computed=self.tokens.computed)
            case Preempted():
                self._stopwatch.count(preemptions=1)

    def _count_tiers(self, tokens: TierTokens) -> None:
        for tier, num_tokens in tokens.found.items():
            num_blocks = -(-num_tokens // self._block_size)
            self._stopwatch.count(**{f"tokens_{tier}": num_tokens, f"blocks_{tier}": num_blocks})
