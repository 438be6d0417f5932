"""The behaviour of a prefill worker: its batcher, and its jobs.

A job is an attempt: prompt in, one token per choice out, the prompt's blocks held in the store.

queue -> wait -> fetch -> wait -> compute -> publish -> answered
                                         \\-> answered, if every choice ended with its first token
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from engine.events import Failed, Finished, HandedOff, Scored
from engine.request import EngineRequest, HandOff
from engine.schedule.batcher import UNLEARNED, Candidate, Pages, Plan, StepCosts, fit_running
from wire.errors import BatonError
from wire.journal import Kind
from wire.pb import worker_pb2
from wire.pools import Role
from worker.config import BatchSettings
from worker.job import Behaviour, Job, News, end_choice


@dataclass(frozen=True)
class PrefillBatcher:
    """Shortest remaining prompt first, with ageing: each later arrival raises the priority of a waiting prompt.

    A long prompt lets shorter prompts pass, at most `num_missing / patience_tokens` of them. The batcher admits a
    prompt only with pages for all of it, so that prompts do not preempt one another. Source: shortest remaining
    processing time first, with linear ageing.

    max_step_tokens: the most tokens of one step, and of a chunk. max_running: the most sequences with pages.
    patience_tokens: how many more tokens a prompt may lack than one that arrived next, and still run first.
    """

    max_step_tokens: int = 2048
    max_running: int = 128
    patience_tokens: int = 512

    def plan(
        self,
        waiting: Sequence[Candidate],
        running: Sequence[Candidate],
        pages: Pages,
        costs: StepCosts = UNLEARNED,
    ) -> Plan:
        step = fit_running(self._by_urgency(running), pages, self.max_step_tokens)
        num_slots = self.max_running - len(running)
        num_spare = _num_unclaimed(running, pages)
        return step.plan_admitting(self._by_urgency(waiting), pages, num_slots=num_slots, num_spare=num_spare)

    def _by_urgency(self, candidates: Sequence[Candidate]) -> list[Candidate]:
        """Sorts candidates by priority; handles grow with arrival."""
        return sorted(candidates, key=lambda one: one.num_missing + one.handle * self.patience_tokens)


def _num_unclaimed(running: Sequence[Candidate], pages: Pages) -> int:
    """Counts the pages left once each running sequence has pages for its whole prompt."""
    return pages.num_allocatable - sum(pages.needed_in_all(one) for one in running)


class PrefillJob(Job):
    """A Job that sends scores of the prompt, if wanted, and one update at its end.

    An attempt that fails or is withdrawn releases its hold, too.
    """

    def __init__(self, request: EngineRequest, arrived_s: float, block_size: int) -> None:
        """`request` is a HandOff."""
        super().__init__(request, Role.PREFILL, arrived_s, block_size, Kind.PUBLISH)
        self._unfinished = {choice.index for choice in request.choices}
        self._firsts: dict[int, worker_pb2.ChoiceTokens] = {}
        self._last_token_s = arrived_s

    def take(self, news: News, now_s: float) -> worker_pb2.Update | None:
        if isinstance(news, worker_pb2.Update):
            self._last_token_s = now_s
            (tokens,) = news.choices
            self._firsts[tokens.index] = tokens
            return None
        self.note(news, now_s)
        match news:
            case Finished():
                end_choice(self._firsts[news.choice], news)
                self._unfinished.discard(news.choice)
                return None if self._unfinished else self._answer(0, now_s)
            case Scored():
                return self._scored(news)
            case HandedOff(num_held=num_held):
                self._begin(Kind.PUBLISH, self._last_token_s)
                self.journal.count(blocks=num_held)
                return self._answer(num_held, now_s)
            case Failed(error=error):
                return self._failed(error, now_s)
        return None

    def releases_hold(self, update: worker_pb2.Update) -> bool:
        return update.end.HasField("error")

    def _answer(self, num_held: int, now_s: float) -> worker_pb2.Update:
        return self._update(
            choices=self._firsts.values(),
            prompt=self.source,
            num_held_blocks=num_held,
            end=self._ended(now_s),
        )

    def _failed(self, error: BatonError, now_s: float) -> worker_pb2.Update:
        """Adds the sources of the prompt's KV to the error: a cached block may be why logits are NaN."""
        update = self.withdraw(error, now_s)
        if (source := self.source) is not None:
            update.prompt.CopyFrom(source)
        return update


def prefill_behaviour(batch: BatchSettings, block_size: int) -> Behaviour:
    """Puts a prefill worker's batcher and jobs together. `block_size`: tokens of a block, for the timeline."""
    batcher = PrefillBatcher(batch.max_step_tokens, batch.max_running, batch.patience_tokens)
    return Behaviour(Role.PREFILL, batcher, HandOff, partial(PrefillJob, block_size=block_size))
