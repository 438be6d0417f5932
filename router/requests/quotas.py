"""The use of keys against their allowances: requests and tokens by the minute, and requests at a time. Pure.

A bound by the minute is a budget that refills evenly. A request comes in while something is left of the tokens, and
pays for its own when it is over: it may overdraw, and the next ones wait until that is made good.
"""

from dataclasses import dataclass

from wire.errors import Overloaded, reached
from wire.trust.key_ring import Key

MINUTE_S = 60.0


class Budget:
    """An amount that refills to `per_minute` within a minute. Times are of one monotonic clock."""

    def __init__(self, per_minute: int, now_s: float) -> None:
        self.per_minute = per_minute
        self._left = float(per_minute)
        self._at_s = now_s

    def take(self, amount: float, now_s: float) -> None:
        """Takes an amount; more than what is left is a debt."""
        self._left = self._left_at(now_s) - amount
        self._at_s = now_s

    def wait_s(self, now_s: float) -> float:
        """Returns the time until at least 1 is left."""
        return max(0.0, (1 - self._left_at(now_s)) * MINUTE_S / self.per_minute)

    def _left_at(self, now_s: float) -> float:
        return min(self.per_minute, self._left + (now_s - self._at_s) * self.per_minute / MINUTE_S)


@dataclass
class _Use:
    requests: Budget | None
    tokens: Budget | None
    num_open: int = 0


class Quotas:
    """The use of each key since its first request. retry_after_s: for a key with too many requests open."""

    def __init__(self, retry_after_s: float) -> None:
        self._retry_after_s = retry_after_s
        self._uses: dict[str, _Use] = {}

    def require_room(self, key: Key, now_s: float) -> None:
        """Raises Overloaded, with the time to wait, if the key may begin no request now."""
        use, max_open = self._use(key, now_s), key.allowance.max_open_requests
        for name, budget in (("requests", use.requests), ("tokens", use.tokens)):
            if budget is not None and (wait_s := budget.wait_s(now_s)) > 0:
                raise Overloaded(
                    reached(
                        budget.per_minute, f"{name} per minute of the key are used up", f"the key's {name}_per_minute"
                    ),
                    wait_s,
                )
        if max_open is not None and use.num_open >= max_open:
            told = reached(max_open, "requests of the key are open", "the key's max_open_requests")
            raise Overloaded(told, self._retry_after_s)

    def enter(self, key: Key, now_s: float) -> None:
        """Begins a request of the key."""
        use = self._use(key, now_s)
        use.num_open += 1
        if use.requests is not None:
            use.requests.take(1, now_s)

    def leave(self, key: Key, num_tokens: int, now_s: float) -> None:
        """Ends a request of the key, and charges its tokens of prompt and answer."""
        use = self._use(key, now_s)
        use.num_open -= 1
        if use.tokens is not None:
            use.tokens.take(num_tokens, now_s)

    def check(self, num_open: int) -> list[str]:
        """Returns violated invariants, given the number of all open requests."""
        num_counted = sum(use.num_open for use in self._uses.values())
        return [] if num_counted == num_open else [f"{num_counted} requests are counted for keys, {num_open} are open"]

    def _use(self, key: Key, now_s: float) -> _Use:
        if key.id not in self._uses:
            per_minute = key.allowance.requests_per_minute, key.allowance.tokens_per_minute
            requests, tokens = (None if bound is None else Budget(bound, now_s) for bound in per_minute)
            self._uses[key.id] = _Use(requests, tokens)
        return self._uses[key.id]
