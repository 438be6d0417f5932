"""Where a block was found."""

from enum import Enum


class Tier(Enum):
    """Nearest first."""

    DEVICE = "device"
    HOST = "host"
    REDIS = "redis"
