"""Pages by state, as ledgers count them and statuses show them."""

from dataclasses import dataclass, fields


@dataclass(frozen=True)
class BlockCounts:
    """The number of pages in each of the five states of `kv_store.ledger`; they sum to `total`."""

    free: int
    owned: int
    published: int
    cached: int
    draining: int
    total: int


BLOCK_STATES = tuple(one.name for one in fields(BlockCounts) if one.name != "total")
