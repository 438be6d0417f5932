"""The forecast of a request's end, by the prompts queued ahead of it under fair shares, and by learned speeds. Pure.

    prompts ahead      the own tenant's, and of each other tenant as much as fair shares serve meanwhile
    + its own prompt   uncached tokens at a worker's speed
    + its answer       tokens at the learned time of a token
    + margin           the error of earlier forecasts, almost the largest

A request that is forecast to miss its deadline, and would wait for others, is refused. Nothing is refused before speeds
are learned. A prompt that misses the limit on its first token is deferred (`deferral_s`).
"""

import math
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from router.observe.journal import OK, RequestJournal
from wire.errors import DeadlineExceeded, Overloaded
from wire.sampling import SamplingParams
from wire.tier import Duration

NUM_ERRORS = 400
"""Errors of forecasts that are remembered."""
MISSES = 0.005
"""The part of these errors that the margin leaves out."""
MAX_TENANTS = 1024
KEPT = 0.9
"""Weight of the mean length of a tenant's answers over its last answer's."""
_TOKEN_PRIOR_S = 0.02
LATE = (OK, DeadlineExceeded.status.grpc)
MAX_AGE = 3.0
"""Age of a request, in limits on its first token, at which its prompt is deferred no more: else overload starves it."""


def deferral_s(limit_s: float, age_s: float, computes_s: float, left_s: float) -> tuple[float, float] | None:
    """Returns the seconds from now between which a prompt is deferred; None if it never is.

    Prompts that can have their first token within the limit go before a deferred one, which no longer can. That ends
    when the request is MAX_AGE limits old, or half of its life is over. A prompt that alone takes longer than the limit
    is never deferred: it would always be.

    limit_s: on the first token. age_s: since the request's arrival. computes_s: what its prompt alone takes. left_s:
    until its answer must begin.
    """
    if not computes_s < limit_s:
        return None
    after_s = max(0.0, limit_s - computes_s - age_s)
    until_s = min(MAX_AGE * limit_s, (age_s + left_s) / 2) - age_s
    return (after_s, until_s) if after_s < until_s else None


@dataclass(frozen=True)
class PromptAhead:
    """A prompt that waits or is computed: its uncached tokens, its tenant, and its weight in fair shares."""

    tenant: Hashable
    num_tokens: float
    weight: float = 1.0


class Forecast:
    """The prompts under way at a router, and what it has learned of its workers and its tenants.

    limit_s: on a request's first token.
    """

    def __init__(self, limit_s: float = math.inf) -> None:
        self.limit_s = limit_s
        self._queued: dict[object, PromptAhead] = {}
        self._token = Duration(_TOKEN_PRIOR_S)
        self._answer_len: OrderedDict[Hashable, float] = OrderedDict()
        self._errors_s: deque[float] = deque(maxlen=NUM_ERRORS)

    @contextmanager
    def queued(self, prompt: PromptAhead) -> Iterator[Callable[[], object]]:
        """Counts a prompt until the yielded function is called, or the context ends."""
        place = object()
        self._queued[place] = prompt
        try:
            yield lambda: self._queued.pop(place, None)
        finally:
            self._queued.pop(place, None)

    def require_in_time(
        self, prompt: PromptAhead, answer: SamplingParams, token_s: Sequence[float], left_s: float
    ) -> float | None:
        """Returns the seconds until the request's end; None if too little is learned.

        Raises Overloaded, with the seconds after which it would be in time. token_s: seconds of prefill a token, for
        each worker that has learned it. left_s: the time until its deadline.
        """
        if not token_s or self._token.learned_s is None:
            return None
        wait_s = self._num_ahead(prompt) / sum(1 / one for one in token_s)
        own_s = prompt.num_tokens * max(token_s) + self.answer_s(prompt.tenant, answer)
        late_s = wait_s + own_s + self._margin_s - left_s
        if late_s > 0 and wait_s > 0:
            retry_s = min(late_s, wait_s)
            raise Overloaded(
                f"the deadline in {left_s:.1f} s would pass: prompts ahead take {wait_s:.1f} s, and it {own_s:.1f} s",
                retry_s,
            )
        return wait_s + own_s

    def answer_s(self, tenant: Hashable, answer: SamplingParams) -> float:
        """Returns the seconds that an answer will take."""
        return self._token.mean_s * self._num_output(tenant, answer)

    def learn(self, journal: RequestJournal, tenant: Hashable) -> None:
        """Learns from an ended request: the time of a token, the length of answers, and the error of its forecast.

        The time beyond the limit until its first token is no error: its prompt was deferred.
        """
        if journal.outcome not in LATE:
            return
        if journal.inter_token_s is not None:
            self._token.learn(journal.inter_token_s)
        if journal.outcome == OK:
            length = journal.num_output_tokens / len(journal.finish_reasons)
            self._answer_len[tenant] = KEPT * self._answer_len.pop(tenant, length) + (1 - KEPT) * length
            if len(self._answer_len) > MAX_TENANTS:
                self._answer_len.popitem(last=False)
        if journal.forecast_s is not None:
            total_s = journal.timeline.total_ms / 1000
            first_s = total_s if journal.ttft_s is None else journal.ttft_s
            self._errors_s.append(total_s - journal.forecast_s - max(0.0, first_s - self.limit_s))

    @property
    def _margin_s(self) -> float:
        """The error that all but MISSES of the remembered errors do not exceed."""
        by_size = sorted(self._errors_s, reverse=True)
        return max(0.0, by_size[int(MISSES * len(by_size))]) if by_size else 0.0

    def _num_ahead(self, prompt: PromptAhead) -> float:
        """Counts the tokens of prompts that fair shares serve before this prompt is computed."""
        tokens: dict[Hashable, float] = {}
        costs: dict[Hashable, float] = {}
        for one in self._queued.values():
            tokens[one.tenant] = tokens.get(one.tenant, 0.0) + one.num_tokens
            costs[one.tenant] = costs.get(one.tenant, 0.0) + one.num_tokens / one.weight
        own = costs.get(prompt.tenant, 0.0) + prompt.num_tokens / prompt.weight
        shares = {tenant: min(1.0, own / cost) for tenant, cost in costs.items() if cost}
        return sum(tokens[tenant] * share for tenant, share in shares.items())

    def _num_output(self, tenant: Hashable, answer: SamplingParams) -> float:
        """Returns the tokens that an answer will have, as its tenant's before had."""
        if answer.ignore_eos and not answer.stop and not answer.stop_token_ids:
            return answer.max_tokens
        return min(max(self._answer_len.get(tenant, 1.0), answer.min_tokens), answer.max_tokens)
