import os
from collections.abc import Iterator

import pytest
import torch

# Kernels run interpreted where there is no GPU. Set here because Triton looks once, when any test first imports it.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")


@pytest.fixture(scope="session")
def redis_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A Redis server for all tests that mark themselves `redis`; its keys are everybody's."""
    from tests.redis_process import RedisProcess  # here, for a machine with a GPU may have no redis package

    server = RedisProcess(
        tmp_path_factory.mktemp("redis"), ["--maxmemory", "256mb", "--maxmemory-policy", "allkeys-lru"]
    )
    try:
        server.start()
        yield server.url
    finally:
        server.kill()
