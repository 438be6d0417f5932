"""A wheel, installed away from the checkout, serves: protos, kernels' sources and the demo model come with it."""

import shutil
import site
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cluster.served_cluster import ServedCluster

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]
ROOT = Path(__file__).resolve().parents[2]
LEFT_OUT = shutil.ignore_patterns(".*", "*.egg-info", "__pycache__", "build", "benchmarks", "docs", "tests")
PIP_TIMEOUT_S = 120


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The python of an environment with the wheel, and with what it depends on from ours."""
    folder = tmp_path_factory.mktemp("wheel")
    shutil.copytree(ROOT, folder / "source", ignore=LEFT_OUT)
    environment, python = folder / "environment", folder / "environment" / "bin" / "python"
    pip = [sys.executable, "-m", "pip"]
    _run(*pip, "wheel", "--quiet", "--no-deps", "--no-build-isolation", "-w", str(folder), str(folder / "source"))
    _run(sys.executable, "-m", "venv", "--without-pip", str(environment))
    (wheel,) = folder.glob("*.whl")
    _run(*pip, "--python", str(python), "install", "--quiet", "--no-deps", str(wheel))
    ours = "\n".join(site.getsitepackages())
    _packages(environment).joinpath("dependencies.pth").write_text(ours)
    return python


def test_it_is_imported_from_where_it_was_installed(installed: Path) -> None:
    code = "import baton, cli; from baton import Client, Engine; print(baton.__file__, cli.__file__)"
    for path in _run(str(installed), "-P", "-c", code).split():
        assert Path(path).is_relative_to(_packages(installed.parents[1]))


def test_its_command_serves_the_demo_model(installed: Path, tmp_path: Path) -> None:
    cluster = ServedCluster("wheel", tmp_path, program=[str(installed.with_name("baton"))])
    try:
        cluster.do("up", "--grpc-port", "0", "--redis-url", "off")
        answer = cluster.do(
            "generate", "Pets: Tom dog, Lucy parrot. Question: which pet has Lucy?", "--temperature", "0"
        )
        assert "parrot" in answer
    finally:
        cluster.do("down")
    assert cluster.left_behind() == []


def _packages(environment: Path) -> Path:
    (folder,) = environment.glob("lib/python3.*/site-packages")
    return folder


def _run(*command: str) -> str:
    done = subprocess.run(command, cwd="/", capture_output=True, text=True, timeout=PIP_TIMEOUT_S, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
