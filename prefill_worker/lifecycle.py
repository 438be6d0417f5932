"""A request's life at a prefill worker: prompt in, one token per choice out, the prompt's blocks held in the store.

queue -> wait -> fetch -> wait -> compute -> publish -> answered
                                         \\-> answered, if every choice ended with its first token
"""

from collections.abc import Sequence

from engine.events import Emitted, Event, Failed, Finished, HandedOff
from engine.request import EngineRequest
from wire.pools import Role
from worker.instructions import AbortInEngine, AddToEngine, Close, Instruction, ReleaseHold, Send
from worker.lifecycle import Withdrawn
from worker.prompt_progress import PromptProgress
from worker.stopwatch import Phase, Stopwatch
from worker.update import NOTHING_NEW, ChoiceTokens, Update


class PrefillLifecycle:
    """Sends one update, the answer, when nothing is left to be done for the request here.

    A request that fails or is withdrawn has its hold released, which it may have by then.
    """

    def __init__(self, request: EngineRequest, arrived_s: float, block_size: int) -> None:
        """`request` is a HandOff."""
        self.ended = False
        self._request = request
        self._unfinished = {choice.index for choice in request.choices}
        self._answer = NOTHING_NEW
        self._stopwatch = Stopwatch(Role.PREFILL, arrived_s)
        self._prompt = PromptProgress(self._stopwatch, min(self._unfinished), block_size, after=Phase.PUBLISH)
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
        self._prompt.note(event, now_s)
        match event:
            case Emitted():
                self._last_token_s = now_s
                self._gain(ChoiceTokens.emitted(event))
            case Finished():
                self._gain(ChoiceTokens.finished(event, num_output=1))
                self._unfinished.discard(event.choice)
                return [] if self._unfinished else self._close(now_s)
            case HandedOff(num_held=num_held):
                return self._hand_off(num_held, now_s)
            case Failed(error=error):
                self.ended = True
                return [ReleaseHold(self._request.request_id), Close(error)]
            case Withdrawn(error):
                self.ended = True
                return [AbortInEngine(self._request.request_id), ReleaseHold(self._request.request_id), Close(error)]
        return []

    def _gain(self, tokens: ChoiceTokens) -> None:
        self._answer = self._answer.followed_by(Update((tokens,)))

    def _hand_off(self, num_held: int, now_s: float) -> list[Instruction]:
        self._stopwatch.reach(Phase.PUBLISH, self._last_token_s)
        self._stopwatch.count(blocks=num_held)
        self._answer = self._answer.followed_by(Update(num_held=num_held))
        return self._close(now_s)

    def _close(self, now_s: float) -> list[Instruction]:
        self.ended = True
        end = Update(prompt=self._prompt.tokens, spans=self._stopwatch.spans(now_s))
        return [Send(self._answer.followed_by(end)), Close()]
