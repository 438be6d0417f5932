"""An attempt at a prefill worker: prompt in, one token per choice out, the prompt's blocks held in the store.

queue -> wait -> fetch -> wait -> compute -> publish -> answered
                                         \\-> answered, if every choice ended with its first token
"""

from engine.events import Failed, Finished, HandedOff, Scored
from engine.request import EngineRequest
from wire.errors import BatonError
from wire.pb import worker_pb2
from wire.pools import Role
from worker.job import Job, News, SpanName, end_choice


class PrefillJob(Job):
    """A Job with scores of the prompt, if they are wanted, and one update at its end.

    An attempt that fails or is withdrawn ends its hold, too.
    """

    def __init__(self, request: EngineRequest, arrived_s: float, block_size: int) -> None:
        """`request` is a HandOff."""
        super().__init__(request, Role.PREFILL, arrived_s, block_size, SpanName.PUBLISH)
        self._unfinished = {choice.index for choice in request.choices}
        self._firsts: dict[int, worker_pb2.ChoiceTokens] = {}
        self._last_token_s = arrived_s

    def take(self, news: News, now_s: float) -> worker_pb2.Update | None:
        if isinstance(news, worker_pb2.Update):
            self._last_token_s = now_s
            (tokens,) = news.choices
            self._firsts[tokens.index] = tokens
            return None
        self._prompt.note(news, now_s)
        match news:
            case Finished():
                end_choice(self._firsts[news.choice], news)
                self._unfinished.discard(news.choice)
                return None if self._unfinished else self._answer(0, now_s)
            case Scored():
                return self._scored(news)
            case HandedOff(num_held=num_held):
                self._stopwatch.begin_span(SpanName.PUBLISH, self._last_token_s)
                self._stopwatch.count(blocks=num_held)
                return self._answer(num_held, now_s)
            case Failed(error=error):
                return self._failed(error)
        return None

    def releases_hold(self, update: worker_pb2.Update) -> bool:
        return update.end.HasField("error")

    def _answer(self, num_held: int, now_s: float) -> worker_pb2.Update:
        return self._update(
            choices=self._firsts.values(),
            prompt=self._prompt.source,
            num_held_blocks=num_held,
            end=worker_pb2.End(spans=self._stopwatch.spans(now_s)),
        )

    def _failed(self, error: BatonError) -> worker_pb2.Update:
        """Tells where the KV came from: cached KV may be why there is no number."""
        update = self.withdraw(error)
        if (source := self._prompt.source) is not None:
            update.prompt.CopyFrom(source)
        return update
