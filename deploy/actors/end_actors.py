"""Ends all actors of a cluster on a Ray that it joined: `python -m deploy.actors.end_actors ADDRESS NAMESPACE`."""

import logging
import sys
from contextlib import suppress

import ray
import ray.util

from deploy.plan.cluster_plan import CONTROLLER


def end_actors(namespace: str) -> None:
    """Ends actors by force, through the Ray of this process: the controller first, which would replace the others."""
    _end(CONTROLLER, namespace)
    for one in ray.util.list_named_actors(all_namespaces=True):
        if one["namespace"] == namespace:
            _end(one["name"], namespace)


def _end(name: str, namespace: str) -> None:
    with suppress(ValueError):  # it has ended already
        ray.kill(ray.get_actor(name, namespace))


if __name__ == "__main__":
    ray.init(address=sys.argv[1], log_to_driver=False, logging_level=logging.ERROR)
    end_actors(sys.argv[2])
