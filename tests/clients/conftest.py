"""A real cluster that serves the demo model, for all clients; `bash tests/clients.sh`."""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

import demo_model
from tests.cluster.served_cluster import ServedCluster


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedCluster]:
    folder = tmp_path_factory.mktemp("clients")
    served = ServedCluster(f"c{os.getpid()}", folder)
    model = str(with_tools(folder / "model"))
    try:
        served.do(
            "up", "--model", model, "--served-model-name", "demo", "--prefill", "1", "--decode", "1", "--grpc-port", "0"
        )
        yield served
        served.do("status", "--check")
    finally:
        served.run("down")
    assert served.left_behind() == []


def with_tools(folder: Path) -> Path:
    """Copies the demo model, with a template that knows tools."""
    shutil.copytree(Path(demo_model.__file__).parent / "checkpoint", folder)
    template = folder / "chat_template.jinja"
    asked = "{%- if tools -%}<|user|>Call a tool: <tool_call>{{ tools | tojson }}{%- endif -%}"
    template.write_text(asked + template.read_text().replace("message['content']", "(message['content'] or '')"))
    return folder
