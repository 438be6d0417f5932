import json
import mmap
import os
import re
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from tests.cluster.served_cluster import SHARED_MEMORY, Command, ServedCluster, wait_until
from tests.harness.checkpoints import choose_prompt
from tests.harness.fork_server import ForkServer

BACK = re.compile("the node-[0-9a-f]{8} is back")
pytestmark = [pytest.mark.cluster, pytest.mark.timeout(180)]


def _is_right(cluster: ServedCluster, checkpoint: Path) -> bool:
    expected = choose_prompt(checkpoint, 17)
    answer = cluster.generate(expected.prompt_ids, "--max-tokens", "64", "--ignore-eos")
    return tuple(answer["token_ids"]) == expected.token_ids


def _kill(process: psutil.Process) -> None:
    process.send_signal(signal.SIGKILL)


@contextmanager
def _ordered(cluster: ServedCluster, num_decode: int) -> Iterator[Command]:
    """A `baton scale` under way, whose order the controller has taken."""
    with cluster.started("scale", "--decode", str(num_decode)) as scaling:
        record = Path(cluster.state()["run_dir"]) / "pools.json"
        wait_until(lambda: json.loads(record.read_text())["sizes"]["decode"] == num_decode, "the order is taken")
        yield scaling


def test_pools_grow_and_shrink(cluster: ServedCluster, checkpoint: Path) -> None:
    with _ordered(cluster, 6) as overtaken:  # so many that they start for longer than the next command does
        assert cluster.do("scale", "--prefill", "2", "--decode", "2") == "2 prefill and 2 decode workers\n"
        assert overtaken.communicate()[1] == "baton: overtaken by a later order: decode 2\n"
        assert overtaken.returncode == 1
    assert (len(cluster.workers("prefill")), len(cluster.workers("decode"))) == (2, 2)
    assert _is_right(cluster, checkpoint)
    pids = [worker["pid"] for role in ("prefill", "decode") for worker in cluster.workers(role).values()]
    cluster.do("scale", "--prefill", "0", "--decode", "1")
    assert sum(psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE for pid in pids) == 1
    assert _is_right(cluster, checkpoint)
    cluster.do("scale", "--prefill", "1")
    assert _is_right(cluster, checkpoint)


def test_one_worker_is_drained_and_the_last_cannot_be(cluster: ServedCluster, checkpoint: Path) -> None:
    cluster.do("scale", "--decode", "2")
    first, second = sorted(cluster.workers("decode"))
    cluster.do("drain", first)
    assert list(cluster.workers("decode")) == [second]
    refused = cluster.run("drain", second)
    assert refused.returncode == 2
    assert "at least one decode worker" in refused.stderr
    assert cluster.workers("decode")[second]["state"] == "ready"
    assert _is_right(cluster, checkpoint)


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_killed_worker_is_replaced(cluster: ServedCluster, checkpoint: Path, role: str) -> None:
    ((name, worker),) = cluster.workers(role).items()
    _kill(psutil.Process(worker["pid"]))
    assert _is_right(cluster, checkpoint)
    wait_until(lambda: bool(set(cluster.workers(role)) - {name}), "a new worker")
    assert len(cluster.workers(role)) == 1
    assert any(f"worker {name} was lost" in event["text"] for event in cluster.status()["events"])
    assert _is_right(cluster, checkpoint)


def test_the_router_and_the_node_service_come_back(cluster: ServedCluster, checkpoint: Path) -> None:
    before = cluster.status()
    _kill(cluster.actor("router"))
    wait_until(lambda: cluster.is_sound() and bool(cluster.workers("decode")), "the router is back")
    after = cluster.status()
    assert (after["address"], after["metrics_address"]) == (before["address"], before["metrics_address"])
    _kill(cluster.actor("node"))
    wait_until(lambda: bool(BACK.search(json.dumps(cluster.status()["events"]))), "the node's service is back")
    assert _is_right(cluster, checkpoint)
    wait_until(cluster.is_sound, "all invariants hold")


def test_an_arena_that_is_damaged_is_made_anew_and_workers_start_on_it(
    cluster: ServedCluster, checkpoint: Path
) -> None:
    before = cluster.status()["tiers"]["host"]["epoch"]
    (arena,) = SHARED_MEMORY.glob(f"baton-{cluster.name}-*")
    with arena.open("r+b") as file:
        file.seek(-mmap.PAGESIZE, os.SEEK_END)
        file.write(b"?")
    ((name, worker),) = cluster.workers("decode").items()
    _kill(psutil.Process(worker["pid"]))
    wait_until(lambda: bool(set(cluster.workers("decode")) - {name}), "a new worker")
    assert cluster.status()["tiers"]["host"]["epoch"] != before
    assert _is_right(cluster, checkpoint)
    wait_until(cluster.is_sound, "all invariants hold")


def test_a_killed_controller_comes_back_and_goes_on(on_ray: ServedCluster, checkpoint: Path) -> None:
    """It is Ray that starts the controller again, and that knows the actors that were left."""
    with _ordered(on_ray, 2) as scaling:
        _kill(on_ray.actor("controller"))
        assert _is_right(on_ray, checkpoint)
        assert scaling.communicate() == ("1 prefill and 2 decode workers\n", "")
    wait_until(lambda: "the controller was lost, and is back" in json.dumps(on_ray.status()["events"]), "it is back")
    first, second = sorted(on_ray.workers("decode"))
    _kill(psutil.Process(on_ray.workers("decode")[first]["pid"]))
    wait_until(lambda: len(on_ray.workers("decode").keys() - {first}) == 2, "a new worker")
    assert second in on_ray.workers("decode")
    on_ray.do("scale", "--decode", "1")
    assert _is_right(on_ray, checkpoint)
    wait_until(on_ray.is_sound, "all invariants hold")


def test_a_controller_comes_back_over_damaged_records_and_finds_its_workers(
    cluster: ServedCluster, checkpoint: Path
) -> None:
    cluster.do("scale", "--decode", "2")
    before = {role: cluster.workers(role).keys() for role in ("prefill", "decode")}
    run_dir = Path(cluster.state()["run_dir"])
    for name in ("pools", "router", "gateway-0"):
        (run_dir / f"{name}.json").write_bytes(b"\0" * 8)
    _kill(cluster.actor("controller"))
    damaged = "pools.json is damaged or lost: the pools have 1 prefill and 2 decode"
    wait_until(lambda: damaged in json.dumps(cluster.status()["events"]), "it is back")
    assert _is_right(cluster, checkpoint)
    assert {role: cluster.workers(role).keys() for role in ("prefill", "decode")} == before
    cluster.do("scale", "--decode", "1")
    wait_until(cluster.is_sound, "all invariants hold")


def test_a_controller_comes_back_over_a_key_file_that_cannot_be_used(cluster: ServedCluster, checkpoint: Path) -> None:
    keys = cluster.key_file()
    keys.write_text("{")
    try:
        _kill(cluster.actor("controller"))
        wait_until(lambda: "keys.json" in json.dumps(cluster.status()["problems"]), "the problem is told")
        assert cluster.run("status", "--check").returncode == 1
        assert _is_right(cluster, checkpoint), "the keys read last, which are none, stay in force"
        cluster.do("scale", "--decode", "1")
    finally:
        keys.unlink()
    wait_until(cluster.is_sound, "all invariants hold")


def test_the_controller_and_the_router_may_die_together(cluster: ServedCluster, checkpoint: Path) -> None:
    before = cluster.status()
    for name in ("controller", "router"):
        _kill(cluster.actor(name))
    wait_until(lambda: cluster.is_sound() and bool(cluster.workers("decode")), "both are back")
    after = cluster.status()
    assert (after["address"], after["metrics_address"]) == (before["address"], before["metrics_address"])
    assert _is_right(cluster, checkpoint)


def test_a_second_cluster_of_the_name_is_refused(cluster: ServedCluster, checkpoint: Path) -> None:
    refused = cluster.run("up", "--model", str(checkpoint), "--grpc-port", "0")
    assert refused.returncode == 78
    assert "is running: stop it with `baton down" in refused.stderr
    assert _is_right(cluster, checkpoint)


def test_a_port_in_use_is_found_at_once(
    cluster: ServedCluster, checkpoint: Path, tmp_path: Path, forks: ForkServer
) -> None:
    port = cluster.status()["address"].rpartition(":")[2]
    other = ServedCluster(f"p{os.getpid()}", tmp_path, forks=forks)
    refused = other.run("up", "--model", str(checkpoint), "--grpc-port", port)
    assert refused.returncode == 78
    assert f"port {port} cannot be had" in refused.stderr
    assert other.left_behind() == []


def test_a_ray_cluster_that_is_not_there_is_found_out_at_once(
    tmp_path: Path, checkpoint: Path, forks: ForkServer
) -> None:
    other = ServedCluster(f"a{os.getpid()}", tmp_path, forks=forks)
    refused = other.run("up", "--model", str(checkpoint), "--grpc-port", "0", "--ray-address", "127.0.0.1:1")
    assert refused.returncode == 78
    assert refused.stderr == "baton: no Ray cluster answers at 127.0.0.1:1 (Connection refused)\n"
    assert other.left_behind() == []


@pytest.fixture
def other(tmp_path: Path) -> Iterator[ServedCluster]:
    """A cluster on Ray that a test starts, of whose processes, Ray's among them, nothing may be left."""
    served = ServedCluster(f"o{os.getpid()}", tmp_path)
    yield served
    served.run("down")


@contextmanager
def _starting(cluster: ServedCluster, checkpoint: Path, until: str) -> Iterator[Command]:
    """A start that has printed a line which begins with `until`."""
    with cluster.started("up", "--model", str(checkpoint), "--grpc-port", "0") as starting:
        assert starting.stdout is not None
        assert any(line.startswith(until) for line in starting.stdout)
        yield starting


def test_a_start_that_was_killed_leaves_what_down_removes(other: ServedCluster, checkpoint: Path) -> None:
    with _starting(other, checkpoint, "model ") as starting:
        starting.kill()
        starting.communicate()
    assert other.left_behind() != []
    other.do("down")
    assert other.left_behind() == []
    assert other.do("down") == f"no cluster named {other.name} is running\n"


def test_a_start_that_is_interrupted_leaves_nothing(other: ServedCluster, checkpoint: Path) -> None:
    with _starting(other, checkpoint, "model ") as starting:
        for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM, signal.SIGINT):
            starting.send_signal(number)
        _, told = starting.communicate(timeout=100)
    assert (starting.returncode, told) == (130, "")
    assert other.left_behind() == []


def test_a_start_whose_ray_is_told_to_end_says_so(other: ServedCluster, checkpoint: Path) -> None:
    with _starting(other, checkpoint, "arena ") as starting:
        psutil.Process(other.state()["head"]["pid"]).terminate()
        _, told = starting.communicate(timeout=100)
    assert (starting.returncode, told) == (78, "baton: the process of Ray was told to end (SIGTERM)\n")
    assert other.left_behind() == []


def test_a_start_that_fails_leaves_nothing(tmp_path: Path, forks: ForkServer) -> None:
    other = ServedCluster(f"f{os.getpid()}", tmp_path, forks=forks)
    refused = other.run("up", "--model", str(tmp_path), "--grpc-port", "0")
    assert refused.returncode == 78
    assert "config.json is missing" in refused.stderr
    assert other.left_behind() == []
