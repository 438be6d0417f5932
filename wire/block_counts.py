"""Pages by state, as ledgers count them and statuses show them."""

from dataclasses import dataclass


@dataclass(frozen=True)
class BlockCounts:
    """The five states sum to `total`; what each means is told in `kv_store.ledger`."""

    free: int
    owned: int
    published: int
    cached: int
    draining: int
    total: int
