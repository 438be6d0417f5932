"""A real cluster that serves the demo model, for all clients; `bash tests/clients.sh`."""

import os
from collections.abc import Iterator

import pytest

from tests.cluster.served_cluster import ServedCluster


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedCluster]:
    served = ServedCluster(f"c{os.getpid()}", tmp_path_factory.mktemp("clients"))
    try:
        served.do("up", "--served-model-name", "demo", "--prefill", "1", "--decode", "1", "--grpc-port", "0")
        yield served
        served.do("status", "--check")
    finally:
        served.run("down")
    assert served.left_behind() == []
