"""The template for KubeRay: only fields that its RayCluster has, Ray's token, and a node for each role."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from deploy.plan.config import ClusterConfig
from tests.harness.kuberay import PROBES, TEMPLATE
from wire.pools import Role

SPEC = {
    "rayVersion",
    "authOptions",
    "headGroupSpec",
    "workerGroupSpecs",
    "enableInTreeAutoscaling",
    "autoscalerOptions",
}
HEAD = {"template", "rayStartParams", "serviceType", "headService", "enableIngress", "resources", "labels"}
WORKERS = {"groupName", "replicas", "minReplicas", "maxReplicas", "numOfHosts", "rayStartParams", "template", "suspend"}
CONTAINER = {"name", "image", "env", "ports", "resources", "volumeMounts", *PROBES}
PORTS = [ClusterConfig().router.grpc_port, ClusterConfig().http_port]
"""Ports of a router and its gateways for clients."""


@pytest.fixture
def parts() -> dict[str, dict[str, Any]]:
    return {one["kind"]: one for one in yaml.safe_load_all(TEMPLATE.read_text())}


def test_a_ray_cluster_has_only_fields_that_kuberay_knows(parts: dict[str, dict[str, Any]]) -> None:
    cluster = parts["RayCluster"]
    assert (cluster["apiVersion"], set(cluster)) == ("ray.io/v1", {"apiVersion", "kind", "metadata", "spec"})
    spec = cluster["spec"]
    assert spec.keys() <= SPEC
    assert spec["headGroupSpec"].keys() <= HEAD
    for group in (spec["headGroupSpec"], *spec["workerGroupSpecs"]):
        assert group.keys() <= HEAD | WORKERS
        assert all(isinstance(value, str) for value in group["rayStartParams"].values()), "a map of text to text"
        pod = group["template"]["spec"]
        [container] = pod["containers"]
        assert container.keys() <= CONTAINER
        assert {one["name"] for one in container["volumeMounts"]} == {one["name"] for one in pod["volumes"]}
        assert "/dev/shm" in {one["mountPath"] for one in container["volumeMounts"]}
    for group in spec["workerGroupSpecs"]:
        assert group.keys() <= WORKERS
        assert group["minReplicas"] <= group["replicas"] <= group["maxReplicas"]


def test_ray_asks_for_a_token(parts: dict[str, dict[str, Any]]) -> None:
    spec = parts["RayCluster"]["spec"]
    assert spec["authOptions"] == {"mode": "token"}
    assert tuple(map(int, spec["rayVersion"].split("."))) >= (2, 52), "Ray has tokens since then"


def test_probes_ask_a_port_of_ray_that_the_template_sets(parts: dict[str, dict[str, Any]]) -> None:
    """KubeRay leaves a probe that is there alone; its own ask for HTTP that Ray does not serve here."""
    spec = parts["RayCluster"]["spec"]
    for group, parameter in (
        (spec["headGroupSpec"], "port"),
        *((one, "node-manager-port") for one in spec["workerGroupSpecs"]),
    ):
        [container] = group["template"]["spec"]["containers"]
        assert [container[one]["grpc"]["port"] for one in PROBES] == [int(group["rayStartParams"][parameter])] * 2


def test_each_role_has_a_group_with_the_resource_that_its_workers_ask_for(parts: dict[str, dict[str, Any]]) -> None:
    config = ClusterConfig.load(Path("deploy/two-pools.example.toml"), {})
    groups = {one["groupName"]: one for one in parts["RayCluster"]["spec"]["workerGroupSpecs"]}
    for role in Role:
        quoted = groups[role.value]["rayStartParams"]["resources"]
        offered = json.loads(json.loads(quoted))  # it stands in a shell's double quotes
        assert config.worker.of(role).resources.keys() == offered.keys()


def test_clients_alone_reach_the_router_and_the_gateway_and_no_other_port(parts: dict[str, dict[str, Any]]) -> None:
    name = parts["RayCluster"]["metadata"]["name"]
    service, policy = parts["Service"]["spec"], parts["NetworkPolicy"]["spec"]
    assert service["selector"] == {"ray.io/cluster": name, "ray.io/node-type": "head"}
    assert [(one["port"], one["targetPort"]) for one in service["ports"]] == [(port, port) for port in PORTS]
    assert policy["podSelector"]["matchLabels"] == {"ray.io/cluster": name}
    within, clients = policy["ingress"]
    assert within["from"] == [{"podSelector": policy["podSelector"]}]
    assert [one["port"] for one in clients["ports"]] == PORTS
    [head] = parts["RayCluster"]["spec"]["headGroupSpec"]["template"]["spec"]["containers"]
    assert {one["containerPort"] for one in head["ports"]} >= set(PORTS)
