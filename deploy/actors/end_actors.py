"""Ends all actors of a cluster on a Ray that it joined: `python -m deploy.actors.end_actors ADDRESS NAMESPACE`.

The namespace is the name of the cluster's run folder, so that no other cluster's actors are in it.
"""

import logging
import sys
from contextlib import suppress
from typing import Any

import ray.util

from deploy.plan.cluster_plan import CONTROLLER
from deploy.plan.machine import SERVICE_PREFIX

STOP_TIMEOUT_S = 5.0


def end_actors(namespace: str) -> None:
    """Ends actors by force, through this process's Ray: first the controller, which would replace the others.

    Nodes' services come last and may stop by themselves, for they remove the arenas on their machines.
    """
    _end(CONTROLLER, namespace)
    names = [one["name"] for one in ray.util.list_named_actors(all_namespaces=True) if one["namespace"] == namespace]
    services = [name for name in names if name.startswith(SERVICE_PREFIX)]
    for name in set(names) - set(services):
        _end(name, namespace)
    _stop(services, namespace)
    for name in services:
        _end(name, namespace)


def _stop(names: list[str], namespace: str) -> None:
    """Asks all actors to stop, at once, and waits for a few seconds at most."""
    answers: list[Any] = []
    for name in names:
        with suppress(ValueError):
            answers.append(ray.get_actor(name, namespace).call.remote("stop"))
    if answers:
        ray.wait(answers, num_returns=len(answers), timeout=STOP_TIMEOUT_S)


def _end(name: str, namespace: str) -> None:
    with suppress(ValueError):  # it has ended already
        ray.kill(ray.get_actor(name, namespace))


if __name__ == "__main__":
    ray.init(address=sys.argv[1], log_to_driver=False, logging_level=logging.ERROR)
    end_actors(sys.argv[2])
