"""Chooses workers, waits for them, and keeps account of what they were given."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from router.placement.policies import DecodePlacement, PrefillPlacement
from router.placement.prefix_map import PrefixMap
from router.workers.members import Member, Members
from wire.errors import Unavailable
from wire.ids import BlockKey, WorkerId
from wire.pools import Role


@dataclass(frozen=True)
class Assignment:
    """Work that a worker was given."""

    member: Member
    num_choices: int
    num_tokens: int


class WorkerPool:
    """`wait_s`: how long a request waits for a decode worker where there is none."""

    def __init__(self, members: Members, prefixes: PrefixMap, block_size: int, wait_s: float) -> None:
        self._members = members
        self._prefixes = prefixes
        self._block_size = block_size
        self._wait_s = wait_s
        self._changed = asyncio.Event()

    @property
    def has_prefill(self) -> bool:
        """Whether a prefill worker is ready."""
        return bool(self._members.ready(Role.PREFILL))

    def choose_prefill(self, keys: Sequence[BlockKey], num_prompt_tokens: int) -> WorkerId | None:
        """A worker for the prompt whose blocks are `keys`; None if no prefill worker is ready."""
        ready = self._members.ready(Role.PREFILL)
        if not ready:
            return None
        cached = self._cached(keys, num_prompt_tokens)
        worker = PrefillPlacement().choose([member.load for member in ready], cached, num_prompt_tokens)
        self._prefixes.record(keys, worker)
        return worker

    async def choose_decode(self, keys: Sequence[BlockKey], num_prompt_tokens: int) -> WorkerId:
        """A worker for the prompt whose blocks are `keys`. Raises Unavailable if none is ready in time.

        With a prefill pool every decode worker finds the prompt in the store; without one, who computed it does best.
        """
        try:
            async with asyncio.timeout(self._wait_s):
                while not (ready := self._members.ready(Role.DECODE)):
                    await self._changed.wait()
        except TimeoutError as error:
            raise Unavailable("no decode worker is there") from error
        cached = {} if self.has_prefill else self._cached(keys, num_prompt_tokens)
        worker = DecodePlacement().choose([member.load for member in ready], cached)
        if not self.has_prefill:
            self._prefixes.record(keys, worker)
        return worker

    def assign(self, worker: WorkerId, num_choices: int, num_tokens: int) -> Assignment:
        """Counts work as given to a worker until it is unassigned. Raises WorkerNotFound."""
        assignment = Assignment(self._members[worker], num_choices, num_tokens)
        assignment.member.num_choices += num_choices
        assignment.member.num_tokens += num_tokens
        return assignment

    def unassign(self, assignment: Assignment) -> None:
        """The work is over, however it ended."""
        assignment.member.num_choices -= assignment.num_choices
        assignment.member.num_tokens -= assignment.num_tokens

    def wake(self) -> None:
        """The members have changed: who waits looks again."""
        self._changed.set()
        self._changed.clear()

    def _cached(self, keys: Sequence[BlockKey], num_prompt_tokens: int) -> dict[WorkerId, int]:
        """Tokens of a prompt that each worker is thought to have, for those that are thought to have any."""
        return {
            worker: min(num_blocks * self._block_size, num_prompt_tokens)
            for worker, num_blocks in self._prefixes.match(keys).items()
        }
