"""A cluster of forked processes is what other tests take it for: real processes, forked from one thread, that end."""

import os
import signal
from pathlib import Path

import psutil
import pytest

from deploy.processes.process import recorded_living
from tests.cluster.served_cluster import ServedCluster, wait_until
from tests.harness.fork_server import ForkServer

pytestmark = pytest.mark.cluster


def test_no_thread_is_forked_and_no_ray_runs(cluster: ServedCluster, forks: ForkServer) -> None:
    head = psutil.Process(cluster.state()["head"]["pid"])
    assert [psutil.Process(forks.pid).num_threads(), head.num_threads()] == [1, 1]
    actors = head.children(recursive=True)
    assert {one.pid for one in actors} >= {
        cluster.actor(name).pid for name in ("controller", "router", "node", "decode")
    }
    assert not [one for one in actors if one.name() in ("gcs_server", "raylet")]


def test_a_stopped_actor_is_silent_and_a_killed_one_is_lost(cluster: ServedCluster) -> None:
    [(name, worker)] = cluster.workers("decode").items()
    process = psutil.Process(worker["pid"])
    process.send_signal(signal.SIGSTOP)
    assert name in cluster.workers("decode")
    process.kill()
    wait_until(lambda: any(f"worker {name} was lost" in one["text"] for one in cluster.status()["events"]), "its loss")
    wait_until(lambda: bool(cluster.workers("decode")), "a new worker")


def test_actors_end_with_their_head(tmp_path: Path, forks: ForkServer) -> None:
    other = ServedCluster(f"q{os.getpid()}", tmp_path, forks=forks)
    other.do("up", "--prefill", "0", "--grpc-port", "0", "--redis-url", "off")
    run_dir = Path(other.state()["run_dir"])
    assert len(recorded_living(run_dir)) == 5
    psutil.Process(other.state()["head"]["pid"]).kill()
    wait_until(lambda: not recorded_living(run_dir), "the end of all actors")
    other.run("down")
    assert other.left_behind() == []
