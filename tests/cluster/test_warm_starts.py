"""KV outlives a cluster: the next one, under the same secret, reads it back from a Redis server or from files."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.served_cluster import ALWAYS, ServedCluster, wait_until
from tests.harness.checkpoints import choose_prompt
from tests.harness.fork_server import ON_RAY, ForkServer
from tests.harness.redis_process import RedisProcess

pytestmark = [pytest.mark.cluster, pytest.mark.redis, pytest.mark.timeout(300)]
NUM_TOKENS = 64
PROMPT_LEN = 700
NUM_PROMPT_BLOCKS = PROMPT_LEN // 16
NUM_BLOCKS = (PROMPT_LEN + NUM_TOKENS - 1) // 16
"""Full blocks of prompt and answer; the last token has no KV."""
COLD = 'timeout_ms = 10000\nwrite = "all"\n'
"""An ample time, so that a busy machine does not compute what it could read."""


@pytest.fixture
def redis(tmp_path: Path) -> Iterator[RedisProcess]:
    server = RedisProcess(tmp_path)
    try:
        server.start()
        yield server
    finally:
        server.kill()


@contextmanager
def started(folder: Path, checkpoint: Path, settings: str, forks: ForkServer) -> Iterator[ServedCluster]:
    """A cluster with state and caches of its own: of what is elsewhere it has only what its settings name."""
    folder.mkdir()
    (folder / "baton.toml").write_text(settings)
    cluster = ServedCluster(f"w{os.getpid()}", folder, forks=forks, target=ON_RAY)
    try:
        cluster.do(
            "up", "--config", str(folder / "baton.toml"), "--model", str(checkpoint), "--grpc-port", "0", *ALWAYS
        )
        yield cluster
    finally:
        cluster.run("down")
    assert cluster.left_behind() == []


def test_the_next_clusters_read_from_redis_and_from_files(
    checkpoint: Path, redis: RedisProcess, tmp_path: Path, forks: ForkServer
) -> None:
    """The first writes to both tiers; each of the others has one of them, and computes what is no full block."""
    expected = choose_prompt(checkpoint, PROMPT_LEN, NUM_TOKENS)
    secret = tmp_path / "secret"
    secret.touch(0o600)
    secret.write_bytes(bytes(range(32)))
    shared = f'secret_file = "{secret}"\n'
    in_redis = f'[redis]\nurl = "{redis.url}"\n{COLD}'
    in_files = f'[files]\nfolder = "{tmp_path / "files"}"\n{COLD}'

    def ask(cluster: ServedCluster) -> dict[str, int]:
        """Asks for the answer, which must be right; returns the cached tokens of each tier that had any."""
        answer: dict[str, Any] = cluster.generate(expected.prompt_ids, "--max-tokens", str(NUM_TOKENS), "--ignore-eos")
        assert tuple(answer["token_ids"]) == expected.token_ids
        return {tier: num_tokens for tier, num_tokens in answer["usage"]["cached_tokens"].items() if num_tokens}

    def is_written(cluster: ServedCluster) -> bool:
        tiers = cluster.status()["tiers"]
        return all(tiers[tier]["written"] == NUM_BLOCKS for tier in ("redis", "files"))

    with started(tmp_path / "both", checkpoint, shared + in_redis + in_files, forks) as cluster:
        assert ask(cluster) == {}
        wait_until(lambda: is_written(cluster), "all blocks are in both tiers")
    with started(tmp_path / "redis", checkpoint, shared + in_redis, forks) as cluster:
        assert ask(cluster) == {"redis": 16 * NUM_PROMPT_BLOCKS}
        assert cluster.status()["tiers"]["redis"]["hits"] == NUM_PROMPT_BLOCKS
    redis.kill()
    with started(tmp_path / "files-only", checkpoint, f'{shared}[redis]\nurl = "off"\n{in_files}', forks) as cluster:
        assert ask(cluster) == {"files": 16 * NUM_PROMPT_BLOCKS}
        assert cluster.status()["tiers"]["files"]["hits"] == NUM_PROMPT_BLOCKS
