import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.served_cluster import ServedCluster
from tests.harness.checkpoints import make_checkpoint


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint("llama-gqa", tmp_path_factory.mktemp("served-model"))


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory, checkpoint: Path) -> Iterator[ServedCluster]:
    """One prefill and one decode worker on a real Ray, Redis and gRPC, for all tests; each leaves it as it was."""
    served = ServedCluster(f"t{os.getpid()}", tmp_path_factory.mktemp("cluster"))
    try:
        served.do("up", "--model", str(checkpoint), "--prefill", "1", "--decode", "1", "--grpc-port", "0")
        yield served
        served.do("status", "--check")
    finally:
        served.run("down")
    assert served.left_behind() == []
