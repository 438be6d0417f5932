"""The ladders of deadlines: of a call that waits for another, the outer one waits longer, so that the reason arrives.

In seconds, the innermost first. Deadlines of one process alone stand in its own file.
"""

from itertools import pairwise

from router.workers.controller_port import KEYS_TIMEOUT_S, ORDER_TIMEOUT_S, REPORT_TIMEOUT_S


def ladder(*rungs: float) -> tuple[float, ...]:
    """Returns the rungs. Raises ValueError unless each is longer than the one before."""
    for inner, outer in pairwise(rungs):
        if not inner < outer:
            raise ValueError(f"a wait of {outer:g} s around one of {inner:g} s loses its answer")
    return rungs


ORDER_IN_CONTROLLER_S, _, ORDER_IN_COMMAND_S = ladder(570, ORDER_TIMEOUT_S, 600)
"""`baton scale` and `baton drain`: the controller waits for workers, the router and the command for its answer."""

KEYS_AT_DOOR_S = 10
_, _, KEYS_IN_COMMAND_S = ladder(2 * KEYS_AT_DOOR_S, KEYS_TIMEOUT_S, 30)
"""`baton key`: the controller waits for an earlier change, then for each door and each node's service at once."""

_, STATUS_IN_COMMAND_S = ladder(REPORT_TIMEOUT_S, 30)
"""`baton status`: the router waits for the controller's events."""

PLACE_S, SERVICE_START_S, WORKER_START_S = ladder(180, 300, 900)
"""A place: Ray finds room for a process, and the process begins."""
_, CLUSTER_START_S, CLUSTER_START_IN_UP_S = ladder(2 * PLACE_S + SERVICE_START_S + WORKER_START_S, 1800, 1860)
"""A worker is placed and, with the first of a node, its service is placed and started, before the worker starts."""

PROBE_S, STOP_S, _, ACTORS_END_IN_DOWN_S = ladder(1, 5, 2 * (1 + 5 + 2 * 5), 40)
"""`baton down`: workers, and then all other actors, are probed, stop, and have STOP_S until and after their SIGKILL."""
