"""A request's life at a decode worker: blocks fetched, what is missing computed, tokens streamed to the end.

queue -> wait -> fetch -> wait -> compute -> generate -> closed
                              \\-> generate, if nothing of the prompt was missing
"""

from collections.abc import Sequence

from engine.events import Emitted, Event, Failed, Fetched, Finished
from engine.request import EngineRequest
from wire.pools import Role
from worker.instructions import AbortInEngine, AddToEngine, Close, Instruction, ReleaseHold, Send
from worker.lifecycle import Withdrawn
from worker.prompt_progress import PromptProgress
from worker.stopwatch import Phase, Stopwatch
from worker.update import NOTHING_NEW, ChoiceTokens, Update


class DecodeLifecycle:
    """Sends at most one update for events that come together, with all that is new; the last one has the spans.

    The request's hold is released as soon as every choice has fetched. A request that ends before leaves that to the
    router, which knows whether it goes on elsewhere.
    """

    def __init__(self, request: EngineRequest, arrived_s: float, block_size: int) -> None:
        self.ended = False
        self._request = request
        self._num_output = {choice.index: len(choice.output_ids) for choice in request.choices}
        self._unfinished = set(self._num_output)
        self._unfetched = set(self._num_output)
        self._news = NOTHING_NEW
        self._stopwatch = Stopwatch(Role.DECODE, arrived_s)
        self._prompt = PromptProgress(self._stopwatch, min(self._num_output), block_size, after=Phase.GENERATE)

    def start(self) -> list[Instruction]:
        return [AddToEngine(self._request)]

    def handle(self, events: Sequence[Event | Withdrawn], now_s: float) -> list[Instruction]:
        todo: list[Instruction] = []
        for event in events:
            if not self.ended:
                todo += self._take(event, now_s)
        news, self._news = self._news, NOTHING_NEW
        return todo if news == NOTHING_NEW else [Send(news), *todo]

    def _take(self, event: Event | Withdrawn, now_s: float) -> list[Instruction]:
        self._prompt.note(event, now_s)
        match event:
            case Fetched(choice=choice):
                return self._note_fetched(choice)
            case Emitted():
                self._note_emitted(event, now_s)
            case Finished():
                return self._note_finished(event, now_s)
            case Failed(error=error):
                self.ended = True
                return [Close(error)]
            case Withdrawn(error):
                self.ended = True
                return [AbortInEngine(self._request.request_id), Close(error)]
        return []

    def _note_fetched(self, choice: int) -> list[Instruction]:
        if choice not in self._unfetched:
            return []
        self._unfetched.remove(choice)
        if self._unfetched:
            return []
        self._tell(Update(prompt=self._prompt.tokens))
        return [ReleaseHold(self._request.request_id)]

    def _note_emitted(self, event: Emitted, now_s: float) -> None:
        self._stopwatch.reach(Phase.GENERATE, now_s)
        self._stopwatch.count(tokens=1)
        self._num_output[event.choice] = event.position + 1
        self._tell(Update((ChoiceTokens.emitted(event),)))

    def _note_finished(self, event: Finished, now_s: float) -> list[Instruction]:
        self._tell(Update((ChoiceTokens.finished(event, self._num_output[event.choice]),)))
        self._unfinished.discard(event.choice)
        if self._unfinished:
            return []
        self.ended = True
        self._tell(Update(spans=self._stopwatch.spans(now_s)))
        return [Close()]

    def _tell(self, news: Update) -> None:
        self._news = self._news.followed_by(news)
