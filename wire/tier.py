"""Where a block was found."""

from enum import Enum


class Tier(Enum):
    """Nearest first."""

    DEVICE = "device"
    HOST = "host"
    REDIS = "redis"


TIERS = tuple(tier.value for tier in Tier)
"""What messages, metrics and timelines call them."""
