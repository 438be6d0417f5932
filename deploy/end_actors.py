"""Ends all actors of a cluster on a Ray cluster that is not ours: `python -m deploy.end_actors ADDRESS NAMESPACE`."""

import logging
import sys

import ray
import ray.util

from deploy.names import CONTROLLER


def end_actors(namespace: str) -> None:
    """By force, through Ray, to which this process is connected. The controller first: it would replace the others."""
    names = [one["name"] for one in ray.util.list_named_actors(all_namespaces=True) if one["namespace"] == namespace]
    for name in sorted(names, key=lambda name: name != CONTROLLER):
        try:
            ray.kill(ray.get_actor(name, namespace))
        except ValueError:
            continue  # it has ended meanwhile


if __name__ == "__main__":
    ray.init(address=sys.argv[1], log_to_driver=False, logging_level=logging.ERROR)
    end_actors(sys.argv[2])
