"""`baton roll` on a real Ray under streams: none is lost, refused or changed, and workers have the new settings."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from tests.cluster.served_cluster import ServedCluster, wait_until
from tests.cluster.test_scaling_under_load import LENGTHS, NUM_CLIENTS, NUM_TOKENS, Load
from tests.harness.checkpoints import choose_prompt

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]


@contextmanager
def scaled(cluster: ServedCluster) -> Iterator[None]:
    """The cluster has two workers of each role meanwhile."""
    cluster.do("scale", "--prefill", "2", "--decode", "2")
    yield
    cluster.do("scale", "--prefill", "1", "--decode", "1")


def pids(cluster: ServedCluster) -> set[int]:
    return {worker["pid"] for role in ("prefill", "decode") for worker in cluster.workers(role).values()}


def test_workers_are_rolled_under_streams_and_go_back_where_the_first_does_not_start(
    on_ray: ServedCluster, checkpoint: Path, tmp_path: Path
) -> None:
    cluster = on_ray
    load = Load(cluster.status()["address"], [choose_prompt(checkpoint, length, NUM_TOKENS) for length in LENGTHS])
    settings = tmp_path / "new.toml"
    settings.write_text("[batch]\nmax_running = 5\n[worker]\ndrain_grace_s = 20\n")
    with scaled(cluster):
        before = pids(cluster)
        with load.running():
            load.wait_for_more(NUM_CLIENTS)
            assert "all workers have revision 1" in cluster.do("roll", "--config", str(settings), "--threads", "1")
            load.wait_for_more(2 * NUM_CLIENTS)
            after = pids(cluster)
            refused = cluster.run("roll", "--grpc-port", "1")
            assert (refused.returncode, "--grpc-port: a roll does not change it" in refused.stderr) == (78, True)
            failed = cluster.run("roll", "--pool-bytes", "1")
            assert failed.returncode != 0, failed.stdout
            assert pids(cluster) == after
            load.wait_for_more(NUM_CLIENTS)
        assert [answer.choices[0].token_ids for _, answer in load.answers] == [
            prompt.token_ids for prompt, _ in load.answers
        ]
        assert (len(before), len(after), before & after) == (4, 4, set())
        assert not any(map(psutil.pid_exists, before))
        assert {worker["release"] for worker in cluster.workers("decode").values()} != {""}
        wait_until(cluster.is_sound, "all invariants hold")
