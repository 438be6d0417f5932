"""Admission of requests: limits on open and queued requests, and the use of keys against their allowances. Pure."""

import sys
from dataclasses import dataclass

from router.config import AdmissionBounds
from wire.errors import Overloaded, RequestExists, reached
from wire.ids import DEFAULT_TENANT, QualifiedId, tenant_of
from wire.load.limit import Limit
from wire.trust.key_ring import Key


@dataclass
class TenantUse:
    """A tenant's open and queued requests, and the bytes of the latter. weight: its latest key's, in fair shares."""

    weight: float = 1.0
    num_open: int = 0
    num_queued: int = 0
    num_bytes: int = 0


class Admission:
    """Open requests by id, and the limits on them, which tenants share by weight.

    Where a limit is reached, a tenant below its part of it is admitted nevertheless, and the others are refused, until
    all tenants together have twice the limit.
    """

    def __init__(self, bounds: AdmissionBounds) -> None:
        retry_after_s = self.retry_after_s = bounds.retry_after_s
        self._open = Limit(bounds.max_open_requests, "requests are open", "router.max_open_requests", retry_after_s)
        self._queued = Limit(
            bounds.max_queued_requests, "requests are queued", "router.max_queued_requests", retry_after_s
        )
        self._bytes = Limit(
            bounds.max_queued_bytes, "bytes of requests may be queued", "router.max_queued_bytes", retry_after_s
        )
        self._queued_bytes: dict[QualifiedId, int | None] = {}
        """None for a running request, which is open but not queued."""
        self._uses: dict[str, TenantUse] = {}
        """The tenants with open requests."""

    @property
    def num_queued(self) -> int:
        return self._queued.num_used

    @property
    def num_running(self) -> int:
        return self._open.num_used - self._queued.num_used

    def require_room(self, tenant: str = DEFAULT_TENANT, weight: float = 1.0, num_bytes: int = 0) -> None:
        """Raises Overloaded if a limit is reached, and the tenant has its part of it, or all have twice the limit.

        weight: its key's.
        """
        use = self._uses.get(tenant, TenantUse())
        asked = (
            (self._open, use.num_open, 1),
            (self._queued, use.num_queued, 1),
            (self._bytes, use.num_bytes, num_bytes),
        )
        for limit, num_used, num_more in asked:
            is_full = 0 < num_more > limit.num_free
            if is_full and (
                num_used + num_more > self._part(tenant, weight) * limit.max_units
                or num_more > limit.num_free + limit.max_units
            ):
                raise limit.refusal()

    def admit(self, request_id: QualifiedId, num_bytes: int, weight: float = 1.0) -> None:
        """Admits a request. Raises RequestExists if the id is taken, Overloaded as `require_room` does."""
        if request_id in self._queued_bytes:
            raise RequestExists("a request of that id is running", request_id=request_id)
        tenant = tenant_of(request_id)
        self.require_room(tenant, weight, num_bytes)
        self._bytes.exceed(num_bytes)
        self._queued.exceed()
        self._open.exceed()
        self._queued_bytes[request_id] = num_bytes
        use = self._uses.setdefault(tenant, TenantUse())
        use.weight = weight
        use.num_open, use.num_queued, use.num_bytes = use.num_open + 1, use.num_queued + 1, use.num_bytes + num_bytes

    def started(self, request_id: QualifiedId) -> bool:
        """Takes a request out of the queue at its first token; returns whether it was there."""
        num_bytes = self._queued_bytes.get(request_id)
        if num_bytes is None:
            return False
        self._bytes.release(num_bytes)
        self._queued.release()
        self._queued_bytes[request_id] = None
        use = self._uses[tenant_of(request_id)]
        use.num_queued, use.num_bytes = use.num_queued - 1, use.num_bytes - num_bytes
        return True

    def leave(self, request_id: QualifiedId) -> None:
        """Ends a request."""
        self.started(request_id)
        del self._queued_bytes[request_id]
        self._open.release()
        use = self._uses[tenant := tenant_of(request_id)]
        use.num_open -= 1
        if not use.num_open:
            del self._uses[tenant]

    def check(self) -> list[str]:
        """Lists violated invariants: limits and tenants must count the requests or bytes in the tables."""
        queued = [num_bytes for num_bytes in self._queued_bytes.values() if num_bytes is not None]
        uses = self._uses.values()
        counts = (
            ("requests are counted as open", self._open, sum(use.num_open for use in uses), len(self._queued_bytes)),
            ("requests are counted as queued", self._queued, sum(use.num_queued for use in uses), len(queued)),
            ("bytes are counted as queued", self._bytes, sum(use.num_bytes for use in uses), sum(queued)),
        )
        return [
            f"{counted} {what}, {number} are"
            for what, limit, of_tenants, number in counts
            for counted in (limit.num_used, of_tenants)
            if counted != number
        ]

    def _part(self, tenant: str, weight: float) -> float:
        """Returns a tenant's part of each limit: its weight over the weights of all tenants with open requests."""
        return weight / (weight + sum(use.weight for name, use in self._uses.items() if name != tenant))


MINUTE_S = 60.0


class Budget:
    """An amount that refills to `per_minute` within a minute. Times are readings of one monotonic clock."""

    def __init__(self, per_minute: int, now_s: float) -> None:
        self.per_minute = per_minute
        self._left = float(per_minute)
        self._at_s = now_s

    def take(self, amount: float, now_s: float) -> None:
        """Takes an amount, which may leave a debt."""
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
    open: Limit


class Quotas:
    """The use of each key since its first request. retry_after_s: told to a key with too many open requests."""

    def __init__(self, retry_after_s: float) -> None:
        self._retry_after_s = retry_after_s
        self._uses: dict[str, _Use] = {}

    def require_room(self, key: Key, now_s: float) -> None:
        """Raises Overloaded, with the time to wait, if the key may begin no request now."""
        use = self._use(key, now_s)
        for name, budget in (("requests", use.requests), ("tokens", use.tokens)):
            if budget is not None and (wait_s := budget.wait_s(now_s)) > 0:
                raise Overloaded(
                    reached(
                        budget.per_minute, f"{name} per minute of the key are used up", f"the key's {name}_per_minute"
                    ),
                    wait_s,
                )
        use.open.require()

    def enter(self, key: Key, now_s: float) -> None:
        """Counts the begin of a key's request."""
        use = self._use(key, now_s)
        use.open.take()
        if use.requests is not None:
            use.requests.take(1, now_s)

    def leave(self, key: Key, num_tokens: int, now_s: float) -> None:
        """Counts the end of a key's request, and charges its tokens of prompt and answer."""
        use = self._use(key, now_s)
        use.open.release()
        if use.tokens is not None:
            use.tokens.take(num_tokens, now_s)

    def check(self, num_open: int) -> list[str]:
        """Lists violated invariants, given the number of open requests."""
        num_counted = sum(use.open.num_used for use in self._uses.values())
        return [] if num_counted == num_open else [f"{num_counted} requests are counted for keys, {num_open} are open"]

    def _use(self, key: Key, now_s: float) -> _Use:
        if key.id not in self._uses:
            per_minute = key.allowance.requests_per_minute, key.allowance.tokens_per_minute
            requests, tokens = (None if bound is None else Budget(bound, now_s) for bound in per_minute)
            limit = Limit(
                sys.maxsize, "requests of the key are open", "the key's max_open_requests", self._retry_after_s
            )
            self._uses[key.id] = _Use(requests, tokens, limit)
        self._uses[key.id].open.max_units = key.allowance.max_open_requests or sys.maxsize  # keys may be reloaded
        return self._uses[key.id]
