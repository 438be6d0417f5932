"""Chooses a worker for each step of a request, and waits for one where there is none."""

import asyncio
from collections.abc import Callable, Sequence

from router.placement.policies import ConditionalPrefill, DecodePlacement, PrefillPlacement
from router.placement.prefix_map import PrefixMap
from router.workers.members import Member, Members
from wire.errors import Unavailable
from wire.ids import BlockKey, WorkerId
from wire.pools import Role

MAX_SOURCES = 4
"""Nodes that one attempt asks for blocks."""


class Placement:
    """wait_s: how long a request waits for a decode worker where there is none.

    decode_slowdown: of `ConditionalPrefill`; None leaves all prompts to prefill workers while one answers.
    """

    def __init__(
        self,
        members: Members,
        prefixes: PrefixMap,
        block_size: int,
        wait_s: float,
        decode_slowdown: float | None = None,
    ) -> None:
        self._members = members
        self._prefixes = prefixes
        self._block_size = block_size
        self._wait_s = wait_s
        self._conditional = None if decode_slowdown is None else ConditionalPrefill(decode_slowdown)
        self._changed = asyncio.Event()

    def uses_prefill(self, keys: Sequence[BlockKey], num_prompt_tokens: int) -> bool:
        """Whether the prompt whose blocks are `keys` goes to the prefill pool, or straight to a decode worker.

        It goes straight where all of the prefill pool is silent, and a decode worker is not.
        """
        prefill, decode = self._members.ready(Role.PREFILL), self._members.ready(Role.DECODE)
        if self._conditional is None:
            is_silent = all(member.is_silent for member in prefill)
            return bool(prefill) and (not is_silent or all(member.is_silent for member in decode))
        num_cached = max(self._cached(keys, num_prompt_tokens).values(), default=0)
        return self._conditional.uses_prefill(prefill, decode, num_prompt_tokens - num_cached)

    def prefill_node(self, keys: Sequence[BlockKey], num_prompt_tokens: int, has_room: Callable[[str], bool]) -> str:
        """A node for a prompt, with room for it if any has; a prefill worker must be ready."""
        ready = self._members.ready(Role.PREFILL)
        roomy = [member for member in ready if has_room(member.info.node_id)]
        cached = self._cached(keys, num_prompt_tokens)
        return PrefillPlacement().choose(roomy or ready, cached, num_prompt_tokens).info.node_id

    def choose_prefill(self, keys: Sequence[BlockKey], num_prompt_tokens: int, node_id: str) -> Member | None:
        """A worker of a node for the prompt whose blocks are `keys`; None if no prefill worker is ready there."""
        ready = [member for member in self._members.ready(Role.PREFILL) if member.info.node_id == node_id]
        if not ready:
            return None
        member = PrefillPlacement().choose(ready, self._cached(keys, num_prompt_tokens), num_prompt_tokens)
        self._prefixes.record(keys, member.id)
        return member

    async def choose_decode(self, keys: Sequence[BlockKey], num_new_tokens: int) -> Member:
        """A worker that takes the prompt whose blocks are `keys`. Raises Unavailable if none is ready in time.

        num_new_tokens: tokens of it that prefill has not left in the store: all or none.
        """
        try:
            async with asyncio.timeout(self._wait_s):
                while not (ready := self._members.ready(Role.DECODE)):
                    await self._changed.wait()
        except TimeoutError as error:
            raise Unavailable("no decode worker is there") from error
        member = DecodePlacement().choose(ready, self._cached(keys, num_new_tokens))
        self._prefixes.record(keys, member.id)
        return member

    def sources(self, keys: Sequence[BlockKey], member: Member) -> list[str]:
        """Block ports of other nodes whose workers were sent blocks of `keys`, most of them first."""
        matches = self._prefixes.match(keys)
        holders = [
            self._members[one] for one in sorted(matches, key=lambda one: (-matches[one], one)) if one in self._members
        ]
        addresses = [one.info.block_address for one in holders if one.info.node_id != member.info.node_id]
        return list(dict.fromkeys(filter(None, addresses)))[:MAX_SOURCES]

    def only(self, worker_id: WorkerId) -> "Placement":
        """Returns a placement on this worker, whose role has no other. Raises WorkerNotFound."""
        return Placement(self._members.only(worker_id), self._prefixes, self._block_size, self._wait_s)

    def wake(self) -> None:
        """Lets requests that wait look again: the members have changed."""
        self._changed.set()
        self._changed.clear()

    def _cached(self, keys: Sequence[BlockKey], num_prompt_tokens: int) -> dict[WorkerId, int]:
        """Tokens of a prompt that each worker is thought to have; workers with none are left out."""
        return {
            worker: min(num_blocks * self._block_size, num_prompt_tokens)
            for worker, num_blocks in self._prefixes.match(keys).items()
        }
