"""Fair shares of tenants: counters of the tokens that each was served, over its weight. Pure.

    enter ──▶ active: charge, charge_output ──▶ leave

A queue serves the active tenant with the least counter next. A tenant that was idle goes on from its counter, but at
most a burst below the virtual time, which is the greatest that the least counter of the active tenants has been: so a
tenant that uses less than its share has a burst of requests served at once, and idleness saves no more than that.
Routers and workers each count what they see. A prompt counts once it is over, or has taken a quantum: so a tenant that
is due has a prompt computed in one go, and not in turns with others.

Source: start-time fair queueing (SIGCOMM '96), virtual token counters of servers of language models (OSDI '24), and
borrowed virtual time (SOSP '99) for bursts.
"""

from collections import deque
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from typing import Protocol, TypeVar

OUTPUT_COST = 2.0
"""Cost of a generated token, where an uncached token of a prompt costs 1 and a cached token nothing."""
BURST = 8192.0
"""The most by which a tenant that was idle begins below the virtual time."""
QUANTUM = 4096.0
"""The most cost of prompts under way that a tenant's counter lacks."""
MAX_WEIGHT = 1000.0
MAX_PRIORITY = 1 << 31
"""Bound on the magnitude of a priority."""


def never() -> bool:
    """Returns False, for requests that are never deferred."""
    return False


def deferred_between(after_s: float, until_s: float, clock: Callable[[], float]) -> Callable[[], bool]:
    """Returns a function that tells whether a request is deferred by now. The seconds count from this call."""
    if not until_s:
        return never
    began_s = clock()
    return lambda: after_s <= clock() - began_s < until_s


@dataclass(frozen=True)
class Precedence:
    """The precedence that a request brings along. weight: its tenant's share beside others'.

    priority: the lower goes first within a tenant. output_cost: the sum that its router has charged its tenant for
    generated tokens. is_deferred: tells whether requests of its tenant and priority that can be in time go before it
    now.
    """

    weight: float = 1.0
    priority: int = 0
    output_cost: float = 0.0
    is_deferred: Callable[[], bool] = never


@dataclass(frozen=True)
class Standing:
    """A request's standing when a step is planned. spent: its tenant's counter. is_deferred: see Precedence."""

    tenant: Hashable = b""
    spent: float = 0.0
    weight: float = 1.0
    priority: int = 0
    is_deferred: bool = False


PLAIN = Precedence()
ALONE = Standing()
"""The standing of all requests of an engine without tenants."""


@dataclass
class _Account:
    """A tenant's counter. output_cost: its part for generated tokens. num_open: begun and unfinished requests.

    num_streams: further requests, which wait for nothing. pending: the cost of prompts under way that `spent` lacks.
    """

    spent: float
    pending: float = 0.0
    output_cost: float = 0.0
    num_open: int = 0
    num_streams: int = 0


class FairShares:
    """The counters of tenants with open requests, and of idle tenants less than a burst below the virtual time."""

    def __init__(self) -> None:
        self._accounts: dict[Hashable, _Account] = {}
        self._virtual_time = 0.0

    def enter(self, tenant: Hashable) -> None:
        """Counts a begun request; a tenant without others begins at most a burst below the virtual time."""
        account = self._accounts.get(tenant)
        if account is None or not account.num_open:
            account = self._begin(tenant)
        account.num_open += 1

    def leave(self, tenant: Hashable) -> None:
        """Counts the end of a request."""
        self._accounts[tenant].num_open -= 1

    def begin_stream(self, tenant: Hashable) -> None:
        """Counts a request as a stream, which waits for nothing; a tenant with streams alone counts as idle."""
        self._accounts[tenant].num_open -= 1
        self._accounts[tenant].num_streams += 1

    def end_stream(self, tenant: Hashable) -> None:
        """Counts the end of a stream."""
        self._accounts[tenant].num_streams -= 1

    def defer(self, tenant: Hashable, cost: float) -> None:
        """Charges a part of a prompt once that is over, or has taken a quantum."""
        if tenant in self._accounts:
            self._accounts[tenant].pending += cost
            if self._accounts[tenant].pending >= QUANTUM:
                self.settle(tenant)

    def settle(self, tenant: Hashable) -> None:
        """Charges the deferred cost at the end of a prompt."""
        if tenant in self._accounts:
            account = self._accounts[tenant]
            account.spent, account.pending = account.spent + account.pending, 0.0

    def charge(self, tenant: Hashable, cost: float) -> None:
        """Adds a cost over the tenant's weight. Does nothing for a forgotten tenant."""
        if tenant in self._accounts:
            self._accounts[tenant].spent += cost

    def charge_output(self, tenant: Hashable, cost: float) -> None:
        """Charges generated tokens, and adds them to `output_cost`."""
        self.charge(tenant, cost)
        if tenant in self._accounts:
            self._accounts[tenant].output_cost += cost

    def learn_output(self, tenant: Hashable, output_cost: float) -> None:
        """Charges what the sum of a router has grown by; a smaller sum, or the first, is where it begins."""
        account = self._accounts[tenant]
        known = account.output_cost or output_cost
        account.spent += max(0.0, output_cost - known)
        account.output_cost = output_cost

    def spent(self, tenant: Hashable) -> float:
        """Returns a tenant's counter."""
        return self._accounts[tenant].spent if tenant in self._accounts else 0.0

    def output_cost(self, tenant: Hashable) -> float:
        """Returns the part of a tenant's counter for generated tokens."""
        return self._accounts[tenant].output_cost if tenant in self._accounts else 0.0

    def standing(self, tenant: Hashable, precedence: Precedence, has_begun: bool = False) -> Standing:
        """Returns the present standing of a tenant's request; a request that has begun is not deferred any more."""
        is_deferred = not has_begun and precedence.is_deferred()
        return Standing(tenant, self.spent(tenant), precedence.weight, precedence.priority, is_deferred)

    def check(self) -> list[str]:
        """Lists tenants with open requests; empty if no request is open."""
        num_open = sum(account.num_open + account.num_streams for account in self._accounts.values())
        return [f"{num_open} requests are counted for tenants"] if num_open else []

    def _begin(self, tenant: Hashable) -> _Account:
        """Opens an account. Forgets idle tenants a burst below the virtual time; without open requests, all."""
        busy = [account for account in self._accounts.values() if account.num_open or account.num_streams]
        spent = [account.spent for account in busy if account.num_open] or [account.spent for account in busy]
        self._virtual_time = max(self._virtual_time, min(spent)) if spent else 0.0
        start = self._virtual_time - BURST
        items = self._accounts.items() if busy else ()
        self._accounts = {
            one: account for one, account in items if account.num_open or account.num_streams or account.spent > start
        }
        account = self._accounts.setdefault(tenant, _Account(start))
        account.spent = max(account.spent, start)
        return account


class Queued(Protocol):
    """An item of a queue that tenants share. cost: the tokens that serving it takes."""

    @property
    def standing(self) -> Standing: ...
    @property
    def cost(self) -> float: ...


Q = TypeVar("Q", bound=Queued)


def by_share(queued: Iterable[Q], urgency: Callable[[Q], float]) -> list[Q]:
    """Sorts by fair shares: next is an item of the tenant that has spent least, each item before it counted as spent.

    Items of one tenant are in order of priority, least first, then deferred ones last, then of urgency, least first; of
    tenants that have spent alike, the tenant with the least urgency is first.
    """
    queues: dict[Hashable, deque[Q]] = {}
    for one in sorted(queued, key=lambda one: (one.standing.priority, one.standing.is_deferred, urgency(one))):
        queues.setdefault(one.standing.tenant, deque()).append(one)
    places, ordered = [*queues.values()], list[Q]()
    if len(places) == 1:
        return [*places[0]]
    heads = [(queue[0].standing.spent, urgency(queue[0]), place) for place, queue in enumerate(places)]
    heapify(heads)
    while heads:
        spent, _, place = heappop(heads)
        ordered.append(one := places[place].popleft())
        if places[place]:
            heappush(heads, (spent + one.cost / one.standing.weight, urgency(places[place][0]), place))
    return ordered
