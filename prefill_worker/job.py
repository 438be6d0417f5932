"""An attempt at a prefill worker: prompt in, one token per choice out, the prompt's blocks held in the store.

queue -> wait -> fetch -> wait -> compute -> publish -> answered
                                         \\-> answered, if every choice ended with its first token
"""

from engine.events import Event, Failed, Finished, HandedOff, Scored
from engine.request import EngineRequest
from wire.errors import BatonError
from wire.pools import Role
from worker.job import PromptProgress
from worker.stopwatch import Phase, Stopwatch
from worker.update import NOTHING_NEW, ChoiceTokens, End, PromptScores, Update


class PrefillJob:
    """A Job with scores of the prompt, if they are wanted, and one update at its end.

    An attempt that fails or is withdrawn ends its hold, too.
    """

    def __init__(self, request: EngineRequest, arrived_s: float, block_size: int) -> None:
        """`request` is a HandOff."""
        self.request = request
        self._unfinished = {choice.index for choice in request.choices}
        self._answer = NOTHING_NEW
        self._stopwatch = Stopwatch(Role.PREFILL, arrived_s)
        self._prompt = PromptProgress(self._stopwatch, min(self._unfinished), block_size, after=Phase.PUBLISH)
        self._last_token_s = arrived_s

    def take(self, event: Event, now_s: float) -> Update:
        self._prompt.note(event, now_s)
        match event:
            case Finished():
                self._add(ChoiceTokens.finished(event, num_output=1))
                self._unfinished.discard(event.choice)
                return NOTHING_NEW if self._unfinished else self._close(now_s)
            case Scored(first_position=first, logprobs=logprobs):
                return Update(scores=PromptScores(first, logprobs))
            case HandedOff(num_held=num_held):
                return self._hand_off(num_held, now_s)
            case Failed(error=error):
                return self.withdraw(error)._replace(prompt=self._prompt.tokens)
        return NOTHING_NEW

    def gain(self, tokens: ChoiceTokens, now_s: float) -> Update:
        self._last_token_s = now_s
        self._add(tokens)
        return NOTHING_NEW

    def withdraw(self, error: BatonError) -> Update:
        return Update(releases_hold=True, end=End(error))

    def _add(self, tokens: ChoiceTokens) -> None:
        self._answer = self._answer.followed_by(Update((tokens,)))

    def _hand_off(self, num_held: int, now_s: float) -> Update:
        self._stopwatch.begin_phase(Phase.PUBLISH, self._last_token_s)
        self._stopwatch.count(blocks=num_held)
        self._answer = self._answer.followed_by(Update(num_held=num_held))
        return self._close(now_s)

    def _close(self, now_s: float) -> Update:
        end = Update(prompt=self._prompt.tokens, end=End(spans=self._stopwatch.spans(now_s)))
        return self._answer.followed_by(end)
