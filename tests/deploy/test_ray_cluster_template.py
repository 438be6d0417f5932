import importlib.util
import json
import re
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from deploy.plan.config import ClusterConfig
from wire.pools import Role

TEMPLATE = Path("deploy/ray-cluster.example.yaml")


@pytest.fixture
def template() -> dict[str, Any]:
    loaded: dict[str, Any] = yaml.safe_load(TEMPLATE.read_text())
    return loaded


def test_rays_launcher_understands_it(template: dict[str, Any]) -> None:
    ray = importlib.util.find_spec("ray")
    assert ray is not None
    assert ray.origin is not None
    schema = Path(ray.origin).parent / "autoscaler" / "ray-schema.json"
    jsonschema.validate(template, json.loads(schema.read_text()))


def test_it_has_nodes_for_each_role_and_names_files_that_exist(template: dict[str, Any]) -> None:
    types = template["available_node_types"]
    assert template["head_node_type"] in types
    config = ClusterConfig.load(Path("deploy/two-pools.example.toml"), {})
    for role in Role:
        assert config.worker.of(role).resources.keys() <= types[role.value]["resources"].keys()
    assert sum(one["min_workers"] for one in types.values()) == template["max_workers"]
    named = re.findall(r"~/baton/(deploy/\S+)|(deploy/\S+\.toml)", TEMPLATE.read_text())
    assert len(named) == 4
    assert all(Path(one or other).is_file() for one, other in named)


def test_every_node_of_it_is_started_with_rays_token(template: dict[str, Any]) -> None:
    for role in ("head", "worker"):
        starts = [one for one in template[f"{role}_start_ray_commands"] if not one.endswith("ray stop")]
        assert all(re.search(r"bash ~/baton/deploy/(head|ray_node)\.sh ", one) for one in starts)
    assert "exec bash deploy/ray_node.sh" in Path("deploy/head.sh").read_text()
    assert "export RAY_AUTH_MODE=token " in Path("deploy/ray_node.sh").read_text()
