"""An attempt at a decode worker: it fetches blocks, computes missing KV, and streams tokens to the end.

queue -> wait -> fetch -> wait -> compute -> generate -> ended
                              \\-> generate, if no KV of the prompt was missing
"""

from engine.events import Drafted, Event, Failed, Fetched, Finished, Scored
from engine.request import EngineRequest
from wire.errors import BatonError
from wire.pools import Role
from worker.job import PromptProgress
from worker.stopwatch import Phase, Stopwatch
from worker.update import NOTHING_NEW, ChoiceTokens, End, PromptScores, Update


class DecodeJob:
    """A Job with an update for each token, and one at the last choice's fetch, which ends the hold.

    An attempt that ends before leaves its hold to the router, which ends it with the attempt.
    """

    def __init__(self, request: EngineRequest, arrived_s: float, block_size: int) -> None:
        self.request = request
        self._num_output = {choice.index: len(choice.output_ids) for choice in request.choices}
        self._unfinished = set(self._num_output)
        self._unfetched = set(self._num_output)
        self._generates = False
        self._stopwatch = Stopwatch(Role.DECODE, arrived_s)
        self._prompt = PromptProgress(self._stopwatch, min(self._num_output), block_size, after=Phase.GENERATE)

    def take(self, event: Event, now_s: float) -> Update:
        self._prompt.note(event, now_s)
        match event:
            case Fetched(choice=choice):
                return self._fetched(choice)
            case Scored(first_position=first, logprobs=logprobs):
                return Update(scores=PromptScores(first, logprobs))
            case Drafted(num_guessed=num_guessed, num_accepted=num_accepted):
                self._stopwatch.count(tokens_guessed=num_guessed, tokens_accepted=num_accepted)
            case Finished():
                return self._finished(event, now_s)
            case Failed(error=error):
                return self.withdraw(error)
        return NOTHING_NEW

    def gain(self, tokens: ChoiceTokens, now_s: float) -> Update:
        if not self._generates:
            self._generates = True
            self._stopwatch.begin_phase(Phase.GENERATE, now_s)
        self._num_output[tokens.choice] = tokens.first_position + len(tokens.token_ids)
        return Update((tokens,))

    def withdraw(self, error: BatonError) -> Update:
        return Update(end=End(error))

    def _fetched(self, choice: int) -> Update:
        if choice not in self._unfetched:
            return NOTHING_NEW
        self._unfetched.remove(choice)
        return NOTHING_NEW if self._unfetched else Update(prompt=self._prompt.tokens, releases_hold=True)

    def _finished(self, event: Finished, now_s: float) -> Update:
        tokens = ChoiceTokens.finished(event, self._num_output[event.choice])
        self._unfinished.discard(event.choice)
        end = Update((tokens,), end=None if self._unfinished else self._end(now_s))
        return self._fetched(event.choice).followed_by(end)  # a first token that a sibling's run drew may be the last

    def _end(self, now_s: float) -> End:
        num_before = sum(len(choice.output_ids) for choice in self.request.choices)
        self._stopwatch.count(tokens=sum(self._num_output.values()) - num_before)
        return End(spans=self._stopwatch.spans(now_s))
