"""The load of the pools over a window: what the routers say, as differences of their sums. Pure."""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

from router.observe.demand import Demand

WINDOW_S, RATE_S, START_S = 120.0, 20.0, 8.0
"""Times over which sums are compared; the last is a worker's from its order until it serves, before one is learned."""
JUDGED: tuple[Callable[[Demand], float], ...] = (
    lambda demand: demand.num_judged,
    lambda demand: demand.late_first,
    lambda demand: demand.late_next,
)
GAPS: tuple[Callable[[Demand], float], ...] = (lambda demand: demand.gaps, lambda demand: demand.gaps_s)


@dataclass(frozen=True, kw_only=True)
class PoolLoad:
    """The load of the pools. Rates are over the window, the other numbers of now.

    prefill_tokens_s: tokens that arrive and are not cached, as they must be served; arriving_tokens_s: as they come,
    over start_s, a worker's time from its order until it serves; waiting_tokens: such tokens before their first token.
    prompt_len: mean tokens of a prompt to compute. num_streams: choices that generate. itl_s: mean time of a token;
    None without tokens. prefill_token_s: see Demand. judged, late_first, late_next: since the last load.
    """

    prefill_tokens_s: float = 0.0
    arriving_tokens_s: float = 0.0
    waiting_tokens: float = 0.0
    start_s: float = START_S
    prompt_len: float = 0.0
    decode_tokens_s: float = 0.0
    num_streams: float = 0.0
    streams_beside: float = 0.0
    itl_s: float | None = None
    prefill_token_s: float | None = None
    judged: float = 0.0
    late_first: float = 0.0
    late_next: float = 0.0


class _Window:
    """The answers of one router over the window. The last stays, whatever its age: a silent router keeps its load."""

    def __init__(self) -> None:
        self._answers: deque[tuple[float, Demand]] = deque()

    def take(self, answer: Demand, now_s: float) -> None:
        if self._answers and (self.last.started != answer.started or now_s <= self._answers[-1][0]):
            self._answers.clear()
        self._answers.append((now_s, answer))
        while len(self._answers) > 2 and self._answers[1][0] <= now_s - WINDOW_S:
            self._answers.popleft()

    @property
    def last(self) -> Demand:
        return self._answers[-1][1]

    def grown(self, amount: Callable[[Demand], float]) -> float:
        """Returns the growth of a sum over the window; a sum that went back has not grown."""
        return max(0.0, amount(self.last) - amount(self._answers[0][1]))

    def news(self, amount: Callable[[Demand], float]) -> float:
        """Returns the growth of a sum by the last answer; 0 for the first, whose requests ended before."""
        return max(0.0, amount(self.last) - amount(self._answers[-2][1])) if len(self._answers) > 1 else 0

    def rate(self, amount: Callable[[Demand], float], over_s: float) -> float:
        """Returns the growth of a sum a second over a time; 0.0 after one answer."""
        now_s, last = self._answers[-1]
        at_s, one = next((one for one in self._answers if one[0] >= now_s - over_s), self._answers[0])
        return max(0.0, amount(last) - amount(one)) / (now_s - at_s) if now_s > at_s else 0.0

    def bound(self, amount: Callable[[Demand], float], limit_s: float) -> float:
        """Returns the rate at which a sum's growth must be served so that all of it is served in time.

        What came in a time t must be served within t and the limit: the greatest such rate over the window; 0.0 when
        nothing comes or waits.
        """
        if not self.news(amount) and not self.last.waiting_tokens:
            return 0.0
        now_s, last = self._answers[-1]
        return max((amount(last) - amount(one)) / (now_s - at_s + limit_s) for at_s, one in self._answers)


class Loads:
    """The load of a cluster, from the answers of its routers."""

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._windows: dict[str, _Window] = {}
        self._uncached = 1.0
        self._judged = [0.0, 0.0, 0.0]

    def take(self, router: str, answer: Demand, now_s: float) -> None:
        """Takes a router's answer. `now_s` is always a reading of one monotonic clock."""
        window = self._windows.setdefault(router, _Window())
        window.take(answer, now_s)
        news = (window.news(amount) for amount in JUDGED)
        self._judged = [sum(pair) for pair in zip(self._judged, news, strict=True)]

    def load(self, start_s: float = START_S) -> PoolLoad:
        """Returns the load by the last answers; the judged requests are counted once. start_s: at most WINDOW_S."""
        windows = list(self._windows.values())
        known = sum(one.grown(lambda demand: demand.known_tokens) for one in windows)
        if known:
            self._uncached = min(1.0, sum(one.grown(lambda demand: demand.uncached_tokens) for one in windows) / known)
        gaps, gaps_s = (sum(one.news(amount) for one in windows) for amount in GAPS)
        beside = [one.last.streams_beside for one in windows]
        prompts = sum(one.grown(lambda demand: demand.num_prompts) for one in windows)
        tokens = sum(one.grown(lambda demand: demand.prompt_tokens) for one in windows) * self._uncached
        paces_s = [pace_s for one in windows if (pace_s := one.last.prefill_token_s) is not None]
        judged, self._judged = self._judged, [0, 0, 0]
        return PoolLoad(
            prefill_tokens_s=sum(one.bound(lambda demand: demand.prompt_tokens, self._limit_s) for one in windows)
            * self._uncached,
            arriving_tokens_s=sum(one.rate(lambda demand: demand.prompt_tokens, start_s) for one in windows)
            * self._uncached,
            start_s=start_s,
            waiting_tokens=sum(one.last.waiting_tokens for one in windows) * self._uncached,
            prompt_len=tokens / prompts if prompts else 0.0,
            decode_tokens_s=sum(one.rate(lambda demand: demand.gaps, RATE_S) for one in windows),
            num_streams=sum(one.last.num_streams for one in windows),
            streams_beside=max(beside, default=0.0),
            itl_s=gaps_s / gaps if gaps else None,
            prefill_token_s=median(paces_s) if paces_s else None,
            judged=judged[0],
            late_first=judged[1],
            late_next=judged[2],
        )
