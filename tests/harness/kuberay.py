"""Containers of the template for KubeRay: the command that starts one, and its probes as a kubelet asks them."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import yaml
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse
from grpc_health.v1.health_pb2_grpc import HealthStub

TEMPLATE = Path("deploy/kuberay/ray-cluster.example.yaml")
PROBES = ("livenessProbe", "readinessProbe")


@dataclass(frozen=True)
class Group:
    """A group of the template's pods. ports: the ones to use in place of the template's."""

    spec: Mapping[str, Any]
    ports: Mapping[str, str]

    def start(self, place: str) -> str:
        """Returns the line of a shell that KubeRay starts Ray by. place: `--head`, or `--address` of the head."""
        parameters = {name: self.ports.get(value, value) for name, value in self.spec["rayStartParams"].items()}
        return " ".join(["ray", "start", place, "--block", *(f"--{name}={one}" for name, one in parameters.items())])

    def is_healthy(self) -> bool:
        """Asks both probes."""
        [container] = self.spec["template"]["spec"]["containers"]
        return all(self._is_serving(container[one]) for one in PROBES)

    def _is_serving(self, probe: Mapping[str, Any]) -> bool:
        port = str(probe["grpc"]["port"])
        with grpc.insecure_channel(f"127.0.0.1:{self.ports.get(port, port)}") as channel:
            try:
                answer = HealthStub(channel).Check(HealthCheckRequest(), timeout=probe["timeoutSeconds"])
            except grpc.RpcError:
                return False
        return bool(answer.status == HealthCheckResponse.SERVING)


def head_and_worker(port: int, node_port: int) -> tuple[Group, Group]:
    """Returns the head's group and the first of the workers', with these ports."""
    spec = next(yaml.safe_load_all(TEMPLATE.read_text()))["spec"]
    head, worker = spec["headGroupSpec"], spec["workerGroupSpecs"][0]
    ports = {
        head["rayStartParams"]["port"]: str(port),
        worker["rayStartParams"]["node-manager-port"]: str(node_port),
    }
    return Group(head, ports), Group(worker, ports)
