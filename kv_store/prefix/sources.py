"""The sources of a prefix: the search for each block, the loop that reads, and a node's sources beyond its arena.

locate     the nearest source that has each block
read       each block from its source, up to the first that is not right: for the store of a node, and for a library
FarTiers   the arenas of other nodes, then cold tiers, nearest first
"""

from collections import OrderedDict
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import ExitStack, closing
from itertools import compress
from typing import TypeVar

from kv_store.prefix.costs import Costs, LookupS, SourceCosts
from kv_store.prefix.misses import unasked_cause
from kv_store.tiers.cold_tier import BlockSource, ColdTier
from wire.block_names import BlockName
from wire.ids import BlockKey
from wire.tier import READ_COUNTS, FarStatus, Miss, Tier

_LOOKUPS_AT_ONCE = 128
_MAX_PEERS = 64
Asked = TypeVar("Asked", bound=BlockSource)
Source = TypeVar("Source", bound=BlockSource | None)
Get = Callable[[Source, Sequence[BlockName], Sequence[memoryview]], Generator[bytes, None, None]]


def locate(
    names: Sequence[BlockName],
    sources: Iterable[Asked],
    ask: Callable[[Asked, Sequence[BlockKey]], Sequence[bool]] = lambda source, keys: source.exists(keys),
    is_late: Callable[[], bool] = lambda: False,
) -> Iterator[Asked | None]:
    """Yields each block's first source that has it, or None; asks for 128 blocks at a time, lazily, until late."""
    for start in range(0, len(names), _LOOKUPS_AT_ONCE):
        found: dict[BlockKey, Asked] = {}
        some = names[start : start + _LOOKUPS_AT_ONCE]
        for source in sources:
            if is_late():
                break
            takes_tails = source.tier is Tier.PEERS  # the others are asked for full blocks alone
            keys = [name.key for name in some if name.key not in found and (takes_tails or not name.is_tail)]
            found |= dict.fromkeys(compress(keys, ask(source, keys) if keys else []), source)
        yield from (found.get(name.key) for name in some)


def read(
    names: Sequence[BlockName], sources: Sequence[Source], into: Sequence[memoryview], get: Get[Source]
) -> Generator[tuple[Source, bytes], None, None]:
    """Fills payloads; yields source and checksum of each block, up to the first wrong block.

    sources: each block's source. get: `BlockSource.get`, called once for all blocks of a source.
    """
    with ExitStack() as stack:
        streams: dict[Source, Generator[bytes, None, None]] = {}
        for source in dict.fromkeys(sources):
            places = [place for place, one in enumerate(sources) if one is source]
            stream = get(source, [names[place] for place in places], [into[place] for place in places])
            streams[source] = stack.enter_context(closing(stream))
        for source in sources:
            checksum = next(streams[source], None)
            if checksum is None:
                return
            yield source, checksum


class FarTiers:
    """Sources of the blocks that an arena lacks. peer: makes the source of a node's blocks from its port's address.

    clock: monotonic, in seconds. costs: these sources' costs.
    """

    def __init__(
        self,
        cold: Sequence[ColdTier],
        peer: Callable[[str], BlockSource] | None,
        clock: Callable[[], float],
        costs: Costs,
    ) -> None:
        self.cold = list(cold)
        self.costs = costs
        self._make_peer = peer
        self._peers: OrderedDict[str, BlockSource] = OrderedDict()
        self.clock = clock

    def sources(self, addresses: Sequence[str]) -> list[BlockSource]:
        """Returns the nodes at these addresses and the cold tiers. Closes least recently used nodes beyond a bound."""
        if self._make_peer is None:
            return [*self.cold]
        for address in addresses:
            if address not in self._peers:
                self._peers[address] = self._make_peer(address)
            self._peers.move_to_end(address)
        while len(self._peers) > max(_MAX_PEERS, len(addresses)):
            self._peers.popitem(last=False)[1].close()
        return [*(self._peers[address] for address in addresses), *self.cold]

    def take_lost(self) -> dict[Tier, set[BlockKey]]:
        """Returns keys that cold tiers turned out to lack since the last call."""
        return {tier.tier: {*tier.take_lost()} for tier in self.cold}

    def status(self) -> list[FarStatus]:
        return [*self._peers_status(), *(tier.status() for tier in self.cold)]

    def _peers_status(self) -> list[FarStatus]:
        """Sums the counts of all nodes, if any."""
        each = [peer.status() for peer in self._peers.copy().values()]
        if not each:
            return []
        state = "up" if any(status.state == "up" for status in each) else "broken"
        counts = {name: sum(getattr(status, name) for status in each) for name in READ_COUNTS}
        return [FarStatus(tier=Tier.PEERS, state=state, **counts)]


class FarLookup:
    """A lookup of blocks, bounded by the time to compute them. asked: the sources, and whether each is a probe."""

    def __init__(
        self,
        far: FarTiers,
        names: Sequence[BlockName],
        addresses: Sequence[str],
        lookup_s: LookupS = SourceCosts.lookup_s,
    ) -> None:
        """addresses: nodes to ask. lookup_s: estimates lookups, to choose the sources that are expected to pay."""
        sources = far.sources(addresses)
        self.asked = far.costs.worth_asking(sources, len(names), lookup_s)
        self._names = names
        self._cold = [source for source in sources if source.tier is not Tier.PEERS]
        self._far = far
        self._deadline = far.clock() + far.costs.budget_s(len(names))

    @property
    def is_late(self) -> bool:
        """Whether computing the blocks would be done by now."""
        return self._far.clock() > self._deadline

    @property
    def probes(self) -> list[BlockSource]:
        return [source for source, is_probe in self.asked.items() if is_probe]

    def __iter__(self) -> Iterator[BlockSource | None]:
        """Yields for each block the nearest source that has it, or None, as `locate` does."""
        return locate(self._names, self.asked, self._far.costs.exists, lambda: self.is_late)

    @property
    def unasked(self) -> Miss | None:
        """The reason why a cold tier was not asked for a missing block, or did not answer; else None."""
        return unasked_cause(self._cold, self.asked, self.is_late)
