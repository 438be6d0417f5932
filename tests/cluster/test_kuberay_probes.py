"""The probes of the template for KubeRay, asked of Ray's nodes that its parameters start."""

import signal
import socket
from collections.abc import Iterator
from contextlib import ExitStack

import psutil
import pytest

from tests.cluster.ray_nodes import RayNodes
from tests.harness.kuberay import Group, head_and_worker

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(180)]
Pod = tuple[psutil.Process, Group]


@pytest.fixture(scope="module")
def pods(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Pod]]:
    """A head and a worker, on ports that are free here."""
    with ExitStack() as ended, socket.create_server(("127.0.0.1", 0)) as listener:
        nodes = RayNodes(tmp_path_factory.mktemp("pods"), ended)
        head, worker = head_and_worker(int(nodes.address.rpartition(":")[2]), listener.getsockname()[1])
        listener.close()
        lines = {"head": (head, "--head"), "worker": (worker, f"--address={nodes.address}")}
        yield {
            name: (nodes.start(name, "bash", "-c", f'{group.start(place)} "$@"', name), group)
            for name, (group, place) in lines.items()
        }


def test_pods_become_ready(pods: dict[str, Pod]) -> None:
    assert [group.is_healthy() for _, group in pods.values()] == [True, True]


@pytest.mark.parametrize(("name", "program"), [("head", "gcs_server"), ("worker", "raylet")])
def test_a_service_of_ray_that_hangs_fails_the_probes(pods: dict[str, Pod], name: str, program: str) -> None:
    node, group = pods[name]
    [process] = [one for one in node.children(recursive=True) if one.name() == program]
    process.send_signal(signal.SIGSTOP)
    try:
        assert not group.is_healthy()
    finally:
        process.send_signal(signal.SIGCONT)
