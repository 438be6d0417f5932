import os
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from tests.cluster.served_cluster import ALWAYS, ServedCluster
from tests.harness.checkpoints import make_checkpoint
from tests.harness.fork_server import ON_RAY, ForkServer


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint("llama-gqa", tmp_path_factory.mktemp("served-model"))


@pytest.fixture(scope="session")
def forks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ForkServer]:
    with closing(ForkServer(tmp_path_factory.mktemp("forks"))) as server:
        yield server


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory, forks: ForkServer, checkpoint: Path) -> Iterator[ServedCluster]:
    """One prefill and one decode worker, forked, with real Redis and gRPC, for all tests; each leaves it as it was."""
    with _served(ServedCluster(f"t{os.getpid()}", tmp_path_factory.mktemp("cluster"), forks=forks), checkpoint) as one:
        yield one


@pytest.fixture(scope="session")
def on_ray(tmp_path_factory: pytest.TempPathFactory, forks: ForkServer, checkpoint: Path) -> Iterator[ServedCluster]:
    """The same on a real Ray, for the tests whose subject is Ray; commands are forked, but `up` and `down`."""
    name, folder = f"r{os.getpid()}", tmp_path_factory.mktemp("on-ray")
    with _served(ServedCluster(name, folder), checkpoint):
        yield ServedCluster(name, folder, forks=forks, target=ON_RAY)


@contextmanager
def _served(served: ServedCluster, checkpoint: Path) -> Iterator[ServedCluster]:
    try:
        served.do("up", "--model", str(checkpoint), *ALWAYS, "--grpc-port", "0")
        yield served
        served.do("status", "--check")
    finally:
        served.run("down")
    assert served.left_behind() == []
