"""Groups of tests for processes side by side: one process runs all tests of a group, in their order."""

ONE_BY_ONE = (
    "tests/cluster/",
    "tests/faults/",
    "tests/kv_store/test_redis_failover.py",
    "tests/kv_store/test_redis_tier.py",
)
"""Tests that start whole clusters or measure time: a single group, so that none of them runs beside another one."""
LONGEST = ("simulated_gpu", "simulator", "exactness", "kernels", "engine")
"""Folders to begin with, so that processes end together."""


def is_alone(nodeid: str) -> bool:
    """Tells whether a test starts a whole cluster or measures time."""
    return nodeid.startswith(ONE_BY_ONE)


def group_of(nodeid: str) -> str:
    """Returns the group of a test: its file, whose tests share what they make, or all that run one by one."""
    return ONE_BY_ONE[0] if is_alone(nodeid) else nodeid.partition("::")[0]


def place_of(nodeid: str) -> int:
    """Returns when a test starts, as a place among the groups."""
    places = [ONE_BY_ONE[0], *(f"tests/{folder}/" for folder in LONGEST)]
    return next((place for place, begin in enumerate(places) if group_of(nodeid).startswith(begin)), len(places))
