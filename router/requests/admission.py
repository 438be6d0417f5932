"""Which requests may come in: bounds on open and queued ones, and the use of keys against their allowances. Pure."""

from dataclasses import dataclass

from router.config import AdmissionBounds
from wire.errors import Overloaded, RequestExists, reached
from wire.ids import QualifiedId
from wire.trust.key_ring import Key


class Admission:
    """Open requests by id."""

    def __init__(self, bounds: AdmissionBounds) -> None:
        self._bounds = bounds
        self._queued_bytes: dict[QualifiedId, int] = {}
        self._num_queued_bytes = 0
        self._running: set[QualifiedId] = set()

    @property
    def retry_after_s(self) -> float:
        return self._bounds.retry_after_s

    @property
    def num_queued(self) -> int:
        return len(self._queued_bytes)

    @property
    def num_running(self) -> int:
        return len(self._running)

    def require_room(self) -> None:
        """Raises Overloaded if no request may come in, however small it is."""
        num_open = self.num_queued + self.num_running + 1
        self._require(num_open, self._bounds.max_open_requests, "requests are open", "router.max_open_requests")
        max_queued = self._bounds.max_queued_requests
        self._require(self.num_queued + 1, max_queued, "requests are queued", "router.max_queued_requests")

    def admit(self, request_id: QualifiedId, num_bytes: int) -> None:
        """Raises RequestExists if the id is taken, Overloaded if a bound is reached."""
        if request_id in self._queued_bytes or request_id in self._running:
            raise RequestExists("a request of that id is running", request_id=request_id)
        self.require_room()
        num_queued, max_queued = self._num_queued_bytes + num_bytes, self._bounds.max_queued_bytes
        self._require(num_queued, max_queued, "bytes of requests may be queued", "router.max_queued_bytes")
        self._queued_bytes[request_id] = num_bytes
        self._num_queued_bytes += num_bytes

    def started(self, request_id: QualifiedId) -> None:
        """The request has its first token."""
        if request_id in self._queued_bytes:
            self._num_queued_bytes -= self._queued_bytes.pop(request_id)
            self._running.add(request_id)

    def leave(self, request_id: QualifiedId) -> None:
        """The request is over."""
        self._num_queued_bytes -= self._queued_bytes.pop(request_id, 0)
        self._running.discard(request_id)

    def check(self) -> list[str]:
        """Returns violated invariants: the bytes counted are the bytes of queued requests."""
        num_bytes = sum(self._queued_bytes.values())
        if num_bytes == self._num_queued_bytes:
            return []
        return [f"{self._num_queued_bytes} bytes are counted as queued, {num_bytes} are"]

    def _require(self, number: int, limit: int, what: str, setting: str) -> None:
        if number > limit:
            raise Overloaded(reached(limit, what, setting), self._bounds.retry_after_s)


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
            refusal = reached(max_open, "requests of the key are open", "the key's max_open_requests")
            raise Overloaded(refusal, self._retry_after_s)

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
