"""The store of an engine without a node: a list of tiers in the engine's process."""

from collections.abc import Sequence
from contextlib import closing

from kv_store.block_store import NOTHING, ReadResult
from kv_store.device_pool import DevicePool, Fence
from kv_store.node.messages import KeepHint
from kv_store.prefix.plan import FRONT, Needs, Read
from kv_store.prefix.tier_list import TierList
from wire.block_names import BlockName
from wire.ids import AttemptId, PageId
from wire.tier import Cause, Disposition, Miss


class PageStore:
    """A BlockStore over a TierList, without holds, tails and other nodes, which one process does not need.

    After `write_through` every tier that takes blocks has them; a purge is for these tiers alone.
    """

    def __init__(self, tiers: TierList, pool: DevicePool) -> None:
        self._tiers = tiers
        self._pool = pool
        self._payload = pool.new_payload()

    def fence(self) -> Fence:
        return self._pool.fence()

    def follow(self, fence: Fence) -> None:
        self._pool.follow(fence)

    def fetch(
        self, names: Sequence[BlockName], pages: Sequence[PageId], peers: Sequence[str] = (), needs: Needs = FRONT
    ) -> ReadResult:
        """Reads all blocks that it finds: these tiers learn no costs, and keep no record of lost blocks."""
        blocks: list[Disposition] = [Miss(Cause.PARTIAL if one.is_tail else Cause.NO_LONGER_KNOWN) for one in names]
        end = len(names) if needs.starts is None else self._usable_end(names, needs)
        places = [place for place in needs.places(end) if not names[place].is_tail]
        with closing(self._tiers.read([names[place] for place in places], [self._payload] * len(places))) as read:
            for tier, page, place in zip(read, pages, places, strict=False):
                self._pool.write_pages(page, self._payload)
                self._pool.wait()
                blocks[place] = tier
        return ReadResult(blocks)

    def read(self, step: Read, pages: Sequence[PageId]) -> ReadResult:
        """Reads nothing: `fetch` leaves no step."""
        return NOTHING

    def write_through(self, names: Sequence[BlockName], pages: Sequence[PageId], hold: AttemptId | None) -> int:
        full = [(name, page) for name, page in zip(names, pages, strict=True) if not name.is_tail]
        return sum(self._tiers.write([name for name, _ in full], lambda place: self._payload_of(full[place][1])))

    def purge(self, names: Sequence[BlockName], peers: Sequence[str] = ()) -> None:
        self._tiers.delete([name.key for name in names])

    def keep(self, names: Sequence[BlockName], hint: KeepHint) -> None:
        """Does nothing: these tiers evict by last use."""

    def _usable_end(self, names: Sequence[BlockName], needs: Needs) -> int:
        is_here = self._tiers.exists(names)
        return needs.usable_end(reversed([*enumerate(is_here)]))

    def _payload_of(self, page: PageId) -> memoryview:
        self._pool.read_pages(page, self._payload)
        self._pool.wait()
        return self._payload
