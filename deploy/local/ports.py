"""Prints the ports that a cluster listens on, one a line: `python -m deploy.local.ports NAME`."""

import sys

from deploy.local.state import ClusterState, StateFile


def ports_of(state: ClusterState) -> list[int]:
    """Those that have to be free when the cluster is gone: Ray's is one of them where Ray is the cluster's own."""
    own = [state.address, state.operator_address, state.metrics_address, state.ray_address if state.head else ""]
    return [int(address.rpartition(":")[2]) for address in own if address]


if __name__ == "__main__":
    running = StateFile(sys.argv[1]).read()
    if running is not None:
        sys.stdout.writelines(f"{port}\n" for port in ports_of(running))
