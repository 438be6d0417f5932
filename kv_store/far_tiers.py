"""The tiers beyond a node's arena: the arenas of other nodes, then cold tiers, nearest first."""

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from itertools import compress

from kv_store.tiers.cold_tier import BlockSource, ColdTier
from wire.ids import BlockKey
from wire.names import BlockName
from wire.tier import READ_COUNTS, FarStatus, Tier

_LOOKUPS_AT_ONCE = 128
_MAX_PEERS = 64


class FarTiers:
    """Sources of the blocks that an arena lacks. peer: makes the source of a node's blocks from its port's address.

    `clock` is monotonic, in seconds; no source is asked after a deadline on it.
    """

    def __init__(
        self, cold: Sequence[ColdTier], peer: Callable[[str], BlockSource] | None, clock: Callable[[], float]
    ) -> None:
        self._cold = list(cold)
        self._make_peer = peer
        self._peers: OrderedDict[str, BlockSource] = OrderedDict()
        self._clock = clock

    def sources(self, addresses: Sequence[str]) -> list[BlockSource]:
        """Returns the nodes at these addresses and the cold tiers. Closes the least recently used of too many nodes."""
        if self._make_peer is None:
            return [*self._cold]
        for address in addresses:
            if address not in self._peers:
                self._peers[address] = self._make_peer(address)
            self._peers.move_to_end(address)
        while len(self._peers) > max(_MAX_PEERS, len(addresses)):
            self._peers.popitem(last=False)[1].close()
        return [*(self._peers[address] for address in addresses), *self._cold]

    def locate(
        self, names: Sequence[BlockName], sources: Sequence[BlockSource], deadline: float
    ) -> Iterator[BlockSource | None]:
        """Yields the nearest source that has each block, or None; asks for 128 blocks at a time, lazily."""
        for start in range(0, len(names), _LOOKUPS_AT_ONCE):
            found: dict[BlockKey, BlockSource] = {}
            asked = names[start : start + _LOOKUPS_AT_ONCE]
            for source in sources:
                if self._clock() > deadline:
                    break
                keys = [name.key for name in asked if _may_have(source, name) and name.key not in found]
                found |= dict.fromkeys(compress(keys, source.exists(keys) if keys else []), source)
            yield from (found.get(name.key) for name in asked)

    def status(self) -> list[FarStatus]:
        return [*self._peers_status(), *(tier.status() for tier in self._cold)]

    def _peers_status(self) -> list[FarStatus]:
        """Sums the counts of all nodes, if there is any."""
        each = [peer.status() for peer in self._peers.copy().values()]
        if not each:
            return []
        state = "up" if any(status.state == "up" for status in each) else "broken"
        counts = {name: sum(getattr(status, name) for status in each) for name in READ_COUNTS}
        return [FarStatus(Tier.PEERS, state, **counts)]


def _may_have(source: BlockSource, name: BlockName) -> bool:
    """Returns whether a source takes blocks of this kind: tails are in arenas only."""
    return source.tier is Tier.PEERS or not name.is_tail
