"""Real clusters, for all clients, of SmolLM2 and of the demo model; `bash tests/clients.sh`."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import demo_model
from engine.checkpoint.hub import find_folder
from tests.clients import programs
from tests.clients.speaking_model import make_speaking_model
from tests.cluster.served_cluster import ServedCluster
from tests.engine.gguf.joined import CODER_500M

MODEL = "smollm2"
TOOLS = (
    "{%- if tools -%}<|im_start|>system\nCalls look like this: "
    '<tool_call>{"name": "function", "arguments": {}}</tool_call>. '
    "There are {{ tools | tojson }}<|im_end|>\n{%- endif -%}"
)


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedCluster]:
    """SmolLM2 as `baton pull` fetches it, computed in float32, with a template that knows tools."""
    folder = tmp_path_factory.mktemp("clients")
    model = with_tools(find_folder(MODEL), folder / "model", TOOLS)
    settings = ("--model", str(model), "--served-model-name", MODEL, "--dtype", "float32")
    with serving(ServedCluster(f"c{os.getpid()}", folder), *settings) as served:
        yield served


@pytest.fixture(scope="module")
def demo_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedCluster]:
    """The demo model, whose tokens take so little that thousands of drawn requests are answered in minutes."""
    folder = tmp_path_factory.mktemp("demo")
    template = "{%- if tools -%}<|user|>Call a tool: <tool_call>{{ tools | tojson }}{%- endif -%}"
    model = with_tools(Path(demo_model.__file__).parent / "checkpoint", folder / "model", template)
    settings = ("--model", str(model), "--served-model-name", "demo")
    with serving(ServedCluster(f"d{os.getpid()}", folder), *settings) as served:
        yield served


@pytest.fixture(scope="module")
def speaking(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedCluster]:
    """A model whose context holds what agents send, and whose answers are one sentence.

    64 MiB of KV are half a million of its tokens: more would make the books long, which are verified at the end.
    """
    folder = tmp_path_factory.mktemp("speaking")
    model = make_speaking_model(find_folder(MODEL), folder / "model")
    named = ("--model", str(model), "--served-model-name", programs.MODEL)
    sizes = ("--pool-bytes", "64MiB", "--arena-bytes", "64MiB")
    with serving(ServedCluster(f"s{os.getpid()}", folder), *named, *sizes) as served:
        yield served


@pytest.fixture(scope="module")
def choosing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedCluster]:
    """Qwen2.5-Coder-0.5B-Instruct with its own template, of two processors; skipped where the index has it no more."""
    path = find_folder(str(CODER_500M.path()))
    folder = tmp_path_factory.mktemp("choosing")
    named = ("--model", str(path), "--served-model-name", programs.MODEL)
    sizes = ("--pool-bytes", "1GiB", "--arena-bytes", "512MiB")
    with serving(ServedCluster(f"q{os.getpid()}", folder, timeout_s=600), *named, *sizes) as served:
        yield served


@contextmanager
def serving(cluster: ServedCluster, *settings: str) -> Iterator[ServedCluster]:
    """Starts a cluster; at the end its books are verified, and nothing of it is left."""
    try:
        cluster.do("up", *settings, "--prefill", "1", "--decode", "1", "--grpc-port", "0", "--http-port", "0")
        yield cluster
        cluster.do("status", "--check")
    finally:
        cluster.run("down")
    assert cluster.left_behind() == []


def with_tools(source: Path, folder: Path, tools: str) -> Path:
    """Copies a model, with a template that puts tools first and takes messages without content."""
    shutil.copytree(source, folder)
    template = folder / "chat_template.jinja"
    template.write_text(tools + template.read_text().replace("message['content']", "(message['content'] or '')"))
    return folder
