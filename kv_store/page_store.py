"""The store of an engine without a node: its pages over a list of tiers, in its own process."""

from collections.abc import Sequence
from contextlib import closing

from kv_store.block_store import Back, Front
from kv_store.device_pool import DevicePool
from kv_store.node.directory_port import KeepHint
from kv_store.tiers.tier_list import TierList
from wire.block_names import BlockName
from wire.ids import AttemptId, PageId
from wire.tier import Cause, Miss, Tier


class PageStore:
    """A BlockStore without holds, tails and other nodes, none of which outlive or leave a process.

    Blocks are in every tier that takes them when `write_through` returns; a purge keeps to these tiers.
    """

    def __init__(self, tiers: TierList, pool: DevicePool) -> None:
        self._tiers = tiers
        self._pool = pool
        self._payload = pool.new_payload()

    def fence(self) -> None:
        self._pool.fence()

    def fetch(self, names: Sequence[BlockName], pages: Sequence[PageId], peers: Sequence[str] = ()) -> list[Tier]:
        full = [name for name in names if not name.is_tail]
        tiers: list[Tier] = []
        with closing(self._tiers.read(full, [self._payload] * len(full))) as blocks:
            for tier, page in zip(blocks, pages, strict=False):
                self._pool.write_page(page, self._payload)
                self._pool.wait()
                tiers.append(tier)
        return tiers

    def fetch_front(self, names: Sequence[BlockName], pages: Sequence[PageId], peers: Sequence[str] = ()) -> Front:
        """Leaves nothing for later: these tiers learn no costs."""
        return Front(self.fetch(names, pages, peers))

    def fetch_back(self, back: Back, pages: Sequence[PageId]) -> list[Tier]:
        return []

    def misses(self, names: Sequence[BlockName]) -> list[Miss]:
        """Names no causes but a partial block: these tiers do not remember what they have lost."""
        return [Miss(Cause.PARTIAL if name.is_tail else Cause.NO_LONGER_KNOWN) for name in names]

    def longest(self, names: Sequence[BlockName], starts: Sequence[int], peers: Sequence[str] = ()) -> slice:
        is_here = self._tiers.exists([name.key for name in names])
        end = len(names)
        for place in reversed(range(len(names))):
            if place < starts[end - 1]:
                break
            if not is_here[place]:
                end = place
        return slice(starts[end - 1] if end else 0, end)

    def write_through(self, names: Sequence[BlockName], pages: Sequence[PageId], hold: AttemptId | None) -> int:
        full = [(name, page) for name, page in zip(names, pages, strict=True) if not name.is_tail]
        return sum(self._tiers.write([name for name, _ in full], lambda place: self._payload_of(full[place][1])))

    def purge(self, names: Sequence[BlockName], peers: Sequence[str] = ()) -> None:
        self._tiers.delete([name.key for name in names])

    def keep(self, names: Sequence[BlockName], hint: KeepHint) -> None:
        """Does nothing: these tiers evict by last use."""

    def _payload_of(self, page: PageId) -> memoryview:
        self._pool.read_page(page, self._payload)
        self._pool.wait()
        return self._payload
