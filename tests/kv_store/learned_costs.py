"""Costs that have learned given times."""

from kv_store.prefix.costs import Costs
from tests.harness.fake_clock import FakeClock
from tests.harness.paced_tier import PacedTier
from tests.kv_store.names import LAYOUT


def taught(first_s: float, rest_s: float, compute_s: float, num_tiers: int = 1) -> tuple[Costs, list[PacedTier]]:
    """Costs that have learned these times, of blocks, and the tiers."""
    clock = FakeClock()
    costs = Costs(block_size=16, clock=clock)
    tiers = [PacedTier(LAYOUT, clock, 0.0, 0.0) for _ in range(num_tiers)]
    for _ in range(100):
        costs.note_prefill(160, 10 * compute_s)
        for tier in tiers:
            costs.of(tier).note_reads([first_s, rest_s])
    return costs, tiers
