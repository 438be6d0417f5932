"""Tiers as names, wherever they are told of (messages, metrics, status), and counts of their pages by state."""

from dataclasses import dataclass, fields
from enum import StrEnum


class Tier(StrEnum):
    """Nearest first."""

    DEVICE = "device"
    HOST = "host"
    REDIS = "redis"


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
