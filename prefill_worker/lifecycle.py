"""A request's life at a prefill worker: prompt in, one token per choice out, the prompt's blocks held in the store.

queue -> wait -> fetch -> wait -> compute -> publish -> answered
                                         \\-> answered, if every choice ended with its first token
"""

from collections.abc import Sequence

from engine.batcher import Gate
from engine.events import Emitted, Event, Failed, Fetched, Finished, HandedOff, HeldUp, Preempted, Scheduled, Started
from engine.request import EngineRequest
from worker.instructions import AbortInEngine, AddToEngine, Close, Instruction, ReleaseHold, Send
from worker.lifecycle import Withdrawn, count_tiers
from worker.stopwatch import Stopwatch
from worker.update import NOTHING_NEW, ChoiceTokens, Update

QUEUE, FETCH, COMPUTE, PUBLISH = "prefill.queue", "prefill.fetch", "prefill.compute", "prefill.publish"
WAIT_TURN = "prefill.wait_turn"
WAIT_FOR = {Gate.SLOT: "prefill.wait_slot", Gate.PAGES: "prefill.wait_pages"}
PHASES = (QUEUE, *WAIT_FOR.values(), FETCH, WAIT_TURN, COMPUTE, PUBLISH)


class PrefillLifecycle:
    """Sends one update, the answer, when nothing is left to be done for the request here.

    A request that fails or is withdrawn has its hold released, which it may have by then.
    """

    def __init__(self, request: EngineRequest, arrived_s: float, block_size: int) -> None:
        """`request` is a HandOff."""
        self.ended = False
        self._request = request
        self._block_size = block_size
        self._leader = min(choice.index for choice in request.choices)
        self._unfinished = {choice.index for choice in request.choices}
        self._answer = NOTHING_NEW
        self._stopwatch = Stopwatch(PHASES, arrived_s)
        self._last_token_s = arrived_s

    def start(self) -> list[Instruction]:
        return [AddToEngine(self._request)]

    def handle(self, events: Sequence[Event | Withdrawn], now_s: float) -> list[Instruction]:
        todo: list[Instruction] = []
        for event in events:
            if not self.ended:
                todo += self._take(event, now_s)
        return todo

    def _take(self, event: Event | Withdrawn, now_s: float) -> list[Instruction]:
        match event:
            case HeldUp(gate=gate):
                self._stopwatch.reach(WAIT_FOR[gate], now_s)
            case Scheduled():
                self._stopwatch.reach(FETCH, now_s)
            case Fetched():
                self._note_fetched(event, now_s)
            case Started():
                self._note_started(event, now_s)
            case Emitted():
                self._last_token_s = now_s
                self._gain(ChoiceTokens.emitted(event))
            case Finished():
                self._gain(ChoiceTokens.finished(event, num_output=1))
                self._unfinished.discard(event.choice)
                return [] if self._unfinished else self._close(now_s)
            case HandedOff(num_held=num_held):
                return self._hand_off(num_held, now_s)
            case Preempted():
                self._stopwatch.count(preemptions=1)
            case Failed(error=error):
                self.ended = True
                return [ReleaseHold(self._request.request_id), Close(error)]
            case Withdrawn(error):
                self.ended = True
                return [AbortInEngine(self._request.request_id), ReleaseHold(self._request.request_id), Close(error)]
        return []

    def _note_fetched(self, event: Fetched, now_s: float) -> None:
        if event.choice == self._leader and self._answer.prompt is None:
            self._answer = self._answer.followed_by(Update(prompt=event.tokens))
            count_tiers(self._stopwatch, event.tokens, self._block_size)
            self._stopwatch.reach(WAIT_TURN, now_s)

    def _note_started(self, event: Started, now_s: float) -> None:
        if event.choice == self._leader and self._answer.prompt is not None:
            self._stopwatch.reach(COMPUTE, now_s)
            self._stopwatch.count(tokens_computed=self._answer.prompt.computed)

    def _gain(self, tokens: ChoiceTokens) -> None:
        self._answer = self._answer.followed_by(Update((tokens,)))

    def _hand_off(self, num_held: int, now_s: float) -> list[Instruction]:
        self._stopwatch.reach(PUBLISH, self._last_token_s)
        self._stopwatch.count(blocks=num_held)
        self._answer = self._answer.followed_by(Update(num_held=num_held))
        return self._close(now_s)

    def _close(self, now_s: float) -> list[Instruction]:
        self.ended = True
        return [Send(self._answer.followed_by(Update(spans=self._stopwatch.spans(now_s)))), Close()]
