"""Holds of hand-offs that decode has not fetched yet: their part of an arena, waiting prefills, renewals.

Prefill leaves a prompt's blocks in its node's arena under a hold, which protects them from eviction. If holds filled
the arena, prefill could not store the next prompt; so no prefill starts on a node while holds take more than half.

A node with a cold tier moves blocks there earlier and ends their holds, which then no longer count.

Several routers share the half: each tells the node's directory what its holds take, and learns what the others' take.
"""

import asyncio
import logging
import secrets
from collections import Counter, OrderedDict, defaultdict
from collections.abc import AsyncIterator, Sequence, Set
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from functools import partial

from router.workers.line import Line
from router.workers.members import Members
from wire.errors import BatonError
from wire.ids import AttemptId, BlockKey
from wire.load.fairness import FairShares
from wire.pb import worker_pb2
from wire.pools import WorkerState

log = logging.getLogger(__name__)

RENEW_EVERY_S = 3.0
LOOK_EVERY_S = 0.2
ROOM_TIMEOUT_S = 1.0
_NO_BOUND = 1 << 62


@dataclass(frozen=True)
class Claim:
    """A prefill's claim to be next. cost: its uncached tokens over its tenant's weight.

    priority: the lower goes first within a tenant.
    """

    tenant: str
    cost: float = 0.0
    priority: int = 0


NO_CLAIM = Claim("")


class HoldBudget:
    """The budget of one arena. Counts a block that several attempts share once. Pure.

    Attempts wait in order of their tenants' fair shares, of their priority, and of arrival. A tenant whose holds are
    less than its equal part may have room in the third quarter of the arena, too.
    """

    def __init__(self, shares: FairShares | None = None) -> None:
        self._shares = shares or FairShares()
        self._claims: dict[AttemptId, Claim] = {}
        self._num_arena_blocks = 0
        self._blocks: Counter[BlockKey] = Counter()
        self._granted: dict[AttemptId, Sequence[BlockKey]] = {}
        self._waiting: OrderedDict[AttemptId, Sequence[BlockKey]] = OrderedDict()
        self._kept: set[AttemptId] = set()
        self._room = worker_pb2.HoldRoom(routers=1)

    @property
    def num_blocks(self) -> int:
        """Blocks of the arena that are held, or will be."""
        return len(self._blocks)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_asked(self) -> int:
        """Blocks to tell to other routers: a router that waits counts, too."""
        return self.num_blocks + bool(self._waiting)

    @property
    def has_room(self) -> bool:
        """Whether the next attempt may start at once."""
        return not self._waiting and self._is_within

    @property
    def _is_within(self) -> bool:
        """Whether holds leave the half of the arena to new ones; whatever others hold, an equal part of it is here."""
        left = self._num_arena_blocks - 2 * self._room.blocks_of_others
        return 2 * len(self._blocks) <= max(left, self._num_arena_blocks // self._room.routers)

    @property
    def _next(self) -> AttemptId | None:
        """The waiting attempt that may start: while there is room the first, else of a tenant below its equal part."""
        sizes = Counter[str]()
        for one, claim in self._claims.items():
            sizes[claim.tenant] += len(self._granted.get(one, ()))
        bound = len(self._blocks) / len(sizes) if 4 * len(self._blocks) <= 3 * self._num_arena_blocks else 0
        may_start = (
            one
            for one in self._waiting
            if self._is_within or (len(sizes) > 1 and sizes[self._claims[one].tenant] < bound)
        )
        return min(may_start, key=self._place, default=None)

    @property
    def kept(self) -> list[AttemptId]:
        """Attempts with stored blocks that are not yet fetched: their holds need renewal."""
        return sorted(self._kept)

    def resize(self, num_arena_blocks: int) -> list[AttemptId]:
        """Sets the arena's size in blocks. Returns the attempts that may start now."""
        self._num_arena_blocks = num_arena_blocks
        return self._grant()

    def share(self, room: worker_pb2.HoldRoom) -> list[AttemptId]:
        """Sets what other routers hold. Returns the attempts that may start now."""
        self._room = room
        return self._grant()

    def ask(self, attempt: AttemptId, keys: Sequence[BlockKey], claim: Claim = NO_CLAIM) -> list[AttemptId]:
        """Queues a prefill that will hold the blocks `keys`. Returns the attempts that may start now, each once.

        A hold makes the equal part of every tenant larger, so that other attempts may start with this one. An attempt
        that must wait is returned by a later call. Its tenant is charged when it may start.
        """
        if attempt not in self._granted:
            self._waiting[attempt], self._claims[attempt] = keys, claim
        return self._grant()

    def keep(self, attempt: AttemptId) -> None:
        """Notes that prefill has answered and the blocks are held."""
        if attempt in self._granted:
            self._kept.add(attempt)

    def release(self, attempt: AttemptId) -> list[AttemptId]:
        """Ends a hold, or the wait for it. Returns the attempts that may start now."""
        self._waiting.pop(attempt, None)
        self._claims.pop(attempt, None)
        self._kept.discard(attempt)
        for key in self._granted.pop(attempt, ()):
            self._blocks[key] -= 1
            if not self._blocks[key]:
                del self._blocks[key]
        return self._grant()

    def _grant(self) -> list[AttemptId]:
        granted: list[AttemptId] = []
        while self._waiting and (attempt := self._next) is not None:
            claim, keys = self._claims[attempt], self._waiting.pop(attempt)
            self._granted[attempt] = keys
            self._blocks.update(keys)
            self._shares.charge(claim.tenant, claim.cost)
            granted.append(attempt)
        return granted

    def _place(self, attempt: AttemptId) -> tuple[float, int]:
        """Returns the place of a waiting attempt; of equal places the earlier attempt is first."""
        claim = self._claims[attempt]
        return self._shares.spent(claim.tenant), claim.priority


class HoldBudgets:
    """All holds of a router, with a budget for each node's arena.

    The workers of a node share its arena. A release goes to one worker, a renewal to all, for a hung worker would let
    holds expire.
    """

    def __init__(
        self,
        members: Members,
        renew_every_s: float = RENEW_EVERY_S,
        is_alone: bool = True,
        shares: FairShares | None = None,
    ) -> None:
        """is_alone: no other router asks for room. shares: the tenants' counters."""
        self.budgets: defaultdict[str, HoldBudget] = defaultdict(partial(HoldBudget, shares or FairShares()))
        self._members = members
        self._renew_every_s = renew_every_s
        self._nodes: dict[AttemptId, str] = {}
        self._waiters: dict[AttemptId, asyncio.Future[None]] = {}
        self._is_alone = is_alone
        self._name = secrets.token_hex(8)
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def full_nodes(self) -> Set[str]:
        """The nodes where the next attempt must wait."""
        return {node for node, budget in self.budgets.items() if not budget.has_room}

    def start(self) -> None:
        self._tasks = [asyncio.create_task(self._renew_for_ever())]
        if not self._is_alone:
            self._tasks.append(asyncio.create_task(self._share_for_ever()))

    async def stop(self) -> None:
        """Ends renewals. Unreleased holds expire on the workers."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    @asynccontextmanager
    async def hold(
        self, attempt: AttemptId, keys: Sequence[BlockKey], node_id: str, claim: Claim = NO_CLAIM
    ) -> AsyncIterator[None]:
        """Waits until a prefill that will hold `keys` may start on a node. The hold ends with the context."""
        self._nodes[attempt] = node_id
        try:
            waiter = self._waiters[attempt] = asyncio.get_running_loop().create_future()
            self._let_start(self.budgets[node_id].ask(attempt, keys, claim))
            await waiter
            yield
        finally:
            self.release(attempt)

    def keep(self, attempt: AttemptId) -> None:
        """Begins to renew an attempt's hold: prefill has answered."""
        if attempt in self._nodes:
            self.budgets[self._nodes[attempt]].keep(attempt)

    def release(self, attempt: AttemptId) -> None:
        """Ends an attempt's hold, or its wait: decode has fetched the blocks, or will not.

        Tells a worker of the node. Does nothing for an attempt without a hold.
        """
        if (node_id := self._nodes.pop(attempt, None)) is None:
            return
        was_waiting = self._waiters.pop(attempt, None) is not None
        self._let_start(self.budgets[node_id].release(attempt))
        if not was_waiting:
            for line in self._lines(node_id)[:1]:
                line.release(attempt)

    def resize(self) -> None:
        """Updates the arenas after a change of workers. On a node without workers all waits end."""
        num_arena_blocks = self._members.num_arena_blocks
        for node_id in {*self.budgets, *num_arena_blocks}:
            self._let_start(self.budgets[node_id].resize(num_arena_blocks.get(node_id, _NO_BOUND)))
            if node_id not in num_arena_blocks and not self.budgets[node_id].num_blocks:
                del self.budgets[node_id]

    def check(self) -> list[str]:
        """Lists holds and waits; empty if no request is open."""
        budgets = self.budgets.values()
        counts = {
            "blocks held": sum(budget.num_blocks for budget in budgets),
            "prefills waiting for room": sum(budget.num_waiting for budget in budgets) + len(self._waiters),
            "holds renewed": sum(len(budget.kept) for budget in budgets),
        }
        return [f"{count} {what} for no request" for what, count in counts.items() if count]

    def _let_start(self, granted: Sequence[AttemptId]) -> None:
        for attempt in granted:
            waiter = self._waiters.pop(attempt, None)
            if waiter is not None and not waiter.done():
                waiter.set_result(None)

    async def _renew_for_ever(self) -> None:
        """Renews all holds in time, and at once while prefills wait for room."""
        clock = asyncio.get_running_loop().time
        next_s = clock() + self._renew_every_s
        while True:
            await asyncio.sleep(min(LOOK_EVERY_S, self._renew_every_s))
            is_time = clock() >= next_s
            next_s = clock() + self._renew_every_s if is_time else next_s
            for node_id, budget in list(self.budgets.items()):
                lines = self._lines(node_id)
                for attempt in [attempt for line in lines for attempt in line.take_ended_holds()]:
                    self._let_start(budget.release(attempt))
                if is_time or budget.num_waiting:
                    _renew(budget.kept, lines)

    async def _share_for_ever(self) -> None:
        while True:
            await asyncio.sleep(LOOK_EVERY_S)
            await asyncio.gather(*(self._share(node_id, budget) for node_id, budget in list(self.budgets.items())))

    async def _share(self, node_id: str, budget: HoldBudget) -> None:
        """Shares a node's room by the first worker that answers; without any the last answer stands."""
        for line in self._lines(node_id):
            with suppress(BatonError):
                room = await line.questions.room(self._name, budget.num_asked, ROOM_TIMEOUT_S)
                self._let_start(budget.share(room))
                return

    def _lines(self, node_id: str) -> list[Line]:
        """Lists the lines to a node's workers that are not lost."""
        here = (member for member in self._members if member.info.node_id == node_id)
        return [member.line for member in here if member.state is not WorkerState.LOST and member.line.is_open]


def _renew(kept: Sequence[AttemptId], lines: Sequence[Line]) -> None:
    if kept and not lines:
        log.warning("no worker can be told of holds; they will run out")
    for line in lines if kept else ():
        line.renew(kept)
