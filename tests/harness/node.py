"""The memory of one node, in this process."""

from typing import TYPE_CHECKING

from kv_store.device_pool import DevicePool
from kv_store.node.arena import Arena
from kv_store.node.directory import Directory
from kv_store.node_store import NodeStore
from kv_store.tiers.cold_tier import ColdTier
from kv_store.tiers.cold_writer import ColdWriter
from kv_store.transfers import InlineTransfers, Transfers
from tests.harness.fake_clock import FakeClock
from wire.layout import KVLayout

if TYPE_CHECKING:
    from worker.assembly import Tiers


class Node:
    """Arena, directory and, if given, a cold tier that outlives them."""

    def __init__(
        self,
        layout: KVLayout,
        num_slots: int = 512,
        cold: ColdTier | None = None,
        directory: Directory | None = None,
    ) -> None:
        """`directory`: one with other settings; without it, blocks go to the cold tier whatever space is left."""
        self.directory = directory or Directory(num_slots, high_water=0.0, block_bytes=layout.block_bytes)
        self.arena = Arena.anonymous(layout.block_bytes, num_slots)
        self.cold = cold
        self._layout = layout

    @property
    def tiers(self) -> "Tiers":
        from worker.assembly import Tiers  # here, for a machine with a GPU may have no redis package

        return Tiers(self.arena, self.directory, [self.cold] if self.cold else [])

    def transfers(self, pool: DevicePool) -> Transfers:
        """Makes the transfers of an engine, which end before the call that begins them.

        The store's clock stands still: reading a block is never slower than computing it, however busy the machine is.
        """
        cold = [self.cold] if self.cold else []
        return InlineTransfers(NodeStore(self._layout, self.arena, self.directory, cold, pool, FakeClock()))

    def write_all_cold(self) -> None:
        """Writes every block that nobody uses to the cold tier."""
        assert self.cold is not None
        writer = ColdWriter(self._layout, self.arena, self.directory, self.cold)
        while writer.write_some():
            pass
