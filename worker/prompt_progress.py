"""How a request's prompt comes by its KV at this worker: the part of a life that both roles have."""

from engine.events import Event, Fetched, HeldUp, Preempted, Scheduled, Started, TierTokens
from engine.schedule.batcher import Gate
from worker.lifecycle import Withdrawn
from worker.stopwatch import Phase, Stopwatch

_WAIT_FOR = {Gate.SLOT: Phase.WAIT_SLOT, Gate.PAGES: Phase.WAIT_PAGES}


class PromptProgress:
    """Keeps a stopwatch by the engine's events, up to the phase `after` that of computing what is missing.

    leader: the choice that gets the prompt's KV for all.
    """

    def __init__(self, stopwatch: Stopwatch, leader: int, block_size: int, after: Phase) -> None:
        self._stopwatch = stopwatch
        self._leader = leader
        self._block_size = block_size
        self._after = after
        self.tokens: TierTokens | None = None
        """The prompt's tokens by where their KV came from, as the leader first found them."""

    def note(self, event: Event | Withdrawn, now_s: float) -> None:
        """Takes every event of the request; most say nothing of its prompt."""
        match event:
            case HeldUp(gate=gate):
                self._stopwatch.reach(_WAIT_FOR[gate], now_s)
            case Scheduled():
                self._stopwatch.reach(Phase.FETCH, now_s)
            case Fetched(choice=choice, tokens=tokens) if choice == self._leader and self.tokens is None:
                self.tokens = tokens
                self._count_tiers(tokens)
                self._stopwatch.reach(Phase.WAIT_TURN, now_s)
            case Started(choice=choice) if choice == self._leader and self.tokens is not None:
                self._stopwatch.reach(Phase.COMPUTE if self.tokens.computed else self._after, now_s)
                self._stopwatch.count(tokens_computed=self.tokens.computed)
            case Preempted():
                self._stopwatch.count(preemptions=1)

    def _count_tiers(self, tokens: TierTokens) -> None:
        for tier, num_tokens in tokens.found.items():
            num_blocks = -(-num_tokens // self._block_size)
            self._stopwatch.count(**{f"tokens_{tier}": num_tokens, f"blocks_{tier}": num_blocks})
