"""The ladders of deadlines: a call that waits for another call waits longer, so that the inner error arrives.

In seconds, the innermost first. Deadlines within a process are in its own files.
"""

from itertools import pairwise

from router.workers.controller_port import KEYS_TIMEOUT_S, ORDER_TIMEOUT_S, REPORT_TIMEOUT_S


def ladder(*rungs: float) -> tuple[float, ...]:
    """Returns the rungs. Raises ValueError unless they increase."""
    for inner, outer in pairwise(rungs):
        if not inner < outer:
            raise ValueError(f"a wait of {outer:g} s around one of {inner:g} s loses its answer")
    return rungs


ORDER_IN_CONTROLLER_S, _, ORDER_IN_COMMAND_S = ladder(570, ORDER_TIMEOUT_S, 600)
"""`baton scale` and `baton drain`: the controller waits for workers, the router and the command for its answer."""

KEYS_AT_DOOR_S = 10
_, _, KEYS_IN_COMMAND_S = ladder(2 * KEYS_AT_DOOR_S, KEYS_TIMEOUT_S, 30)
"""`baton key`: the controller waits for an earlier change, then for router, gateways and nodes' services at once."""

_, STATUS_IN_COMMAND_S = ladder(REPORT_TIMEOUT_S, 30)
"""`baton status`: the router waits for the controller's events."""

PLACE_S, SERVICE_START_S, WORKER_START_S = ladder(180, 300, 900)
"""PLACE_S: Ray finds room for a process, and the process begins."""
_, CLUSTER_START_S, CLUSTER_START_IN_UP_S = ladder(2 * PLACE_S + SERVICE_START_S + WORKER_START_S, 1800, 1860)
"""A worker is placed; on a new node a service is placed and started; then the worker starts."""

PROBE_S, STOP_S, _, ACTORS_END_IN_DOWN_S = ladder(1, 5, 2 * (1 + 5 + 2 * 5), 40)
"""`baton down`: workers, then all other actors, are probed and stop, with STOP_S before and after their SIGKILL."""
