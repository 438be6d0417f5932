"""The behaviour of a decode worker: its batcher, and its jobs.

A job is an attempt: it fetches blocks, computes missing KV, and streams tokens to the end.

queue -> wait -> fetch -> wait -> compute -> generate -> ended
                              \\-> generate, if no KV of the prompt was missing
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from engine.events import Drafted, Failed, Fetched, Finished, Jumped, Scored
from engine.request import EngineRequest
from engine.schedule.batcher import (
    FIRST_CHUNK_TOKENS,
    UNLEARNED,
    Candidate,
    Pages,
    Phase,
    Plan,
    StepCosts,
    fit_running,
)
from wire.journal import Kind
from wire.load.fairness import by_share
from wire.pb import worker_pb2
from wire.pools import Role
from worker.config import BatchSettings
from worker.job import Behaviour, Job, News, end_choice


@dataclass(frozen=True)
class DecodeBatcher:
    """A batcher that decodes first, then runs prompt tokens without KV, in chunks that do not delay decoding much.

    Tenants by fair shares, of one tenant the older sequence first: in the queue, for chunks, and for pages.

    max_step_tokens: the most tokens of one step, at least max_running + max_chunk_tokens. max_running: the most
    sequences with pages. max_chunk_tokens: the most tokens of chunks in a step that also decodes. max_gap_s: the most
    seconds of such a step, by learned costs; None without a bound. Both bound the inter-token latency.
    """

    max_step_tokens: int = 2048
    max_running: int = 128
    max_chunk_tokens: int = FIRST_CHUNK_TOKENS
    max_gap_s: float | None = None

    def plan(
        self,
        waiting: Sequence[Candidate],
        running: Sequence[Candidate],
        pages: Pages,
        costs: StepCosts = UNLEARNED,
    ) -> Plan:
        waiting, running = (by_share(group, lambda one: one.handle) for group in (waiting, running))
        step = fit_running(running, pages, self._num_step_tokens(running, pages.block_size, costs))
        num_slots = self.max_running - len(running)
        return step.plan_admitting(waiting, pages, num_slots=num_slots, num_spare=_num_spare(running, pages))

    def _num_step_tokens(self, running: Sequence[Candidate], block_size: int, costs: StepCosts) -> int:
        num_decoding = sum(candidate.phase is Phase.DECODE for candidate in running)
        if not num_decoding:
            return self.max_step_tokens
        most = min(self.max_chunk_tokens, self.max_step_tokens - num_decoding)
        return num_decoding + (most if self.max_gap_s is None else costs.chunk_tokens(self.max_gap_s, most, block_size))


def _num_spare(running: Sequence[Candidate], pages: Pages) -> int:
    """Counts the pages left once each running sequence has pages for its next token, and one page more."""
    num_claimed = sum(pages.needed_in_all(candidate) + 1 for candidate in running)
    return pages.num_allocatable - num_claimed


class DecodeJob(Job):
    """A Job that sends an update for each token, and one after the last choice's fetch, which releases the hold.

    If the attempt ends before that, the router releases the hold.
    """

    def __init__(self, request: EngineRequest, arrived_s: float, block_size: int) -> None:
        super().__init__(request, Role.DECODE, arrived_s, block_size, Kind.GENERATE)
        self._num_output = {choice.index: len(choice.output_ids) for choice in request.choices}
        self._num_before = sum(self._num_output.values())
        self._unfinished = set(self._num_output)
        self._unfetched = set(self._num_output)
        self._generates = False

    def take(self, news: News, now_s: float) -> worker_pb2.Update | None:
        if isinstance(news, worker_pb2.Update):
            self._note_gained(news.choices[0], now_s)
            return news
        self.note(news, now_s)
        match news:
            case Fetched(choice=choice):
                return self._fetched(choice)
            case Jumped():
                return None if self._unfetched else self._update(prompt=self.source)
            case Scored():
                return self._scored(news)
            case Drafted(num_guessed=num_guessed, num_accepted=num_accepted):
                self.journal.count(tokens_guessed=num_guessed, tokens_accepted=num_accepted)
            case Finished():
                return self._finished(news, now_s)
            case Failed(error=error):
                return self.withdraw(error, now_s)
        return None

    def releases_hold(self, update: worker_pb2.Update) -> bool:
        return update.HasField("prompt")

    def _note_gained(self, tokens: worker_pb2.ChoiceTokens, now_s: float) -> None:
        if not self._generates:
            self._generates = True
            self._begin(Kind.GENERATE, now_s)
        self._num_output[tokens.index] = tokens.first_position + len(tokens.token_ids)

    def _fetched(self, choice: int) -> worker_pb2.Update | None:
        if choice not in self._unfetched:
            return None
        self._unfetched.remove(choice)
        return None if self._unfetched else self._update(prompt=self.source)

    def _finished(self, event: Finished, now_s: float) -> worker_pb2.Update:
        # A choice whose first token, drawn with a sibling's, is its last ends without a fetch of its own.
        update = self._fetched(event.choice) or self._update()
        end_choice(update.choices.add(index=event.choice, first_position=self._num_output[event.choice]), event)
        self._unfinished.discard(event.choice)
        if not self._unfinished:
            update.end.CopyFrom(self._ended(now_s))
        return update

    def _ended(self, now_s: float) -> worker_pb2.End:
        self.journal.count(tokens=sum(self._num_output.values()) - self._num_before)
        return super()._ended(now_s)


def decode_behaviour(batch: BatchSettings, block_size: int) -> Behaviour:
    """Puts a decode worker's batcher and jobs together. `block_size`: tokens of a block, for the timeline."""
    batcher = DecodeBatcher(batch.max_step_tokens, batch.max_running, batch.most_chunk_tokens, batch.max_gap_s)
    return Behaviour(Role.DECODE, batcher, EngineRequest, partial(DecodeJob, block_size=block_size), block_size)
