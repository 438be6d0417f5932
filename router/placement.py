"""The placement of a request's steps on workers: pure policies, estimates of where blocks are, and the choice.

`BlockIndex` follows each node's arena by events. For a node without events or snapshot, `PrefixMap` guesses by the
workers that the prompt's blocks were sent to.
"""

import asyncio
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence, Set
from copy import copy
from dataclasses import dataclass, field, replace
from statistics import median
from typing import TypeVar

from router.block_index import BlockIndex
from router.config import Disaggregation
from router.disaggregation import HandOffDuration, Load, PrefillReason, decide
from router.workers.members import Member, Members
from wire.errors import ModelReplaced, Unavailable
from wire.ids import BlockKey, WorkerId
from wire.pools import Role

MAX_BLOCK_ADDRESSES = 4
"""The most nodes that an attempt asks for blocks."""


L = TypeVar("L", bound=Load)


@dataclass(frozen=True)
class PrefillPlacement:
    """A policy: the worker with the fewest tokens to compute, queued tokens included, then the fewest choices.

    A silent worker is chosen only if all are.
    """

    def choose(self, loads: Sequence[L], cached: Mapping[WorkerId, int], num_prompt_tokens: int) -> L:
        """Chooses a worker. loads: not empty. cached: the prompt's tokens that a worker is thought to have."""

        def cost(load: L) -> tuple[bool, int, int]:
            num_tokens = load.num_tokens + num_prompt_tokens - cached.get(load.id, 0)
            return (load.is_silent, num_tokens, load.num_choices)

        return min(loads, key=cost)


@dataclass(frozen=True)
class DecodePlacement:
    """A policy: the worker with the shortest steps, where a choice weighs as much as `choice_tokens` tokens of context.

    A step costs time for each sequence of the batch and for each token that attention reads. If decode workers prefill,
    tokens to compute count, too. A silent worker is chosen only if all are silent.
    """

    choice_tokens: int = 256

    def choose(self, loads: Sequence[L], cached: Mapping[WorkerId, int]) -> L:
        """Chooses a worker. loads: not empty. cached: the prompt's tokens that a worker need not compute."""

        def cost(load: L) -> tuple[bool, int]:
            num_tokens = load.num_choices * self.choice_tokens + load.num_tokens + load.num_prompt_tokens
            return (load.is_silent, num_tokens - cached.get(load.id, 0))

        return min(loads, key=cost)


class PrefixMap:
    """A map from a block to the workers that it was sent to, for the `max_keys` most recently used blocks. A guess."""

    def __init__(self, max_keys: int) -> None:
        self._max_keys = max_keys
        self._workers: OrderedDict[BlockKey, set[WorkerId]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._workers)

    def record(self, keys: Sequence[BlockKey], worker: WorkerId) -> None:
        """Notes that a prompt's blocks were sent to a worker. A prompt's end is forgotten before its start."""
        for key in reversed(keys):
            self._workers.setdefault(key, set()).add(worker)
            self._workers.move_to_end(key)
        while len(self._workers) > self._max_keys:
            self._workers.popitem(last=False)

    def match(self, keys: Iterable[BlockKey]) -> dict[WorkerId, int]:
        """Counts the leading blocks that each worker was sent, without zeros."""
        matches: dict[WorkerId, int] = {}
        going: set[WorkerId] | None = None
        for num_blocks, key in enumerate(keys, start=1):
            holders = self._workers.get(key, set())
            going = holders if going is None else going & holders
            if not going:
                break
            matches.update(dict.fromkeys(going, num_blocks))
        return matches


@dataclass(frozen=True, kw_only=True)
class Route:
    """The way of one attempt through the pools, as the router knew them when the attempt began.

    keys: the prompt's blocks. cached: the prompt's tokens that each worker probably has, without zeros. num_new_tokens:
    the prompt's tokens that no worker is thought to have; 0 after prefill. prefill_node: the node in whose arena
    prefill leaves the blocks; None if a decode worker computes them, for `reason`. sent: how many of the prompt's
    blocks each worker was sent; at equal cost the most win, for they may be on its device. prefetched: the prompt's
    tokens that a decode worker reads while prefill computes the others.
    """

    keys: Sequence[BlockKey]
    num_prompt_tokens: int
    cached: Mapping[WorkerId, int]
    num_new_tokens: int
    reason: PrefillReason
    prefill_node: str | None = None
    sent: Mapping[WorkerId, int] = field(default_factory=dict)
    prefetched: Mapping[WorkerId, int] = field(default_factory=dict)

    def ordered(self, members: Iterable[Member]) -> list[Member]:
        """Sorts members by the number of blocks that they were sent, most first."""
        return sorted(members, key=lambda member: -self.sent.get(member.id, 0))

    def num_missing(self, worker_id: WorkerId) -> int:
        """Counts the prompt's tokens that a worker would compute."""
        return max(self.num_prompt_tokens - self.cached.get(worker_id, 0), 1)

    def through(self, worker_id: WorkerId) -> "Route":
        """Returns the rest of the route after a prefill worker, which now has the whole prompt."""
        return replace(self, cached={**self.cached, worker_id: self.num_prompt_tokens}, num_new_tokens=0, sent={})


class Placement:
    """The choice of workers for requests. wait_s: how long a request waits for a decode worker if there is none.

    mode: the prompts that prefill workers compute. hand_off: learned from attempts.
    """

    def __init__(
        self,
        members: Members,
        prefixes: PrefixMap,
        index: BlockIndex,
        block_size: int,
        wait_s: float,
        mode: Disaggregation,
    ) -> None:
        self._members = members
        self._prefixes = prefixes
        self._index = index
        self.block_size = block_size
        self._wait_s = wait_s
        self._mode = mode
        self.hand_off = HandOffDuration()
        self._changed = asyncio.Event()

    def route(self, keys: Sequence[BlockKey], num_prompt_tokens: int, full_nodes: Set[str]) -> Route:
        """Plans the route of an attempt. A node with room for the prompt's blocks comes before a full node."""
        sent, known = self._prefixes.match(keys), self._index.match(keys)
        found = {
            member.id: max(known[member.info.node_id], member.num_under_way(keys))
            if member.info.node_id in known
            else sent.get(member.id, 0)
            for member in self._members
        }
        cached = {worker: min(num * self.block_size, num_prompt_tokens) for worker, num in found.items() if num}
        num_new_tokens = max(num_prompt_tokens - max(cached.values(), default=0), 1)  # the last token is always run
        prefill, decode = self._members.able(Role.PREFILL), self._members.able(Role.DECODE)
        reason = decide(self._mode, prefill, decode, num_new_tokens, self.hand_off.at(num_new_tokens))
        route = Route(
            keys=keys,
            num_prompt_tokens=num_prompt_tokens,
            cached=cached,
            num_new_tokens=num_new_tokens,
            reason=reason,
            sent=sent,
        )
        if not reason.uses_prefill:
            return route
        ready = route.ordered(prefill)
        roomy = [member for member in ready if member.info.node_id not in full_nodes]
        chosen = PrefillPlacement().choose(roomy or ready, cached, num_prompt_tokens)
        return replace(route, prefill_node=chosen.info.node_id)

    def token_s(self, route: Route) -> list[float]:
        """Lists the seconds of prefill a token of each worker that may compute the prompt; empty if none has learned.

        A worker that has not learned counts like the others.
        """
        pool = self._members.able(Role.PREFILL if route.prefill_node is not None else Role.DECODE)
        known = [one.prefill_token_s for one in pool if one.prefill_token_s is not None]
        typical = median(known) if known else 0.0
        return [one.prefill_token_s or typical for one in pool] if known else []

    def choose_prefill(self, route: Route) -> Member | None:
        """Chooses a worker of the route's prefill node; None if no prefill worker is ready there."""
        here = (one for one in self._members.able(Role.PREFILL) if one.info.node_id == route.prefill_node)
        if not (ready := route.ordered(here)):
            return None
        member = PrefillPlacement().choose(ready, route.cached, route.num_prompt_tokens)
        self._prefixes.record(route.keys, member.id)
        return member

    async def choose_decode(self, route: Route) -> Member:
        """Chooses a decode worker. Raises Unavailable if none is ready in time, ModelReplaced if none will be."""
        try:
            async with asyncio.timeout(self._wait_s):
                while (member := self.likely_decode(route)) is None:
                    if self._members.has_lost_decode:
                        raise ModelReplaced("the last worker with the answer's model is gone: ask again")
                    await self._changed.wait()
        except TimeoutError as error:
            raise Unavailable("no decode worker is there") from error
        self._prefixes.record(route.keys, member.id)
        return member

    def likely_decode(self, route: Route) -> Member | None:
        """Returns the decode worker that would be chosen now; None if none is ready."""
        if not (ready := self._members.able(Role.DECODE)):
            return None
        return DecodePlacement().choose(
            route.ordered(ready), route.cached if route.num_new_tokens else route.prefetched
        )

    def block_addresses(self, route: Route, member: Member) -> list[str]:
        """Lists the block ports of other nodes that may have blocks of the prompt, the most blocks first."""
        by_cached = sorted(route.cached, key=lambda one: (-route.cached[one], one))
        infos = [self._members[one].info for one in by_cached if one in self._members]
        addresses = [one.block_address for one in infos if one.node_id != member.info.node_id]
        return list(dict.fromkeys(filter(None, addresses)))[:MAX_BLOCK_ADDRESSES]

    def only(self, worker_id: WorkerId) -> "Placement":
        """Returns a placement that knows only this worker of its role. Raises WorkerNotFound."""
        return Placement(
            self._members.only(worker_id),
            self._prefixes,
            self._index,
            self.block_size,
            self._wait_s,
            Disaggregation.ALWAYS,  # a prefill worker computes the prompt
        )

    def among(self, members: Members) -> "Placement":
        """Returns this placement with these workers alone."""
        placement = copy(self)
        placement._members = members
        return placement

    def wake(self) -> None:
        """Wakes waiting requests: the members have changed."""
        self._changed.set()
        self._changed.clear()
