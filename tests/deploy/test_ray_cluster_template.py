import importlib.util
import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

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


def test_it_names_one_node_and_files_that_exist(template: dict[str, Any]) -> None:
    assert template["max_workers"] == 0
    assert template["head_node_type"] in template["available_node_types"]
    (setup,) = template["setup_commands"]
    assert Path(setup.removeprefix(". ~/baton/")).is_file()
