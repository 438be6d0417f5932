"""The tiers beyond a node's arena: the arenas of other nodes, then cold tiers, nearest first.

Their blocks go to a device through the arena, where the next reader finds them.
"""

from collections import OrderedDict
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import ExitStack, closing
from itertools import compress

from kv_store.mapped_arena import MappedArena
from kv_store.node.messages import Block
from kv_store.prefix.costs import Costs, LookupS, SourceCosts
from kv_store.prefix.misses import unasked_cause
from kv_store.prefix.plan import Read
from kv_store.tiers.cold_tier import BlockSource, ColdTier
from wire.block_names import BlockName
from wire.ids import BlockKey
from wire.tier import COLD_TIERS, READ_COUNTS, FarStatus, Miss, Tier


class Promotion:
    """The far blocks of a step, on their way through the arena. `read` and `commit` once, in this order.

    far: blocks that the arena lacks, each with a source. A writer that fails abandons its slots.
    """

    def __init__(self, host: MappedArena, writer: str, far: Read) -> None:
        self._host = host
        self._writer = writer
        self._far = far
        self._slots = host.directory.reserve(writer, far.names, None).slots if far.names else []
        self._promoted: list[tuple[Tier, Block]] = []

    def read(self, is_late: Callable[[], bool]) -> Generator[tuple[Tier, memoryview], None, None]:
        """Yields tier and verified payload of each block, up to the first that is missing.

        is_late: whether computing is quicker than reading the next block.
        """
        with ExitStack() as stack:
            checksums = {
                source: stack.enter_context(closing(self._read_from(source)))
                for source in dict.fromkeys(self._far.sources)
                if source is not None
            }
            for name, source, slot in zip(self._far.names, self._far.sources, self._slots, strict=True):
                checksum = None if source is None or is_late() else next(checksums[source], None)
                if source is None or checksum is None:
                    return
                if slot is not None:
                    self._promoted.append((source.tier, Block(slot, name, checksum)))
                yield source.tier, self._host.payload(slot)

    def commit(self) -> None:
        """Commits the blocks that were read, and gives back the other slots."""
        if self._promoted:
            self._host.directory.commit(self._writer, [block for _, block in self._promoted], None)
        for tier in COLD_TIERS:  # other nodes may lose theirs
            keys = [block.name.key for source, block in self._promoted if source is tier]
            if keys:
                self._host.directory.records.mark_cold(tier, keys, [])
        if self._slots:
            self._host.directory.abandon(self._writer)

    def _read_from(self, source: BlockSource) -> Generator[bytes, None, None]:
        places = [place for place, one in enumerate(self._far.sources) if one is source]
        payloads = [self._host.payload(self._slots[place]) for place in places]
        return self._far.costs.timed(source, source.get([self._far.names[place] for place in places], payloads))


_LOOKUPS_AT_ONCE = 128
_MAX_PEERS = 64


class FarTiers:
    """Sources of the blocks that an arena lacks. peer: makes the source of a node's blocks from its port's address.

    clock: monotonic, in seconds. costs: of these sources.
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
        """Returns the nodes at these addresses and the cold tiers. Closes the least recently used of too many nodes."""
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
        """Returns keys that cold tiers were found not to have since the last call."""
        return {tier.tier: {*tier.take_lost()} for tier in self.cold}

    def status(self) -> list[FarStatus]:
        return [*self._peers_status(), *(tier.status() for tier in self.cold)]

    def _peers_status(self) -> list[FarStatus]:
        """Sums the counts of all nodes, if there is any."""
        each = [peer.status() for peer in self._peers.copy().values()]
        if not each:
            return []
        state = "up" if any(status.state == "up" for status in each) else "broken"
        counts = {name: sum(getattr(status, name) for status in each) for name in READ_COUNTS}
        return [FarStatus(Tier.PEERS, state, **counts)]


class FarLookup:
    """A lookup of blocks, in the time that computing them takes. asked: the sources, and whether each is a probe."""

    def __init__(
        self,
        far: FarTiers,
        names: Sequence[BlockName],
        addresses: Sequence[str],
        lookup_s: LookupS = SourceCosts.lookup_s,
    ) -> None:
        """addresses: of nodes to ask. lookup_s: by which the sources are chosen whose lookup is expected to pay."""
        sources = far.sources(addresses)
        self.asked = far.costs.worth_asking(sources, len(names), lookup_s)
        self._names = names
        self._cold = [source for source in sources if source.tier is not Tier.PEERS]
        self._far = far
        self._deadline = far.clock() + far.costs.budget_s(len(names))

    @property
    def is_late(self) -> bool:
        """Whether computing the blocks would have been quicker by now."""
        return self._far.clock() > self._deadline

    @property
    def probes(self) -> list[BlockSource]:
        return [source for source, is_probe in self.asked.items() if is_probe]

    def __iter__(self) -> Iterator[BlockSource | None]:
        """Yields the nearest source that has each block, or None; asks for 128 blocks at a time, lazily."""
        for start in range(0, len(self._names), _LOOKUPS_AT_ONCE):
            found: dict[BlockKey, BlockSource] = {}
            names = self._names[start : start + _LOOKUPS_AT_ONCE]
            for source in self.asked:
                if self.is_late:
                    break
                keys = [name.key for name in names if _may_have(source, name) and name.key not in found]
                found |= dict.fromkeys(compress(keys, self._far.costs.exists(source, keys) if keys else []), source)
            yield from (found.get(name.key) for name in names)

    @property
    def unasked(self) -> Miss | None:
        """The reason why a cold tier was not asked for a block that was not found, or did not answer; else None."""
        return unasked_cause(self._cold, self.asked, self.is_late)


def _may_have(source: BlockSource, name: BlockName) -> bool:
    """Returns whether a source takes blocks of this kind: tails are in arenas only."""
    return source.tier is Tier.PEERS or not name.is_tail
