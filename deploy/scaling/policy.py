"""The sizes of the pools by limits on latency: load and learned speeds in, orders out. Pure.

    load ─▶ work of a pool, in workers ─▶ with margin: wanted ─▶ within bounds, up at once, down late ─▶ SizeOrder

The work of prefill is the part of a worker's time that arriving tokens and a backlog take; the work of decode is the
number of streams over the number that a worker carries within `slo.itl_ms`. The margin grows with the square root of
the work, as the chance of waiting for many servers does, by a factor that late requests raise and others lower. The
reserve, the size that stays between bursts, is learned in the same way.
"""

import math
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from deploy.plan.config import SloSettings
from deploy.scaling.demand import PoolLoad
from router.observe.demand import LEAST_S
from wire.pools import PoolSizes, Role

REVERSE_S = 60.0
"""Least time between two orders of a pool in opposite directions."""
CLEAR_S = 20.0
"""Time in which the pool clears a backlog of prompts; `slo.ttft_ms` if that is longer."""
MOST_FACTOR = 2.0
GAIN, RESERVE_GAIN = 0.02, 0.03
"""Growth of the factor, and of the reserve in workers, for each late request beyond 1 - `slo.share` of all."""
RESERVE_DWELLS, IDLE_DWELLS = 10.0, 3.0
"""Dwell times for which a size that was wanted bounds the reserve, and after which there is none without load."""
KEPT = 0.97
"""Weight of earlier observations of decode over the next."""
PRIOR = 0.01
"""Weight of the prior slope, as a variance of streams relative to their mean's square."""
STEP = 1.25
"""The most by which one answer changes the pace of prefill: a worker's nonsense moves no pool."""


@dataclass
class PrefillSpeed:
    """Seconds of a prefill worker for a token; None before a worker has told."""

    token_s: float | None = None

    def learn(self, token_s: float | None) -> None:
        known_s = self.token_s or token_s
        if known_s and token_s:
            self.token_s = min(max(token_s, known_s / STEP), known_s * STEP)


class DecodeSpeed:
    """A token's time by the streams of a worker: a line through observations, later ones with more weight.

    Where streams hardly vary, half of a token's time is taken to be the step's own. fastest_s: the least time seen.
    """

    def __init__(self) -> None:
        self.fastest_s: float | None = None
        self._sums = [0.0] * 5

    def learn(self, num_streams: float, itl_s: float) -> None:
        """Takes an observation: the streams of a worker, and the mean time of a token."""
        x, y = max(num_streams, 1.0), max(itl_s, LEAST_S)
        self.fastest_s = min(self.fastest_s or y, y)
        self._sums = [KEPT * kept + new for kept, new in zip(self._sums, (1.0, x, y, x * x, x * y), strict=True)]

    def streams_within(self, itl_s: float) -> float:
        """Returns the streams that a worker carries within a token's time; at least 1, and 1 without observations."""
        weight = self._sums[0]
        if not weight:
            return 1.0
        x, y, xx, xy = (one / weight for one in self._sums[1:])
        ridge = PRIOR * x * x
        slope = max((xy - x * y + ridge * y / (2 * x)) / (max(xx - x * x, 0.0) + ridge), y / x / 100)
        return max(1.0, x + (itl_s - y) / slope)


@dataclass(frozen=True)
class SizeOrder:
    """An order for one pool, and its reason in words. at_s: by the machine's monotonic clock."""

    role: Role
    before: int
    size: int
    reason: str
    at_s: float


@dataclass(frozen=True)
class PoolWork:
    """The work of a pool, in workers: its mean, that of one request, and that of a backlog, with a description."""

    mean: float
    each: float
    backlog: float
    reason: str


class Margin:
    """The workers of a pool beyond its work: a margin by a factor, and a reserve; late requests raise both."""

    def __init__(self, allowed: float, most: int) -> None:
        """allowed: the share of requests that may be late. most: bound of the reserve."""
        self.factor = MOST_FACTOR
        self.reserve: float | None = None
        self._allowed = allowed
        self._most = most

    def learn(self, judged: float, late: float, late_elsewhere: float, size: int) -> None:
        """Takes ended requests. late_elsewhere: requests late by another pool, which use up the allowed share.

        size: the pool's size, which is the reserve at first.
        """
        beyond = late - max(0.0, self._allowed * judged - late_elsewhere)
        self.factor = min(max(0.0, self.factor + GAIN * beyond), MOST_FACTOR)
        known = size if self.reserve is None else self.reserve
        self.reserve = min(max(0.0, known + RESERVE_GAIN * beyond), self._most)

    def beyond(self, work: PoolWork) -> float:
        return self.factor * math.sqrt(work.mean * work.each)


class PoolOrders:
    """The orders of one pool: up at once, down to what sufficed within the dwell time, and never back in REVERSE_S.

    The reserve stays, up to the most that was wanted lately, until the pool has been idle for IDLE_DWELLS. A size that
    another ordered (`baton scale`, `baton drain`, an order given up) holds for the dwell time.
    """

    def __init__(self, bounds: tuple[int, int], share: float, dwell_s: float) -> None:
        self._least, self._most = bounds
        self._share = share
        self._dwell_s = dwell_s
        self._wanted: deque[tuple[float, int, float]] = deque()
        self._size: int | None = None
        self._held_until_s = self._grown_s = self._shrunk_s = self._busy_s = -math.inf

    def resume(self, order: SizeOrder) -> None:
        """Takes the last order of an earlier policy."""
        if order.before < order.size:
            self._grown_s = order.at_s
        else:
            self._shrunk_s = order.at_s

    def decide(self, wanted: float, weight: float, size: int, now_s: float, reserve: float = 0.0) -> int | None:
        """Returns the size to order, or None. `now_s` is a reading of one monotonic clock; wanted: in workers."""
        if self._size is None:
            self._note(size, 0.0, now_s)
        if size != self._size:
            self._held_until_s = now_s + (0.0 if self._size is None else self._dwell_s)
            self._size = size
        self._busy_s = now_s if wanted else self._busy_s
        now_wanted = self._within(wanted)
        self._note(now_wanted, weight, now_s)
        while self._wanted[0][0] <= now_s - RESERVE_DWELLS * self._dwell_s:
            self._wanted.popleft()
        if now_s < self._busy_s + IDLE_DWELLS * self._dwell_s:
            now_wanted = max(now_wanted, min(self._within(reserve), max(wanted for _, wanted, _ in self._wanted)))
        is_dwelt = self._wanted[0][0] <= now_s - self._dwell_s
        if now_s < self._held_until_s:
            return None
        if now_wanted > size and now_s >= self._shrunk_s + REVERSE_S:
            self._size, self._grown_s = now_wanted, now_s
            return now_wanted
        enough = max(self._enough(now_s - self._dwell_s), now_wanted)
        if enough < size and is_dwelt and now_s >= self._grown_s + REVERSE_S:
            self._size, self._shrunk_s = enough, now_s
            return enough
        return None

    def _note(self, wanted: int, weight: float, now_s: float) -> None:
        """Adds a wanted size; sizes of a hundredth of the dwell time are one entry, with the largest."""
        is_new = not self._wanted or self._wanted[-1][0] <= now_s - self._dwell_s / 100
        since_s, most, total = (now_s, wanted, 0.0) if is_new else self._wanted.pop()
        self._wanted.append((since_s, max(most, wanted), total + weight))

    def _within(self, wanted: float) -> int:
        return min(max(math.ceil(min(wanted, self._most)), self._least), self._most)

    def _enough(self, since_s: float) -> int:
        """Returns the least size that `share` of the weight since a time wanted."""
        lately = [(size, weight) for at_s, size, weight in self._wanted if at_s > since_s]
        total = sum(weight for _, weight in lately)
        reached = 0.0
        for size, weight in sorted(lately):
            reached += weight
            if reached >= self._share * total and total:
                return size
        return self._least


class Policy:
    """The orders for both pools. A pool without a limit of its own keeps the size that it was given by hand."""

    def __init__(self, slo: SloSettings, last: Iterable[SizeOrder] = ()) -> None:
        """last: the orders of an earlier policy, which are not reversed soon, either."""
        self._slo = slo
        self._prefill = PrefillSpeed()
        self._decode = DecodeSpeed()
        self._problems: dict[Role, str] = {}
        self._orders = {role: PoolOrders(slo.bounds(role), slo.share, slo.dwell_s) for role in slo.roles}
        self._margins = {role: Margin(1 - slo.share, slo.bounds(role)[1]) for role in slo.roles}
        for order in last:
            if order.role in self._orders:
                self._orders[order.role].resume(order)

    def decide(self, load: PoolLoad, sizes: PoolSizes, now_s: float) -> Iterator[SizeOrder]:
        """Yields the orders for the pools that need another size."""
        self._prefill.learn(load.prefill_token_s)
        if load.itl_s:
            self._decode.learn(load.streams_beside, load.itl_s)
        self._judge(load, sizes)
        late = {Role.PREFILL: load.late_first, Role.DECODE: load.late_next}
        for role, orders in self._orders.items():
            margin = self._margins[role]
            margin.learn(load.judged, late[role], sum(late.values()) - late[role], sizes[role])
            work = self._prefill_work(load, sizes.prefill) if role is Role.PREFILL else self._decode_work(load)
            wanted = work.mean + work.backlog + margin.beyond(work)
            if (size := orders.decide(wanted, work.mean, sizes[role], now_s, margin.reserve or 0.0)) is not None:
                reason = f"{role.value} {sizes[role]} to {size}: {work.reason}"
                yield SizeOrder(role, sizes[role], size, reason, now_s)

    def problem(self, role: Role) -> str:
        """Returns why no size meets the limit of a pool, in words; "" if one does."""
        return self._problems.get(role, "")

    @property
    def problems(self) -> tuple[str, ...]:
        return tuple(filter(None, self._problems.values()))

    def _judge(self, load: PoolLoad, sizes: PoolSizes) -> None:
        """Finds out whether the limits can be met: a prompt alone, or the fastest token so far, takes longer."""
        slo, token_s, token_ms = self._slo, self._prefill.token_s or 0.0, 1000 * (self._decode.fastest_s or 0.0)
        alone_ms = 1000 * load.prompt_len * token_s
        if slo.ttft_ms is not None and load.prompt_len:
            told = f"a prompt has {load.prompt_len:.0f} uncached tokens, which take a worker {alone_ms:.0f} ms alone"
            self._problems[Role.PREFILL] = f"slo.ttft_ms is {slo.ttft_ms:g}: {told}" if alone_ms > slo.ttft_ms else ""
        if slo.itl_ms is not None:
            is_beyond = token_ms > slo.itl_ms and sizes.decode >= slo.bounds(Role.DECODE)[1]
            told = f"the fastest tokens so far took {token_ms:.1f} ms, with slo.max_decode workers"
            self._problems[Role.DECODE] = f"slo.itl_ms is {slo.itl_ms:g}: {told}" if is_beyond else ""

    def _prefill_work(self, load: PoolLoad, size: int) -> PoolWork:
        token_s, limit_s = self._prefill.token_s or 0.0, (self._slo.ttft_ms or math.inf) / 1000
        mean = load.prefill_tokens_s * token_s
        queued_s = load.waiting_tokens * token_s + max(0.0, load.arriving_tokens_s * token_s - size) * load.start_s
        backlog = max(0.0, queued_s / max(CLEAR_S, limit_s) - mean)
        told = f"{load.prefill_tokens_s:.0f} uncached tokens/s arrive, {load.waiting_tokens:.0f} wait"
        reason = f"{told}, and a worker computes {1 / token_s if token_s else 0:.0f}/s"
        return PoolWork(mean, load.prompt_len * token_s / limit_s, backlog, reason)

    def _decode_work(self, load: PoolLoad) -> PoolWork:
        if self._decode.fastest_s is None:
            return PoolWork(0.0, 0.0, 0.0, "no token's time is known yet")
        limit_s = (self._slo.itl_ms or math.inf) / 1000
        each = self._decode.streams_within(limit_s)
        # Quick workers have few streams: what counts is how many there would be at the limit.
        num_streams = max(load.num_streams, load.decode_tokens_s * limit_s)
        told = f"{load.decode_tokens_s:.0f} tokens/s in {load.num_streams:.0f} streams"
        return PoolWork(num_streams / each, 1 / each, 0.0, f"{told}, and a worker carries {each:.0f} within the limit")
