"""Hand-offs that decode has not fetched yet: how much of the arena they take, and who must wait for it. Pure.

Prefill leaves a prompt's blocks in the arena under a hold, where nothing evicts them. If holds took all of it, prefill
would have nowhere to put the next prompt, and decode nothing left to fetch; so no prefill starts while they take
more than half.
"""

from collections import Counter, OrderedDict
from collections.abc import Sequence

from wire.ids import BlockKey, RequestId


class HoldBudget:
    """Counts each block once, however many requests share it. Requests wait in the order of their coming."""

    def __init__(self) -> None:
        self._num_arena_blocks = 0
        self._blocks: Counter[BlockKey] = Counter()
        self._granted: dict[RequestId, Sequence[BlockKey]] = {}
        self._waiting: OrderedDict[RequestId, Sequence[BlockKey]] = OrderedDict()
        self._kept: set[RequestId] = set()

    @property
    def num_blocks(self) -> int:
        """Blocks of the arena that are spoken for."""
        return len(self._blocks)

    @property
    def kept(self) -> list[RequestId]:
        """Requests whose blocks are there and not yet fetched: their holds want renewing."""
        return sorted(self._kept)

    def resize(self, num_arena_blocks: int) -> list[RequestId]:
        """The arena has this many blocks. Returns who may start now."""
        self._num_arena_blocks = num_arena_blocks
        return self._grant()

    def ask(self, request_id: RequestId, keys: Sequence[BlockKey]) -> bool:
        """A prefill wants to start and will hold the blocks `keys`. Whether it may; if not, its turn will come."""
        if request_id not in self._granted:
            self._waiting[request_id] = keys
            self._grant()
        return self.is_granted(request_id)

    def is_granted(self, request_id: RequestId) -> bool:
        """Whether the request was let in and is not released."""
        return request_id in self._granted

    def keep(self, request_id: RequestId) -> None:
        """Prefill has answered: the blocks are held."""
        self._kept.add(request_id)

    def release(self, request_id: RequestId) -> list[RequestId]:
        """The request needs its blocks no more, or stops waiting. Returns who may start now."""
        self._waiting.pop(request_id, None)
        self._kept.discard(request_id)
        for key in self._granted.pop(request_id, ()):
            self._blocks[key] -= 1
            if not self._blocks[key]:
                del self._blocks[key]
        return self._grant()

    def _grant(self) -> list[RequestId]:
        granted: list[RequestId] = []
        while self._waiting and 2 * len(self._blocks) <= self._num_arena_blocks:
            request_id, keys = self._waiting.popitem(last=False)
            self._granted[request_id] = keys
            self._blocks.update(keys)
            granted.append(request_id)
        return granted
