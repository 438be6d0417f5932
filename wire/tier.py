"""Where a block was found. A tier is a name wherever it is told of: messages, metrics, timelines, status."""

from enum import StrEnum


class Tier(StrEnum):
    """Nearest first."""

    DEVICE = "device"
    HOST = "host"
    REDIS = "redis"
