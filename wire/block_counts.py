"""Pages by state, as ledgers count them and statuses show them."""

from dataclasses import dataclass, fields


@dataclass(frozen=True)
class BlockCounts:
    """The five states sum to `total`; what each means is told in `kv_store.ledger`."""

    free: int
    owned: int
    published: int
    cached: int
    draining: int
    total: int


BLOCK_STATES = tuple(one.name for one in fields(BlockCounts) if one.name != "total")
