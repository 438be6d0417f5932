"""The behaviour of a prefill worker: its batcher, and its jobs.

A job is an attempt: prompt in, one token per choice out, the prompt's blocks held in the store.

queue -> wait -> fetch -> wait -> compute -> publish -> answered
                                         \\-> answered, if every choice ended with its first token
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

from engine.events import Failed, Finished, HandedOff, Scored
from engine.request import EngineRequest, HandOff
from engine.schedule.batcher import UNLEARNED, Candidate, Pages, Phase, Plan, StepCosts, fit_running
from wire.errors import BatonError
from wire.journal import Kind
from wire.layout import KVLayout
from wire.load.fairness import by_share
from wire.pb import worker_pb2
from wire.pools import Role
from worker.config import BatchSettings
from worker.job import Behaviour, Job, News, end_choice

LEAST_CHUNK_BYTES = 32 << 20
"""KV of the last chunk of a prompt: a device writes and reads it sooner than it runs a model once more."""


@dataclass(frozen=True)
class PrefillBatcher:
    """Tenants by fair shares; of one tenant the shortest remaining prompt first, with ageing: each later arrival raises
    the urgency of a waiting prompt.

    A long prompt lets shorter prompts pass, at most `num_missing / patience_tokens` of them. The batcher admits a
    prompt only with pages for all of it, so that prompts of one tenant do not preempt one another. Source: shortest
    remaining processing time first, with linear ageing.

    max_step_tokens: the most tokens of one step, and of a chunk. max_running: the most sequences with pages.
    patience_tokens: how many more tokens a prompt may lack than one that arrived next, and still run first.
    least_chunk_tokens: the least tokens of a chunk that a prompt without others is cut to, see `_halfway`; None cuts
    none.
    """

    max_step_tokens: int = 2048
    max_running: int = 128
    patience_tokens: int = 512
    least_chunk_tokens: int | None = None

    def plan(
        self,
        waiting: Sequence[Candidate],
        running: Sequence[Candidate],
        pages: Pages,
        costs: StepCosts = UNLEARNED,
    ) -> Plan:
        if self.least_chunk_tokens is not None and len(running) + len(waiting) == 1:
            running = [_halfway(one, self.least_chunk_tokens, pages.block_size) for one in running]
        running, waiting = self._by_urgency(running), self._by_urgency(waiting)
        step = fit_running(running, pages, self.max_step_tokens)
        num_slots = self.max_running - len(running)
        num_spare = _num_unclaimed(running, pages)
        plan = step.plan_admitting(waiting, pages, num_slots=num_slots, num_spare=num_spare)
        if plan.admit or not waiting:
            return plan
        victims = _victims(waiting[0], running, pages, num_slots, num_spare)
        run = {one: num for one, num in step.run.items() if one not in victims}
        return replace(plan, preempt=victims, admit=(waiting[0].handle,), run=run) if victims else plan

    def _by_urgency(self, candidates: Sequence[Candidate]) -> list[Candidate]:
        """Sorts by tenants' shares, and within a tenant by missing tokens; handles grow with arrival."""
        return by_share(candidates, lambda one: one.num_missing + one.handle * self.patience_tokens)


def _num_unclaimed(running: Sequence[Candidate], pages: Pages) -> int:
    """Counts the pages left once each running sequence has pages for its whole prompt."""
    return pages.num_allocatable - sum(pages.needed_in_all(one) for one in running)


def _victims(
    head: Candidate, running: Sequence[Candidate], pages: Pages, num_slots: int, num_spare: int
) -> tuple[int, ...]:
    """Picks the least urgent prompts to preempt so that the head of the queue fits; none if its tenant runs a prompt.

    Each tenant that loses prompts keeps one, so tenants do not preempt one another in turns.
    """
    num_left = Counter(one.standing.tenant for one in running)
    victims: list[int] = []
    for one in reversed(running) if head.standing.tenant not in num_left else ():
        if num_slots > 0 and pages.needed_in_all(head) <= num_spare:
            break
        if num_left[one.standing.tenant] > 1 and one.phase is not Phase.FETCHING:
            num_left[one.standing.tenant] -= 1
            victims.append(one.handle)
            num_slots, num_spare = num_slots + 1, num_spare + one.num_pages + pages.needed_in_all(one)
    return tuple(victims) if num_slots > 0 and pages.needed_in_all(head) <= num_spare else ()


def _halfway(candidate: Candidate, least: int, block_size: int) -> Candidate:
    """Ends a prompt's next chunk at a block, halfway to its end, so that little is left to publish behind the last one.

    A chunk has at least `least` tokens, and the last one at most half as many more.
    """
    if 2 * candidate.num_missing <= 3 * least:
        return candidate
    end = candidate.num_computed + max(least, candidate.num_missing // 2)
    end = -(-end // block_size) * block_size
    return replace(candidate, chunk_end=end if candidate.chunk_end is None else min(end, candidate.chunk_end))


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


def least_chunk_tokens(layout: KVLayout) -> int:
    """Returns the tokens, of whole blocks, whose KV has LEAST_CHUNK_BYTES."""
    return -(-LEAST_CHUNK_BYTES // layout.payload_bytes) * layout.block_size


def prefill_behaviour(batch: BatchSettings, block_size: int, least_tokens: int | None = None) -> Behaviour:
    """Puts a prefill worker's batcher and jobs together. `block_size`: tokens of a block, for the timeline.

    least_tokens: `least_chunk_tokens` of a device that publishes beside computing; None for a CPU, whose cores do both.
    """
    batcher = PrefillBatcher(batch.max_step_tokens, batch.max_running, batch.patience_tokens, least_tokens)
    return Behaviour(Role.PREFILL, batcher, HandOff, partial(PrefillJob, block_size=block_size), block_size)
